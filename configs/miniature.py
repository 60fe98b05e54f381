"""The paper's recipe on problems that N = 16 stops improving on: what `experiments/miniature.py` runs.

Two families with the quickstart's model: sums of two-digit numbers, which it learns, and products of two-digit numbers,
which it gets right about one time in 25 and which a group of 16 mostly gets all wrong. This file is the N = 16 stage: a
warm start, then PPO-clip with clip-higher, REINFORCE++-baseline, a KL penalty and four updates a step, until held-out
pass@1 has had no new best for four evaluations. The arms that go on from its weights are those of
`configs/sweeps/n_paper.py`.

Hardware: two CPU cores, about an hour for a seed on busy ones.
Result: experiments/results/miniature/. Pass@1 26 to 32 % after the warm start, 45 to 50 % where three seeds stopped
improving (seed 0: sums 59.8 -> 90 %, products 4.3 -> 4 to 5 %).
On sums alone there is no such plateau: 79.1 % at step 100, 95.5 % at 400.
Command: make miniature
"""

from configs import quickstart

PRODUCTS = 7_000_000  # their items are made from other seeds than those of the sums


def get_config():
    """Ours, but for what is tagged as in `brorl_jax/config.py`."""
    config = quickstart.get_config()
    config.name = "prorl"
    for stage in ("warmup", "train", "eval"):
        products = config.data[stage].sums.copy_and_resolve_references()
        products.params.operators = ("*",)
        products.seed += PRODUCTS
        config.data[stage].products = products
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
    config.warmup.until = 0.25
    config.train.steps = 600
    config.train.stop_stalled = 4
    config.eval.every = 20
    config.eval.max_prompts = 128
    config.eval.samples = 8
    config.checkpoint.every = 20
    config.log.rollouts = False
    return config
