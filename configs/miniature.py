"""The quickstart's model and task under the paper's recipe: what `experiments/miniature.py` runs.

This file is its N = 16 stage: a warm start, then PPO-clip with clip-higher, REINFORCE++-baseline, a KL penalty and four
updates a step, until held-out pass@1 has had no new best for six evaluations. The arms that go on from its weights are
those of `configs/sweeps/n_paper.py`.

Hardware: two CPU cores. The whole (three seeds, two arms) has not been run yet. One trial of this stage (400 steps,
seed 0, one of two busy cores of an AMD EPYC, `python -m brorl_jax.main --config=configs/miniature.py`): pass@1 48.0 %
after the warm start, 79.1 % at step 100, 87.5 % at 200, 95.5 % at 400, so N = 16 stalls near full marks only. With
`--config.optim.lr=3e-4`: 65.8 %, 82.6 % and 90.1 %, at times falling by 10 points between two evaluations.
Command: make miniature
"""

from configs import quickstart


def get_config():
    """Ours, but for what is tagged as in `brorl_jax/config.py`."""
    config = quickstart.get_config()
    config.name = "prorl"
    config.rollout.prompts_per_step = 32
    config.rollout.n = 16  # [V1]
    config.rollout.local.rows = 512

    config.algo.updates_per_step = 4  # [V1]
    config.algo.loss = "ppo_clip"  # [P]
    config.algo.eps_low = 0.2  # [V2]
    config.algo.eps_high = 0.28  # [V2]
    config.algo.kl.estimator = "k2"  # [V2]
    config.algo.kl.coef = 1e-4  # [NR][OR]

    config.optim.lr = 1e-4
    config.optim.base_samples = 512
    config.optim.lr_rule = "sqrt"  # [P]

    config.batch.slots = 8
    config.batch.rows = 16
    config.train.steps = 600
    config.train.stop_stalled = 6
    config.eval.every = 20
    config.checkpoint.every = 20
    config.log.rollouts = False
    return config
