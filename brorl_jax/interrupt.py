"""SIGTERM and Ctrl-C as a request that the loop grants at a safe place."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from brorl_jax import processes


class Interrupted(Exception):
    """Raised at a safe place after a signal; ``signum`` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """While entered, SIGTERM and SIGINT set a flag that ``check`` turns into ``Interrupted``. A second one kills."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self._signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self._signum = signum
        processes.ask_to_stop(signum)

    @property
    def pending(self) -> int:
        """The signal that has come, here or to another process of the run; 0 without one."""
        return self._signum or processes.asked_to_stop()

    def check(self) -> None:
        """Raises ``Interrupted`` if a signal has come."""
        if self.pending:
            raise Interrupted(self.pending)

    def check_together(self) -> None:
        """Raises ``Interrupted`` in all processes of the run if a signal has come to any; all must call it."""
        if signum := processes.agree_to_stop(self.pending, "a stop signal"):
            raise Interrupted(signum)
