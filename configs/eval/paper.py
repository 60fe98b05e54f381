"""The paper's evaluation: 16 samples at temperature 0.6, top_p 0.95, 32k tokens [P], on every benchmark at hand.

``--config=configs/eval/paper.py`` looks for prepared benchmarks in ``data/``, ``...paper.py:FOLDER`` elsewhere; what is
not there is left out. Each is prepared once, from the hub or from a file:

    python -m brorl_jax.data.prepare aime24 --out data/aime24 [--from aime24.jsonl]

Reasoning Gym needs no files: 100 items of each task [V1], under the paper's eleven categories.
Hardware: a model of 1.5 B parameters wants a GPU and an SGLang server (``--config.rollout.engine=sglang``).
Command: python -m brorl_jax.evaluate --config=configs/eval/paper.py --checkpoint=runs/brorl_n512
"""

import pathlib

from brorl_jax.config import default, source
from brorl_jax.rewards.reasoning_gym.categories import CATEGORIES

BENCHMARKS = {  # by the heading that they are averaged under
    "math": ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"),  # [P] Table 3
    "code": ("apps", "codecontests", "codeforces", "taco"),  # [P] Table 4
    "code_short": ("humanevalplus", "mbppplus"),  # [V1]
    "grade_school": ("gsm8k_test",),  # ours
    "instructions": ("ifeval",),  # [V1]
    "stem": ("gpqa",),  # [V1]
}
GYM_PROMPT = "{question}\nGive the final answer within <answer> </answer> tags."  # [V1] the tags; the sentence is ours


def get_config(folder="data"):
    """Values are the paper's [P] where nothing is said."""
    config = default()
    config.name = "paper"
    for heading, names in BENCHMARKS.items():
        for name in names:
            path = pathlib.Path(folder) / name
            if path.exists():
                config.data.eval[name] = source("prepared", path=str(path), heading=heading)
    for category, tasks in CATEGORIES.items():
        for task in tasks:
            config.data.eval[task] = source(
                "reasoning_gym",
                task=task,
                prompt=GYM_PROMPT,
                verifier="reasoning_gym:tag",
                seed=0,
                size=100,
                heading=f"reasoning_gym/{category}",
            )
    config.data.max_prompt_tokens = 4096  # ours: no prompt of these sets is longer in Qwen's tokens
    config.rollout.max_tokens = 32_768 - 4096
    config.rollout.local.rows = 256  # ours
    config.rollout.local.chunk = 32  # ours
    config.eval.samples = 16
    config.eval.temperature = 0.6
    config.eval.top_p = 0.95
    config.model.compute_dtype = "bfloat16"  # ours
    return config
