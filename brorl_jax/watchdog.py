"""Ends a run that has ceased to move, with the stack of every thread: one that hangs costs as much as one that works.

Signs of progress are the phases of a step (``metrics.PhaseTimer``; a group generated or graded is a phase), every chunk
of the embedded engine, every answer of a server. A wait that has a deadline of its own is excused. While a run is
watched, a thread looks at the clock; should no Python run any more, because something native keeps the interpreter's
lock, faulthandler's own thread does the same a little later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STDERR = 2  # not sys.stderr, which may have been replaced by what is no file
LOOKS = 8  # at the clock, per timeout
MOST_S = 10.0  # between two of them

_watch: Watch | None = None


class Watch:
    """One run's clock.

    Args:
        timeout_s: Longest silence.
        file: Where the stacks go, besides standard error.
        end: Ends the process; given its exit status.
    """

    def __init__(
        self,
        timeout_s: float,
        file: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.timeout_s, self.file = timeout_s, file
        self._clock, self._end = clock, end
        self._last = math.inf, ""  # when, and what it was; from the first sign on
        self._over = threading.Event()

    def alive(self, what: str) -> None:
        """A sign of progress."""
        self._last = self._clock(), what

    def pause(self, what: str) -> None:
        """No sign is expected until the next."""
        self._last = math.inf, what

    def look(self) -> None:
        """Ends the process if the last sign is too long ago."""
        at, what = self._last
        silent = self._clock() - at
        if silent < self.timeout_s:
            return
        text = (
            f"error: no progress for {silent:.0f} s (config.train.stall_timeout_s = {self.timeout_s:g}), the last sign "
            f"was {what!r}. What every thread is doing, also in {self.file}:\n"
        )
        with contextlib.suppress(OSError), open(self.file, "w") as file:
            _dump(text, file.fileno())
        _dump(text, STDERR)
        self._end(1)

    def run(self) -> None:
        """Looks until ``stop``."""
        pause = min(MOST_S, self.timeout_s / LOOKS)
        while not self._over.wait(pause):
            self.look()
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=STDERR)
        faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Ends ``run``."""
        self._over.set()


def _dump(text: str, file: int) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(file, text.encode())
        faulthandler.dump_traceback(file, all_threads=True)


@contextlib.contextmanager
def watching(timeout_s: float, file: Path) -> Iterator[None]:
    """Watches the body from its first sign of progress on; 0: does not."""
    global _watch
    if not timeout_s:
        yield
        return
    watch = _watch = Watch(timeout_s, file)
    thread = threading.Thread(target=watch.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _watch = None
        watch.stop()
        thread.join()


def alive(what: str) -> None:
    """A sign of progress, from any thread; ``what`` has just begun or ended."""
    if (watch := _watch) is not None:  # another thread may end the watch in between
        watch.alive(what)


@contextlib.contextmanager
def excused(what: str) -> Iterator[None]:
    """For a wait that ends by itself and says then what it waited for."""
    if (watch := _watch) is not None:
        watch.pause(what)
    try:
        yield
    finally:
        alive(what)
