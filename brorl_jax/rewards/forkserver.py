"""The trainer's handle on the fork server, see :mod:`brorl_jax.rewards.worker`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

STARTUP = 120.0  # seconds for the fork server to start, or to have done what it was asked
FAREWELL = 5.0  # seconds for it to end everything by itself
_POLL = 0.2
# Threads of numerical libraries would only fight for the cores that workers share.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from brorl_jax.rewards import worker; worker.serve({fd}, {memory})"


class ForkServer:
    """Starts the fork server; used from one thread.

    Args:
        memory: Bytes of address space of each worker; 0 is no limit.
        given_up: Asked several times a second while waiting; True ends the wait.

    Raises:
        ConnectionError: The server has ended. So does ``fork``.
        RuntimeError: It has not answered in time, or the wait was given up. So does ``fork``.
    """

    def __init__(self, *, memory: int, given_up: Callable[[], bool]):
        self._given_up = given_up
        self._loaded: set[str] = set()
        self.control, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=path, fd=theirs.fileno(), memory=memory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        try:
            self._reply("the grading processes to start")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def load(self, modules: Iterable[str]) -> None:
        """Lets it import modules, which later workers then have from birth. Does not wait, nor mind if it has ended."""
        if new := [name for name in dict.fromkeys(modules) if name not in self._loaded]:
            self._loaded.update(new)
            with contextlib.suppress(OSError):
                self._request({"do": "load", "modules": new})

    def fork(self, slot: int, old: int | None = None) -> tuple[int, socket.socket, str]:
        """Ends worker ``old`` if there is one, and makes another.

        Returns:
            The new worker's process id, a non-blocking socket to it, and how the old one ended.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._request({"do": "fork", "slot": slot, "old": old}, theirs.fileno())
            reply = self._reply(f"worker {slot} to start")
        except BaseException:
            ours.close()
            raise
        return reply["pid"], ours, reply["ended"]

    def close(self) -> None:
        """Ends it, and with it all workers."""
        self.control.close()
        try:
            self._process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, message: dict[str, Any], *fds: int) -> None:
        socket.send_fds(self.control, [json.dumps(message).encode() + b"\n"], fds)

    def _reply(self, what: str) -> dict[str, Any]:
        self.control.settimeout(_POLL)
        line, polls = b"", 0
        while not line.endswith(b"\n"):
            if self._given_up() or (polls := polls + 1) * _POLL > STARTUP:
                raise RuntimeError(f"grading waited up to {STARTUP:g} s for {what}")
            with contextlib.suppress(TimeoutError):
                data = self.control.recv(1 << 12)
                if not data:
                    raise ConnectionError(f"the grading processes ended while grading waited for {what}")
                line += data
        return json.loads(line)
