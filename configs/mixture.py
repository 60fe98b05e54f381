"""Two families from scratch, on two CPU cores: sums (right or wrong) and spelling backward (partial credit).

The quickstart's model and recipe; what differs is the data. Of three prompts two are sums, judged by the `numeric`
verifier on the bare number, and one is a word to be spelled backward, judged by reasoning-gym's own continuous score.
Every source keeps its share to within one prompt at any time, through every resume; each has its own
`source/<name>/...` figures in metrics.jsonl, its own panel in the report and its own held-out accuracy.

Hardware: two CPU cores, no accelerator, no network.
Time and result: not yet measured at full length.
Command: python -m brorl_jax.main --config=configs/mixture.py --workdir=runs/mixture
"""

import quickstart

from brorl_jax.config import source


def _backward(seed: int, size: int):
    """Words of three and four letters; item i is made from seed + i, so the ranges must not meet."""
    params = {"min_word_len": 3, "max_word_len": 4}
    return source(
        "reasoning_gym", task="spell_backward", params=params, seed=seed, size=size, verifier="reasoning_gym:whole"
    )


def get_config():
    """All values are ours; those of the quickstart where nothing is said."""
    config = quickstart.get_config()
    config.name = "mixture"
    for stage in ("warmup", "train", "eval"):
        config.data[stage].sums.verifier = "numeric:whole"
        config.data[stage].sums.weight = 2.0
    config.data.warmup.backward = _backward(seed=1_000_000, size=100_000)
    config.data.train.backward = _backward(seed=2_000_000, size=100_000)
    config.data.eval.backward = _backward(seed=0, size=128)
    config.data.max_prompt_tokens = 48
    config.warmup.steps = 900
    return config
