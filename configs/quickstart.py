"""Learns sums of numbers up to three digits from scratch, on two CPU cores.

Task: reasoning-gym `basic_arithmetic`, two terms, addition only, answered with the bare number. A new model (width 128,
3 layers) gets a short supervised warm start until some of a prompt's rollouts are right and some wrong, then
reinforcement learning on prompts it has not seen; evaluation is on a third, held-out set.

Hardware: two CPU cores, no accelerator, no network.
Time and result: not yet measured.
Command: make quickstart
     or: python -m brorl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
"""

from brorl_jax.config import default, source


def _sums(seed: int, size: int):
    """Sums of two numbers; item i is made from seed + i, so the ranges must not meet."""
    return source(
        "reasoning_gym",
        task="basic_arithmetic",
        params={
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 3,
            "max_digits": 3,
            "operators": ("+",),
            "allow_parentheses": False,
            "allow_negation": False,
        },
        seed=seed,
        size=size,
        verifier="reasoning_gym_strict:whole",
    )


def get_config():
    """All values are ours, chosen by measurement on two cores."""
    config = default()
    config.name = "quickstart"

    config.data.warmup.sums = _sums(seed=1_000_000, size=100_000)
    config.data.train.sums = _sums(seed=2_000_000, size=100_000)
    config.data.eval.sums = _sums(seed=0, size=256)
    config.data.max_prompt_tokens = 24

    config.rollout.prompts_per_step = 64
    config.rollout.n = 16
    config.rollout.max_tokens = 6
    config.rollout.local.rows = 1024
    config.rollout.local.chunk = 6
    config.filter.max_generation_batches = 3

    config.algo.updates_per_step = 1
    config.algo.loss = "reinforce"
    config.algo.kl.coef = 0.0
    config.algo.mismatch.kind = "none"

    config.optim.lr = 2e-4
    config.optim.base_samples = 1024
    config.optim.lr_rule = "constant"
    config.optim.warmup_steps = 8  # without it the first updates lose a quarter of what the warm start learned
    config.optim.b2 = 0.95

    config.batch.slots = 64
    config.batch.rows = 16
    config.batch.row_tokens = 6

    config.warmup.steps = 320
    config.warmup.batch = 256
    config.warmup.lr = 1e-3

    config.train.steps = 80
    config.eval.every = 20
    config.eval.samples = 4
    config.eval.temperature = 1.0
    config.eval.top_p = 1.0
    config.checkpoint.every = 20
    return config
