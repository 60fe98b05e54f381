"""A live line in a terminal, plain lines in a log file; it shows and keeps nothing."""

from __future__ import annotations

import collections
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

log = logging.getLogger(__name__)

Field = tuple[str, str, str]
"""Metric key, label, format."""

TRAIN: tuple[Field, ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("groups/pass_rate", "mixed groups", "{:.0%}"),
    ("eval/pass@1", "held-out pass@1", "{:.1%}"),
    ("length/mean", "length", "{:,.0f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
)
WARMUP: tuple[Field, ...] = (
    ("warmup/loss", "loss", "{:.4f}"),
    ("eval/pass@1", "held-out pass@1", "{:.1%}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
)


def duration(seconds: float) -> str:
    """``3:07`` or ``2:03:07``."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Progress:
    """Shows step/total, the last value of each field, and the time left.

    Args:
        total: Steps of the whole stage.
        start: Steps already done (a resume).
        title: First word of every line.
        fields: What to show: ``TRAIN`` or ``WARMUP``. A value not measured at every step stays until the next.
        every: Print a plain line each so many steps (a terminal is updated at every step).
        stream: Where to; standard error by default. A display that fails is switched off, training goes on.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "train",
        fields: tuple[Field, ...] = TRAIN,
        every: int = 1,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._title, self._fields, self._every = total, title, fields, max(every, 1)
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._last = clock, clock()
        self._seen: dict[str, float] = {}
        self._durations: collections.deque[float] = collections.deque(maxlen=20)
        self._live: Any = None
        self._on = True
        self._guard(lambda: self._open(start))

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step (1-based)."""
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        self._seen |= {k: float(metrics[k]) for k, _, _ in self._fields if metrics.get(k) is not None}
        self._guard(lambda: self._show(step))

    def note(self, text: str) -> None:
        """Print a line above the live display."""
        self._guard(lambda: self._print(text))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._guard(lambda: self._live and self._live.stop())
        self._on = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def text(self) -> str:
        """The fields as one line."""
        shown = [f"{label} {fmt.format(self._seen[k])}" for k, label, fmt in self._fields if k in self._seen]
        return "  ".join(shown)

    def eta(self, step: int) -> float:
        """Seconds left, from the median of the last 20 steps (the first one holds the compilation)."""
        return statistics.median(self._durations) * (self._total - step) if self._durations else float("nan")

    def _open(self, start: int) -> None:
        if not self._stream.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = ("[bold]{task.description}", "{task.fields[info]}", "[dim]{task.fields[left]}")
        head, info, left = (TextColumn(c) for c in columns)
        self._live = Bar(head, BarColumn(24), MofNCompleteColumn(), info, left, console=Console(file=self._stream))
        self._task = self._live.add_task(self._title, total=self._total, completed=start, info="", left="")
        self._live.start()

    def _show(self, step: int) -> None:
        left = f"{duration(self.eta(step))} left" if step < self._total else "done"
        if self._live is not None:
            self._live.update(self._task, completed=step, info=self.text(), left=left)
        elif step % self._every == 0 or step == self._total:
            width = len(str(self._total))
            self._print(f"{self._title} {step:{width}d}/{self._total}  {self.text()}  {left}")

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _guard(self, call: Callable[[], object]) -> None:
        if self._on:
            try:
                call()
            except Exception as error:  # a closed terminal or pipe must not end a training run
                self._on = False
                log.warning("the progress display is switched off: %r", error)
