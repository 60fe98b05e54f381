"""Evaluation: sample, grade, one row per prompt. Inside training, and by ``python -m brorl_jax.evaluate``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brorl_jax import assemble, atomic, processes
from brorl_jax.collect import graded
from brorl_jax.config import Config
from brorl_jax.data.tokenizer import Tokenizer
from brorl_jax.metrics import PhaseTimer, plain, read_jsonl
from brorl_jax.rewards.service import Grader
from brorl_jax.rollout.api import Engine, Sampling, request
from brorl_jax.scores import Row, in_order, metrics
from brorl_jax.types import Prompt

EVAL_STEP = -1  # in place of the training step in sample seeds: the same draws at every evaluation


def evaluate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    samples: int,
    sampling: Sampling,
    grader: Grader,
    seed: int,
    skip: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Samples and grades held-out prompts with the weights last published; yields each as it is done, in any order.

    Args:
        prompts: By source.
        skip: Ids of prompts that are done already.
    """
    for source, chosen in prompts.items():
        requests = [request(p, samples, run_seed=seed, step=EVAL_STEP) for p in chosen if p.id not in skip]
        for group in graded(engine, tokenizer, requests, sampling, grader, PhaseTimer(), check):
            yield Row.of(group, source)


def held_out_scores(
    config: Config,
    tokenizer: Tokenizer,
    engine: Engine,
    grader: Grader,
    prompts: Mapping[str, Sequence[Prompt]],
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[Row]]:
    """Metrics and rows of an evaluation as ``config`` wants it, with the weights last published.

    Of several processes, each samples its share of the prompts; all get the whole. ``check`` raises to end it early.
    """
    own = list(
        evaluate(
            engine,
            tokenizer,
            {name: processes.share(chosen) for name, chosen in prompts.items()},
            samples=config.eval.samples,
            sampling=assemble.eval_sampling(config, tokenizer),
            grader=grader,
            seed=config.seed,
            check=check,
        )
    )
    parts = processes.gather(own, "an evaluation", _encode, _decode)
    rows = [row for part in parts for row in part]
    return metrics(rows, {name: source.heading for name, source in config.data.eval.items()}), rows


def _encode(rows: list[Row]) -> bytes:
    return json.dumps([row.to_json() for row in rows]).encode()


def _decode(data: bytes) -> list[Row]:
    return [Row.from_json(row) for row in json.loads(data)]


def write(workdir: str | os.PathLike[str], step: int, figures: Mapping[str, float], rows: Sequence[Row]) -> Path:
    """Writes ``<workdir>/eval/step_<step>.json``: the metrics and every prompt's row. Atomic."""
    directory = Path(workdir) / "eval"
    directory.mkdir(parents=True, exist_ok=True)
    prompts = [row.to_json() for row in in_order(rows)]
    content = {"step": step, "metrics": {k: plain(v) for k, v in figures.items()}, "prompts": prompts}
    return write_json(directory / f"step_{step:06d}.json", content)


def write_json(path: Path, content: Any) -> Path:
    """Writes ``content`` whole or not at all."""
    atomic.write_text(path, json.dumps(content))
    return path


def read(directory: str | os.PathLike[str]) -> list[Row]:
    """The rows of an evaluation: of ``<directory>/prompts.jsonl``, or of a training run's last one.

    Raises:
        ValueError: There is no evaluation in it, or a file of another kind in its place.
    """
    directory = Path(directory)
    single = directory / "prompts.jsonl"
    inside = sorted((directory / "eval").glob("step_*.json"))
    if not single.exists() and not inside:
        raise ValueError(f"{directory} holds no evaluation: neither prompts.jsonl nor eval/step_*.json")
    file = single if single.exists() else inside[-1]
    try:
        rows = read_jsonl(file)[0] if file == single else json.loads(file.read_text())["prompts"]
        return [Row.from_json(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not what an evaluation writes ({type(error).__name__}: {error})") from error
