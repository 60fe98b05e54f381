"""Training sets that are made, not read: the procedural sources, as rows that can be cleaned and filtered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from brorl_jax.data import procedural
from brorl_jax.data.prepare.families import TAG, Item, Row, family
from brorl_jax.rewards.reasoning_gym import CATEGORIES

_PER_TASK = 400  # [V1] 37k rows of 96 tasks
_INSTRUCTIONS = 10_000  # [V1]


def _rows(source: Any, name: str) -> Iterator[dict[str, Any]]:
    for index in range(len(source)):
        record = source[index]
        key = f"{name}{source.seed + index}"
        yield {"question": record.question, "gold": record.gold, "key": key, "meta": record.meta}


def _item(row: Row) -> Item:
    return Item(row["question"], row["gold"], key=row["key"], meta=row["meta"])


def _reasoning_gym_rows(size: int, seed: int, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    tasks = {task for name in chosen or CATEGORIES for task in CATEGORIES.get(name, (name,))}
    for task in sorted(tasks):
        yield from _rows(procedural.ReasoningGym(task=task, size=size or _PER_TASK, seed=seed), f"{task}-")


@family(
    "reasoning_gym",
    verifier="reasoning_gym",
    prompt=TAG,
    licence="Apache-2.0",
    about="ProRL's puzzles, of the reasoning-gym package; --tasks names tasks or categories, such as arithmetic",
    generate=_reasoning_gym_rows,
)
def reasoning_gym(row: Row) -> Item:
    return _item(row)


def _instructions_rows(size: int, seed: int, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    if chosen:
        raise ValueError(f"instructions has no tasks to choose from, got --tasks {' '.join(chosen)}")
    yield from _rows(procedural.Instructions(size=size or _INSTRUCTIONS, seed=seed), "")


@family(
    "instructions",
    verifier="ifeval",
    licence="Apache-2.0",
    about="writing tasks with verifiable instructions, made here; where nemotron_if can't be had",
    generate=_instructions_rows,
)
def instructions(row: Row) -> Item:
    return _item(row)
