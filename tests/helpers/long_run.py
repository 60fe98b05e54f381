"""A run of many steps against a server, in a process of its own: ``long_run.py <folder> <URL of the server> <steps>``.

About 160 responses of 30 tokens a step are 0.11 MiB of samples: kept by mistake, they would show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import sglang_cases as cases
import tiny_runs

from brorl_jax import train, xla
from brorl_jax.data.tokenizer import train_tokenizer
from brorl_jax.models import hf


def config(folder: Path, url: str, steps: int):
    """A reference, carried groups, evaluations, checkpoints, TensorBoard.

    Learning rate 0, since the fake server knows models of one kind only.
    """
    train_tokenizer(["say 10"], cases.VOCAB, folder / "tokenizer")
    hf.save_pretrained(folder / "model", cases.QWEN3, cases.table_weights(), folder / "tokenizer")
    c = tiny_runs.config(folder, prompts=40, **{"rollout.engine": "sglang", "model.path": str(folder / "model")})
    c.rollout.update(n=32, max_tokens=32, stop_ids=())
    c.rollout.sglang.update(urls=(url,), weights_dir=str(folder / "weights"))
    c.data.max_prompt_tokens = 24
    c.filter.oversample = 1.5
    c.algo.kl.coef = 1e-2
    c.optim.lr = 0.0
    c.batch.update(slots=4, rows=32, row_tokens=32)
    c.grading.cache = 1000  # full before it is looked at
    c.train.steps = steps
    c.eval.update(every=25, samples=2)
    c.checkpoint.update(every=25, keep=2)
    c.diagnostics.mass_balance_every = 0  # compiles another program when the data asks for one
    c.log.tensorboard = True
    return c


if __name__ == "__main__":
    xla.set_cpu_flags(fast_compile=True)
    where, address, number = sys.argv[1:]
    train.run(config(Path(where), address, int(number)), Path(where) / "run")
