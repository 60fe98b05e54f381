"""BroRL's arm: 128 prompts x 512 rollouts per step, 16,384 tokens of context.

Paper: BroRL, arXiv 2510.01180, tables 1 to 5 (arm "BroRL"). Every value is tagged here or in
_paper.py as the paper's, a public re-implementation's, or ours where nobody published one.

Hardware: the paper used 64 H100.
Time and result, published: 191 steps in 173.8 h; math 63.03, code 54.20, reasoning-gym 63.09 (start: 61.69, 52.00,
61.29). With this package: unknown, never run. The data mix is not the paper's (see _paper.py).
Data: four prepared sets, see _paper.py; reasoning-gym makes the fifth family.
Command: python -m brorl_jax.main --config=configs/brorl_n512.py --workdir=runs/brorl_n512
Look first: python -m brorl_jax.main --config=configs/brorl_n512.py --dry_run
"""

import _paper


def get_config():
    """The shared recipe with many rollouts on fewer prompts."""
    config = _paper.base()
    config.name = "brorl-n512"
    config.rollout.prompts_per_step = 128  # [P]
    config.rollout.n = 512  # [P]
    config.train.steps = 191  # [P] the last row of table 1
    return config
