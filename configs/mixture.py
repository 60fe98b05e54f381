"""Two families from scratch, on two CPU cores: sums (right or wrong) and spelling backward (partial credit).

The quickstart's model and recipe; what differs is the data. Of three prompts two are sums, judged by the `numeric`
verifier on the bare number, and one is a word to be spelled backward, judged by reasoning-gym's own continuous score.
Every source keeps its share to within one prompt at any time, through every resume; each has its own
`source/<name>/...` figures in metrics.jsonl, its own panel in the report and its own held-out accuracy.

Hardware: two CPU cores, no accelerator, no network.
Time and result: not yet measured at full length.
Command: python -m brorl_jax.main --config=configs/mixture.py --workdir=runs/mixture
"""

from brorl_jax.config import default, source

SHARES = {"sums": 2.0, "backward": 1.0}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ("+",)}
TASKS = {
    "sums": {
        "task": "basic_arithmetic",
        "params": {**SUMS, "allow_parentheses": False, "allow_negation": False},
        "verifier": "numeric:whole",
    },
    "backward": {
        "task": "spell_backward",
        "params": {"min_word_len": 3, "max_word_len": 4},
        "verifier": "reasoning_gym:whole",
    },
}


def get_config():
    """All values are ours; those of the quickstart where nothing is said."""
    config = default()
    config.name = "mixture"
    for name, task in TASKS.items():  # item i is made from seed + i, so the ranges must not meet
        common = {"kind": "reasoning_gym", **task, "weight": SHARES[name]}
        config.data.warmup[name] = source(**common, seed=1_000_000, size=100_000)
        config.data.train[name] = source(**common, seed=2_000_000, size=100_000)
        config.data.eval[name] = source(**common, seed=0, size=128)
    config.data.max_prompt_tokens = 48

    config.rollout.prompts_per_step = 48
    config.rollout.n = 16
    config.rollout.max_tokens = 8
    config.rollout.local.rows = 768
    config.rollout.local.chunk = 8
    config.filter.max_generation_batches = 3

    config.algo.updates_per_step = 1
    config.algo.loss = "reinforce"
    config.algo.kl.coef = 0.0
    config.algo.mismatch.kind = "none"

    config.optim.lr = 2e-4
    config.optim.base_samples = 768
    config.optim.lr_rule = "constant"
    config.optim.b2 = 0.95

    config.batch.slots = 48
    config.batch.rows = 16
    config.batch.row_tokens = 8

    config.warmup.steps = 320
    config.warmup.batch = 256
    config.warmup.lr = 1e-3

    config.train.steps = 60
    config.eval.every = 20
    config.eval.samples = 4
    config.eval.temperature = 1.0
    config.eval.top_p = 1.0
    config.checkpoint.every = 20
    return config
