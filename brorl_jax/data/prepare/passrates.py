"""How often a policy solved each prompt, from what a run leaves on disk: the difficulty that a filter goes by."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brorl_jax.metrics import read_jsonl

PATTERNS = ("step_*.json", "prompts.jsonl", "step_*.jsonl.gz")


def read(paths: Iterable[str | Path]) -> dict[str, float]:
    """Mean raw reward of every prompt, over all its scored samples in all the files.

    Args:
        paths: Evaluations (``eval/step_*.json`` of a run, ``prompts.jsonl`` of one by itself), rollouts
            (``rollouts/step_*.jsonl.gz``), or directories of them, such as a run's own.

    Returns:
        By the row's id: a prompt's id in a run is ``<source in the config>/<row id>``.

    Raises:
        ValueError: a file is missing or neither; nothing is measured.
    """
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for path in paths:
        for prompt_id, rewards in _measurements(Path(path).expanduser()):
            row = prompt_id.partition("/")[2]
            for reward in rewards:
                if reward is not None:
                    total[row] += reward
                    count[row] += 1
    if not count:
        raise ValueError("no sample with a reward in the pass-rate files; give a run's eval/ or rollouts/")
    return {row: total[row] / count[row] for row in count}


def _measurements(path: Path) -> Iterator[tuple[str, list[float | None]]]:
    if path.is_dir():
        files = sorted(file for pattern in PATTERNS for file in path.rglob(pattern))
        files = [file for file in files if file.parent.name != "superseded"]  # of steps that a resume did again
        if not files:
            raise ValueError(f"{path} holds neither evaluations nor rollouts ({', '.join(PATTERNS)})")
        for file in files:
            yield from _measurements(file)
        return
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} with pass rates")
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
                for row in map(json.loads, lines):
                    yield row["prompt_id"], [row["reward"]]
        else:
            alone = path.suffix == ".jsonl"  # grows by a line a prompt; a kill may have left half of one
            for row in read_jsonl(path)[0] if alone else json.loads(path.read_text(encoding="utf-8"))["prompts"]:
                yield row["prompt_id"], row["rewards"]
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is neither an evaluation nor a rollout file of a run ({type(error).__name__}: {error})"
        ) from error


def interval(text: str) -> tuple[float, float]:
    """``"0.05:0.95"`` as numbers.

    Raises:
        ValueError: not two numbers in order within [0, 1].
    """
    low, colon, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (1.0, 0.0)
    if not colon or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise ValueError(f"--keep {text}: give LOW:HIGH with 0 <= LOW <= HIGH <= 1, such as 0.05:0.95")
    return bounds


def verdict(rates: Mapping[str, float], row: Mapping[str, Any], keep: tuple[float, float], unmeasured: str) -> str:
    """Why the row is left out (``too_hard``, ``too_easy``, ``unmeasured``), "" if it is kept; both bounds are kept."""
    rate = rates.get(row["id"])
    if rate is None:
        return "unmeasured" if unmeasured == "drop" else ""
    return "too_hard" if rate < keep[0] else "too_easy" if rate > keep[1] else ""
