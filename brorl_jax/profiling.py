"""A trace of some steps of the loop, for XProf and Perfetto. Imports jax late, so that a wrong flag fails at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from brorl_jax.errors import UserError


def parse(text: str, total: int) -> range:
    """The steps that ``--profile`` names, ``3`` or ``3:5`` (both included); none where it is empty.

    Raises:
        UserError: It names none, or one beyond ``total``, the run's steps.
    """
    if not text:
        return range(0)
    if not (named := re.fullmatch(r"(\d+)(?::(\d+))?", text)):
        raise UserError(f"--profile={text}: name a step, or the first and last of several, such as 3 or 3:5")
    first, last = int(named[1]), int(named[2] or named[1])
    if not 1 <= first <= last <= total:
        raise UserError(f"--profile={text}: steps count from 1 to train.steps = {total}, the earlier one first")
    return range(first, last + 1)


class Profiler:
    """Traces ``steps`` of the loop into ``directory``; of a resumed run, those that are still to come.

    Each step is marked as one, and in it what ``PhaseTimer`` times and the programs' named scopes.
    """

    def __init__(self, steps: range, directory: Path) -> None:
        self._steps, self._directory, self._on = steps, directory, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``."""
        import jax

        if number in self._steps and not self._on:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call: a slower run and a trace that no browser opens
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._on = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if self._on and number == self._steps[-1]:
            self._stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:  # the run ends in a traced step
            self._stop()

    def _stop(self) -> None:
        import jax

        self._on = False
        jax.profiler.stop_trace()
