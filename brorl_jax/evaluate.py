"""Held-out evaluation: sample, grade, average."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from brorl_jax.collect import rollouts
from brorl_jax.data.tokenizer import Tokenizer
from brorl_jax.metrics import PhaseTimer, plain
from brorl_jax.rewards.service import Grader
from brorl_jax.rollout.api import Engine, Sampling, request
from brorl_jax.types import Finish, Group, Prompt

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
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, list[Group]]]:
    """Samples and grades every held-out prompt with the weights last published.

    ``pass@1`` of a source is the mean raw reward over its prompts and their ``samples`` responses (avg@k); of the run,
    the mean over its sources. Samples without a score (grader errors, timeouts, aborts) count neither way.

    Returns:
        Metrics under ``eval/``, and the graded groups by source.
    """
    groups: dict[str, list[Group]] = {}
    metrics: dict[str, float] = {}
    for source, chosen in prompts.items():
        requests = [request(p, samples, run_seed=seed, step=EVAL_STEP) for p in chosen]
        groups[source] = rollouts(engine, tokenizer, requests, sampling, grader, PhaseTimer(), check)
        scored = [s for g in groups[source] for s in g.scored]
        means = [np.mean([s.reward for s in g.scored]) for g in groups[source] if g.scored]
        metrics[f"eval/{source}/pass@1"] = float(np.mean(means)) if means else float("nan")
        metrics[f"eval/{source}/length"] = float(np.mean([len(s.tokens) for s in scored])) if scored else float("nan")
        truncated = [s.finish is Finish.LENGTH for s in scored]
        metrics[f"eval/{source}/truncated_rate"] = float(np.mean(truncated)) if truncated else float("nan")
    for name in ("pass@1", "length"):
        metrics[f"eval/{name}"] = float(np.mean([metrics[f"eval/{source}/{name}"] for source in prompts]))
    return metrics, groups


def write(
    workdir: str | os.PathLike[str], step: int, metrics: Mapping[str, float], groups: dict[str, list[Group]]
) -> Path:
    """Writes ``<workdir>/eval/step_<step>.json``: the metrics and every prompt's rewards and lengths. Atomic."""
    directory = Path(workdir) / "eval"
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "prompt_id": g.prompt.id,
            "source": source,
            "rewards": [s.reward if s.status and s.status.scored else None for s in g.samples],
            "lengths": [len(s.tokens) for s in g.samples],
            "finish": [str(s.finish) for s in g.samples],
        }
        for source, chosen in groups.items()
        for g in chosen
    ]
    path = directory / f"step_{step:06d}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        json.dumps({"step": step, "metrics": {k: plain(v) for k, v in metrics.items()}, "prompts": rows})
    )
    os.replace(temporary, path)
    return path
