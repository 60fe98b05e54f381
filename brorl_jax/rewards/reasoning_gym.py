"""reasoning-gym's own scorers, with the traps taken out.

The scorer of the configured data set is used, not ``get_score_answer_fn(task)``: that one builds the task with its
default configuration, and several scorers (puzzle24, decimal_arithmetic, ...) read the configuration. The entry that a
scorer needs is rebuilt from ``prompt.meta``: tasks are pure functions of (parameters, seed, index).
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

from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt

CHEATABLE = {
    "complex_arithmetic": 'the answer "nan" scores 1.0 on every item',
    "game_of_life_halting": "any non-empty answer scores 1.0",
    "coin_flip": 'the answer "0" scores 0.95 on average',
}
HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
_RIGHT = 0.99


def check_task(task: str) -> None:
    """Refuses tasks that can't be trained on; cheap, imports nothing.

    Raises:
        ValueError: a policy can cheat the task's scorer, or its items depend on Python's string hashing, which
            differs from process to process unless ``PYTHONHASHSEED=0`` was set before Python started.
    """
    if task in CHEATABLE:
        raise ValueError(f"reasoning-gym task {task!r} can't be used: {CHEATABLE[task]}. Choose another task.")
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
    return _dataset(task, params, seed, size)[index]


def entry(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entry (question, answer, metadata) that ``{"task", "params", "seed", "size", "index"}`` stands for.

    A fresh copy each time: scorers may change what they are given.
    """
    check_task(meta["task"])
    params = json.dumps(dict(meta["params"]), sort_keys=True)
    return copy.deepcopy(_entry(meta["task"], params, meta["seed"], meta["size"], meta["index"]))


def _gold(prompt: Prompt) -> str | None:
    return entry(prompt.meta)["answer"]


@register("reasoning_gym", default_format="tag", gold=_gold)
def reasoning_gym_score(answer: str, prompt: Prompt) -> float:
    """The task's own score, clipped to [0, 1]; many tasks give partial credit."""
    meta = prompt.meta
    params = json.dumps(dict(meta["params"]), sort_keys=True)
    score = float(_dataset(meta["task"], params, meta["seed"], meta["size"]).score_answer(answer, entry(meta)))
    if math.isnan(score):
        raise ValueError(f"reasoning-gym's scorer of {meta['task']} returned NaN")
    return min(max(score, 0.0), 1.0)


@register("reasoning_gym_strict", default_format="tag", gold=_gold)
def reasoning_gym_strict(answer: str, prompt: Prompt) -> float:
    """1 if the task's own score is at least 0.99, else 0: right or wrong, no partial credit."""
    return float(reasoning_gym_score(answer, prompt) >= _RIGHT)
