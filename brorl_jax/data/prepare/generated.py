"""Training sets that are made, not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from brorl_jax.data.prepare.families import TAG, Item, Row, family
from brorl_jax.rewards import reasoning_gym as gym

_SIZE = 400  # rows a task; [V1] 37k rows of 96 tasks


def _reasoning_gym_rows(size: int, seed: int, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    size = size or _SIZE
    for task in _tasks(chosen):
        gym.dataset(task, {}, seed, size)  # says what is wrong with the task before any row is made
        for index in range(size):
            meta = {"task": task, "params": {}, "seed": seed, "size": size, "index": index}
            yield {**gym.entry(meta), "meta": meta}


def _tasks(chosen: Sequence[str]) -> list[str]:
    """The tasks named, or of the groups named; all but the cheatable ones by default.

    Raises:
        ValueError: reasoning-gym has no such task or group.
    """
    import reasoning_gym  # noqa: F401  # takes seconds; registers the tasks
    from reasoning_gym.factory import DATASETS

    group = {task: entry[0].__module__.split(".")[1] for task, entry in DATASETS.items() if task != "composite"}
    usable = sorted(task for task in group if task not in gym.CHEATABLE)
    if unknown := set(chosen) - group.keys() - set(group.values()):
        raise ValueError(
            f"reasoning-gym has neither task nor group {', '.join(sorted(unknown))}; its groups: "
            f"{', '.join(sorted(set(group.values())))}"
        )
    named = [task for task in chosen if task in group]
    return sorted({*named, *(task for task in usable if not chosen or group[task] in chosen)})


@family(
    "reasoning_gym",
    verifier="reasoning_gym",
    prompt=TAG,
    licence="Apache-2.0",
    about="[V1] puzzles of the reasoning-gym package; --tasks names tasks or groups, such as arithmetic",
    generate=_reasoning_gym_rows,
)
def reasoning_gym(row: Row) -> Item:
    meta = row["meta"]
    gold = "" if row["answer"] is None else str(row["answer"])
    return Item(row["question"], gold, key=f"{meta['task']}-{meta['seed'] + meta['index']}", meta=meta)
