"""Which servers may be used: who serves, who is dead and why, who gets the next group.

A worker serves only after it has been given the current weights and has proved it. It dies of repeated failures or of
one sign that its weights are not the current ones; whoever is dead is revived in the background (``publish``):
restarted if it is ours, given the current weights, and only then used again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
from collections.abc import Callable, Sequence

from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang.client import Client
from brorl_jax.rollout.sglang.launch import Server

log = logging.getLogger(__name__)

SAY_EVERY_S = 30.0  # a wait says what it waits for this often


class NoServers(UserError):
    """No server is left, and none came back in time. The message has each one's reason."""


class State(enum.StrEnum):
    """Of a worker."""

    STALE = "stale"  # has not got the current weights, or not proved it
    SERVING = "serving"
    DEAD = "dead"


@dataclasses.dataclass(eq=False)
class Worker:
    """One server.

    Attributes:
        client: Its routes.
        server: Its process, if it is ours.
        slots: Bounds the requests at it.
        load: Samples assigned to it and not done.
        failures: In a row.
        reason: Why it does not serve.
    """

    client: Client
    server: Server | None
    slots: asyncio.Semaphore
    state: State = State.STALE
    load: int = 0
    failures: int = 0
    reason: str = "has not answered yet"

    @property
    def url(self) -> str:
        return self.client.url


class Pool:
    """The workers of a run. All methods belong to the engine's event loop."""

    def __init__(self, workers: Sequence[Worker], *, in_flight: int, dead_after: int, wait_s: float) -> None:
        self.workers = list(workers)
        self.in_flight, self.dead_after, self.wait_s = in_flight, dead_after, wait_s
        self.deaths = 0
        self.died = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def serving(self) -> list[Worker]:
        return [w for w in self.workers if w.state is State.SERVING]

    def reasons(self) -> str:
        """Every worker that does not serve, with its reason, on one line."""
        return "; ".join(f"{w.url} is {w.state}: {w.reason}" for w in self.workers if w.state is not State.SERVING)

    async def pick(self) -> Worker:
        """The serving worker with least to do, as soon as one has room.

        Raises:
            NoServers: None serves, and none came back within ``wait_s``.
        """

        def free() -> Worker | None:
            workers = [w for w in self.serving if w.load < self.in_flight]
            return min(workers, key=lambda w: w.load, default=None)

        return await self._wait(free, "a server with room")

    async def any_serving(self, avoid: Worker | None = None) -> Worker:
        """A serving worker, another than ``avoid`` if there is one, room or not."""

        def best() -> Worker | None:
            return min(self.serving, key=lambda w: (w is avoid, w.load), default=None)

        return await self._wait(best, "a server")

    async def _wait(self, find: Callable[[], Worker | None], what: str) -> Worker:
        since = asyncio.get_running_loop().time()
        said = since
        while (worker := find()) is None:
            now = asyncio.get_running_loop().time()
            if self.serving:
                since = now  # busy is not broken
            elif now - since > self.wait_s:
                raise NoServers(f"no server left after waiting {self.wait_s:g} s for one: {self.reasons()}")
            elif now - said >= SAY_EVERY_S:
                said = now
                log.warning("waiting %.0f of at most %.0f s for %s: %s", now - since, self.wait_s, what, self.reasons())
            changed = self._changed
            try:
                async with asyncio.timeout(min(SAY_EVERY_S, self.wait_s / 4)):
                    await changed.wait()
            except TimeoutError:
                pass
        return worker

    def assign(self, worker: Worker, samples: int) -> None:
        """Adds to a worker's load; a negative number takes off."""
        worker.load += samples
        if samples < 0:
            self._notify()

    def succeeded(self, worker: Worker) -> None:
        worker.failures = 0

    def failed(self, worker: Worker, error: Exception) -> None:
        """Counts a failed request; after ``dead_after`` in a row the worker is dead."""
        worker.failures += 1
        if worker.state is State.SERVING and worker.failures >= self.dead_after:
            self.bury(worker, f"{worker.failures} failures in a row, last: {error}")

    def bury(self, worker: Worker, reason: str) -> None:
        """Takes a worker out of the pool."""
        if worker.state is not State.DEAD:
            self.deaths += 1
            log.warning("%s is taken out: %s", worker.url, reason)
        worker.state, worker.reason, worker.failures = State.DEAD, reason, 0
        self.died.set()
        self._notify()

    def serve(self, worker: Worker) -> None:
        """Puts a worker with proved current weights into use."""
        if worker.state is State.DEAD:
            log.warning("%s is back", worker.url)
        worker.state, worker.reason, worker.failures = State.SERVING, "", 0
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
