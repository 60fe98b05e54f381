r"""SmolLM2-135M-Instruct on the grade-school problems of GSM8K: the whole path of a real run, at the smallest size.

Prepared data, a chat template, answers in an agreed place. The model solves few of these problems, so few groups are
mixed and a step learns from few prompts: two cores show here that the path works, not what it can teach.

Hardware: two CPU cores, about 8 GiB of memory; float32, which is faster than bfloat16 there.
Time and result: not yet measured.
Command: make models/smollm2-135m/config.json
         ASK='{question} End with a line that says "Answer:" and the number alone.'
         python -m brorl_jax.data.prepare gsm8k --split test --out data/gsm8k_test \
             --verifier numeric:answer_line --prompt "$ASK"
         python -m brorl_jax.data.prepare gsm8k --out data/gsm8k --against data/gsm8k_test/data.jsonl \
             --verifier numeric:answer_line --prompt "$ASK"
         python -m brorl_jax.main --config=configs/smollm2_gsm8k.py --workdir=runs/smollm2_gsm8k
The second and third need the `hub` extra and a network; without, name GSM8K's own files with --from.
"""

from brorl_jax.config import default, source


def get_config():
    """All values are ours."""
    config = default()
    config.name = "smollm2-gsm8k"
    config.model.path = "models/smollm2-135m"
    config.model.remat = "full"

    config.data.train.gsm8k = source("prepared", path="data/gsm8k")
    config.data.eval.gsm8k = source("prepared", path="data/gsm8k_test")
    config.data.max_prompt_tokens = 256

    config.rollout.prompts_per_step = 4
    config.rollout.n = 16
    config.rollout.max_tokens = 128
    config.rollout.local.rows = 64
    config.rollout.local.chunk = 32
    config.filter.dynamic = False  # most groups are all wrong: a search for mixed ones would cost minutes a step

    config.algo.updates_per_step = 1
    config.optim.lr = 1e-5
    config.optim.base_samples = 64
    config.optim.lr_rule = "constant"

    config.batch.slots = 1
    config.batch.rows = 4
    config.batch.row_tokens = 128

    config.train.steps = 10
    config.train.rehearse = False  # so small a batch fits
    config.eval.every = 5
    config.eval.max_prompts = 32
    config.eval.samples = 1
    config.eval.temperature = 0.0
    config.eval.top_p = 1.0
    config.checkpoint.every = 5
    return config
