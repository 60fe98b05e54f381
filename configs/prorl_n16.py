"""The paper's control arm: ProRL continued, 512 prompts x 16 rollouts per step, 16,384 tokens of context.

Paper: BroRL, arXiv 2510.01180, tables 1 to 5 (arm "ProRL"). Differs from brorl_n512.py in prompts,
N and the number of steps alone; the learning rate follows from the samples per step.

Hardware: the paper used 64 H100.
Time and result, published: 535 steps in 133.8 h; math 62.02, code 52.74, reasoning-gym 61.45 (start: 61.69, 52.00,
61.29). With this package: unknown, never run. The data mix is not the paper's (see _paper.py).
Data: four prepared sets, see _paper.py; reasoning-gym makes the fifth family.
Command: python -m brorl_jax.main --config=configs/prorl_n16.py --workdir=runs/prorl_n16
Look first: python -m brorl_jax.main --config=configs/prorl_n16.py --dry_run
"""

import _paper


def get_config():
    """The shared recipe with few rollouts on many prompts."""
    config = _paper.base()
    config.name = "prorl-n16"
    config.rollout.prompts_per_step = 512  # [P]
    config.rollout.n = 16  # [P]
    config.train.steps = 535  # [P] the last row of table 1
    return config
