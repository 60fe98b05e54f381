"""One-step-off generation: the next step's groups are collected while this step's updates run.

Law: step k + 1 is drawn from the weights that step k begins with, whatever takes how long. So its samples are exactly
one step old when they are trained, and nothing in a run depends on timing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from brorl_jax.collect import Collected
from brorl_jax.types import Group

T = TypeVar("T")


class GivenUp(Exception):
    """Raised in the background, where nobody waits for the result any more."""


@contextlib.contextmanager
def background(work: Callable[[Callable[[], None]], T]) -> Iterator[Future[T]]:
    """Runs ``work(check)`` in a thread beside the body, and ends with both.

    ``check`` raises, and so ends the work, once the body has failed. What the work raises, ``result`` of the future
    does.
    """
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise GivenUp

    with ThreadPoolExecutor(1, thread_name_prefix="next-step") as thread:
        future = thread.submit(work, check)
        try:
            yield future
        except BaseException:
            failed.set()
            raise


def check_versions(collected: Collected, version: int) -> None:
    """Every sample of the step was drawn from the weights ``version``.

    Raises:
        RuntimeError: One was not: the law does not hold.
    """
    if others := {s.weight_version for g, _ in collected.judged for s in g.samples} - {version}:
        raise RuntimeError(f"the next step's samples should all be of weights {version} but are also of {others}")


def staleness(groups: Sequence[Group], version: int) -> float:
    """Mean over trained samples of the updates made since the weights that drew them; ``version``: of the present."""
    ages = [version - s.weight_version for g in groups for s in g.scored]
    return float(np.mean(ages)) if ages else 0.0


def to_record(collected: Collected) -> tuple[list[Group], dict[str, Any]]:
    """Its groups, each once, and the rest as plain values that name them by number: for a checkpoint."""
    groups = {id(g): g for g in [*collected.kept, *collected.carried, *(g for g, _ in collected.judged)]}
    number = {key: i for i, key in enumerate(groups)}
    return list(groups.values()), {
        "kept": [number[id(g)] for g in collected.kept],
        "carried": [number[id(g)] for g in collected.carried],
        "judged": [[number[id(g)], verdict] for g, verdict in collected.judged],
        "rounds": collected.rounds,
        "starved": collected.starved,
    }


def from_record(groups: Sequence[Group], record: dict[str, Any]) -> Collected:
    """The reverse of ``to_record``."""
    return Collected(
        kept=[groups[i] for i in record["kept"]],
        carried=[groups[i] for i in record["carried"]],
        judged=[(groups[i], verdict) for i, verdict in record["judged"]],
        rounds=record["rounds"],
        starved=record["starved"],
    )
