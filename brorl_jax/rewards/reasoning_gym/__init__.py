"""The tasks of reasoning-gym, with the traps taken out.

A task's items and its scorer come from the package; :mod:`.rescored` replaces the scorers that can be cheated, that
raise, or that run what the policy wrote, :mod:`.categories` names the tasks' categories.

The scorer of the configured data set is used, not ``get_score_answer_fn(task)``: that one builds the task with its
default configuration, and several scorers (decimal_arithmetic, ...) read the configuration. The entry that a scorer
needs is rebuilt from ``prompt.meta``: tasks are pure functions of (parameters, seed, index).
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from brorl_jax.rewards.reasoning_gym.categories import CATEGORIES, category
from brorl_jax.rewards.reasoning_gym.rescored import FLOOR, RESCORED, RIGHT, own, plain
from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt

__all__ = ["CATEGORIES", "HASH_DEPENDENT", "LEFT_OUT", "category", "check_task", "dataset", "entry"]

LEFT_OUT = {
    "propositional_logic": "repeating a premise scores 1.0, and so does joining two of them",
    "composite": "it mixes other tasks; give each task, or a category, a source of its own",
}
HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
_LONGEST = 10_000  # characters; no task needs such an answer unless its own is as long


def check_task(task: str) -> None:
    """Refuses tasks that can't be trained on; cheap, imports nothing.

    Raises:
        ValueError: the task can't be scored fairly, or its items depend on Python's string hashing, which differs from
            process to process unless ``PYTHONHASHSEED=0`` was set before Python started.
    """
    if task in LEFT_OUT:
        raise ValueError(f"reasoning-gym task {task!r} can't be used: {LEFT_OUT[task]}. Choose another task.")
    if task in HASH_DEPENDENT and sys.flags.hash_randomization:
        raise ValueError(
            f"the items of reasoning-gym task {task!r} depend on Python's hash seed, so a resumed run would see other "
            "prompts. Start Python with PYTHONHASHSEED=0 in the environment, or choose another task."
        )


def dataset(task: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    """The reasoning-gym data set; ``dataset(...)[i]`` is a pure function of the arguments and ``i``.

    Raises:
        ValueError: unknown or refused task, or parameters that the task does not take.
    """
    check_task(task)
    return _dataset(task, json.dumps(dict(params), sort_keys=True), seed, size)


@functools.lru_cache(maxsize=256)
def _dataset(task: str, params: str, seed: int, size: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a dependency, when it is compiled for the first time
            import reasoning_gym  # takes seconds
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"this data source needs reasoning-gym ({error}): pip install reasoning-gym") from error
    if task not in DATASETS:
        import difflib

        close = difflib.get_close_matches(task, DATASETS, n=3)
        raise ValueError(f"reasoning-gym has no task {task!r}; similar: {', '.join(close) or 'none'}")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(params))
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning-gym task {task!r} does not take {params} with size {size}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _entry(task: str, params: str, seed: int, size: int, index: int) -> Any:
    return _data_of(task, params, seed, size, index)[0 if task in _EAGER else index]


# Makes all items at once, and they depend on how many: item i is the only one of the data set of seed + i.
_EAGER = ("acre",)


def _data_of(task: str, params: str, seed: int, size: int, index: int) -> Any:
    return _dataset(task, params, seed + index, 1) if task in _EAGER else _dataset(task, params, seed, size)


def _key(meta: Mapping[str, Any]) -> tuple[str, str, int, int, int]:
    params = json.dumps(dict(meta["params"]), sort_keys=True)
    return meta["task"], params, meta["seed"], meta["size"], meta["index"]


def entry(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entry (question, answer, metadata) that ``{"task", "params", "seed", "size", "index"}`` stands for.

    A fresh copy each time: scorers may change what they are given.
    """
    check_task(meta["task"])
    return copy.deepcopy(_entry(*_key(meta)))


def _gold(prompt: Prompt) -> str | None:
    """The package's answer; None where there are many, and where it is an integral that the package could not solve."""
    answer = entry(prompt.meta)["answer"]
    return None if not answer or "Integral(" in answer else answer


@register("reasoning_gym", default_format="tag", gold=_gold, preload=("reasoning_gym",))
def reasoning_gym_score(answer: str, prompt: Prompt) -> float:
    """The task's score in [0, 1]; many tasks give credit for a part. See :mod:`.rescored` for whose scorer it is."""
    data, item = _data_of(*_key(prompt.meta)), entry(prompt.meta)
    if len(answer) > max(_LONGEST, 2 * len(item["answer"] or "")):
        return 0.0
    usual = type(data).score_answer is _base().score_answer
    scorer = RESCORED.get(prompt.meta["task"], plain if usual else own)
    try:
        score = scorer(answer, item, data)
    except MemoryError:
        raise
    except Exception:
        # A scorer that raises on this answer, but not on the item's own, could not read the answer.
        data.score_answer(item["answer"], entry(prompt.meta))
        return 0.0
    if math.isnan(score):
        raise ValueError(f"the scorer of reasoning-gym task {prompt.meta['task']} returned NaN")
    return min(score, 1.0) if score > FLOOR else 0.0


@functools.cache
def _base() -> Any:
    from reasoning_gym.dataset import ProceduralDataset

    return ProceduralDataset


@register("reasoning_gym_strict", default_format="tag", gold=_gold, preload=("reasoning_gym",))
def reasoning_gym_strict(answer: str, prompt: Prompt) -> float:
    """1 if the task's score is at least 0.99, else 0: right or wrong, no credit for a part."""
    return float(reasoning_gym_score(answer, prompt) >= RIGHT)
