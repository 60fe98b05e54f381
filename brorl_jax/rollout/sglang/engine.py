"""The engine that the training loop sees: ``generate``, ``publish``, ``metrics``, ``close`` over servers.

HTTP lives in an event loop in a thread of its own, so that grading, in the caller's thread, overlaps generation.
Servers and connections are the loop's; weights are written in the caller's thread, since they come from the devices.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import logging
import queue
import resource
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from brorl_jax.errors import UserError
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.rollout.sglang import client as client_lib
from brorl_jax.rollout.sglang import launch, members, protocol, watch, weights
from brorl_jax.rollout.sglang.client import Client, Keys, Refused, ServerFailure
from brorl_jax.rollout.sglang.generation import Generation, Ledger, Rules
from brorl_jax.rollout.sglang.launch import Server, Spec
from brorl_jax.rollout.sglang.pool import Pool, Worker
from brorl_jax.rollout.sglang.publish import FromDisk, Publisher, Transport, UpdateFailed, Version, unpause
from brorl_jax.types import Group

log = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks at whether the caller was asked to stop
CLOSE_S = 20.0
YOUNG_OBJECTS = 20_000  # a request in flight is some 70 objects, measured
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the engine; see ``rollout.sglang`` in ``config.py`` for each."""

    in_flight: int
    timeout_s: float
    attempts: int
    dead_after: int
    start_timeout_s: float
    update_timeout_s: float
    urls: tuple[str, ...] = ()
    router: str = ""


@dataclasses.dataclass(frozen=True)
class Probe:
    """How every update is proved.

    Attributes:
        tokens: int32 ``[P]``, a prompt.
        score: ``(params, tokens) -> float32 [P]``, see ``publish.Version.probe_logp``.
        tolerance: Nats, largest mean difference.
    """

    tokens: np.ndarray
    score: Callable[[Any, np.ndarray], np.ndarray]
    tolerance: float


class SGLangEngine:
    """Samples from SGLang servers.

    Args:
        settings: Limits and addresses.
        layout: What is published.
        folder: Where versions are written, of this run alone; every server sees it under the same path. Removed at the
            end.
        probe: How an update is proved.
        context: Most tokens of prompt and response that will be asked for.
        servers: To be started, kept alive and stopped with the engine; or ``settings`` has addresses.
        check: Called while waiting; raises to stop early.
        transport: How weights reach a server; default: through ``folder``.
    """

    def __init__(
        self,
        settings: Settings,
        layout: weights.Layout,
        folder: Path,
        probe: Probe,
        *,
        context: int,
        servers: Sequence[Spec] = (),
        check: Callable[[], None] = lambda: None,
        transport: Transport | None = None,
    ) -> None:
        self._settings, self._layout, self._folder, self._probe = settings, layout, folder, probe
        self._limits = protocol.Limits(layout.cfg.vocab_size, context)
        self._check = check
        self._run = secrets.token_hex(4)  # distinguishes our ids and versions from every other run's
        counter = itertools.count()
        self._next_id = lambda: f"{self._run}-{next(counter):016x}"
        self._version: Version | None = None
        self._ledger, self._seconds = Ledger(), 0.0
        self._generating = False
        self._update: dict[str, float] = {}
        self._closed = False
        _raise_file_limit()
        self._servers = [Server(spec) for spec in servers]
        self._background: list[concurrent.futures.Future[None]] = []
        atexit.register(self.close)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-http", daemon=True)
        self._thread.start()
        try:
            for server in self._servers:
                server.start()
            parts = self._call(self._assemble(transport), "the list of servers", 60.0)
            self._pool, self._publisher, self._watch = parts
        except BaseException:
            self.close()
            raise

    # --- what the loop calls -----------------------------------------------------------------------------------------

    def publish(self, params: Any, version: int) -> None:
        """Gives every server the weights; returns when those that take them serve them.

        Raises:
            RuntimeError: A call of ``generate`` is still running.
            UserError: A server is missing or does not fit the model, none took the weights, or they cannot be written.
        """
        if self._generating:
            raise RuntimeError(f"weights {version} published with a call of generate in flight")
        started, first = time.perf_counter(), self._version is None
        if first:
            weights.make_folder(self._folder)
            weights.clear(self._folder)  # of a run that was killed
            joined = members.join_all(self._pool, self._layout, self._limits.context, self._settings.start_timeout_s)
            self._call(joined, "servers to come up")
        tag = f"{self._run}.{version}"
        directory = self._folder / f"v-{tag}"
        served = weights.truncate_vocabulary(params, self._layout.cfg.vocab_size)
        if not directory.exists():  # else the same version once more
            nbytes = weights.write(directory, self._layout, served, tag)
            weights.verify(directory, tag)
            self._update["engine/publish_bytes"] = float(nbytes)
        written = time.perf_counter()
        logp = self._probe.score(served, self._probe.tokens)
        self._version = Version(version, tag, directory, self._probe.tokens, logp, self._probe.tolerance)
        try:
            self._call(self._publisher.to_all(self._version), f"servers to load weights {tag}")
        except UpdateFailed as error:
            raise UserError(str(error)) from error
        weights.clear(self._folder, keep=directory)
        if first:
            self._background = [self._submit(self._publisher.revive_forever())]
            self._call(self._watch.read_once(), "server metrics")
        done = time.perf_counter()
        self._update |= {"engine/publish_write_s": written - started, "engine/publish_load_s": done - written}
        self._update["engine/publish_s"] = done - started

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Group]:
        """Yields one ungraded group per request as it completes; samples that no server delivered are aborted ones.

        Raises:
            RuntimeError: No weights were published, or another call is running.
            UserError: A request cannot be served, a server refused one (the message has its words), or none is left.
        """
        if self._version is None:
            raise RuntimeError("no weights: call publish(params, version) before generate")
        if self._generating:
            raise RuntimeError("one call of generate at a time")
        protocol.check(list(requests), sampling, self._limits)
        self._generating = True
        started = time.perf_counter()
        done: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        generation = Generation(
            self._pool,
            sampling,
            Rules(self._settings.attempts, self._settings.timeout_s),
            self._limits,
            self._ledger,
            tag=self._version.tag,
            version=self._version.number,
            next_id=self._next_id,
            emit=done.put,
        )
        running = self._submit(generation.run(requests))
        running.add_done_callback(lambda _: done.put(None))
        polling = self._submit(self._watch.poll_forever())
        try:
            with _rare_collections():
                while (group := self._take(done)) is not None:
                    yield group
            running.result()
        finally:
            polling.cancel()
            if not running.done():
                self._give_up(running)
            self._call(self._watch.read_once(), "server metrics", CLOSE_S)
            self._generating = False
            self._seconds += time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Counts and rates under ``engine/`` since the last call."""
        alive = {"engine/servers": len(self._pool.serving), "engine/deaths": self._pool.deaths}
        alive["engine/restarts"] = self._publisher.restarts
        out = watch.ledger_metrics(self._ledger, self._seconds) | self._watch.pop(self._seconds) | self._update
        self._pool.deaths = self._publisher.restarts = 0
        self._ledger.__init__()
        self._seconds, self._update = 0.0, {}
        return out | {key: float(value) for key, value in alive.items()}

    def close(self) -> None:
        """Ends what is under way, unpauses and lets go of the servers, stops our own, removes the weights."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        launch.stop_all(self._servers)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _assemble(self, transport: Transport | None) -> tuple[Pool, Publisher, watch.Watch]:
        settings, keys = self._settings, Keys.from_environment()
        self._http = client_lib.session()
        owned: dict[str, Server] = {server.spec.url: server for server in self._servers}
        urls = [*owned, *settings.urls]
        if settings.router:
            try:
                urls += await members.of_router(Client(self._http, settings.router, keys))
            except BaseException:
                await self._http.close()
                raise
        workers = [
            Worker(Client(self._http, url, keys), owned.get(url), asyncio.Semaphore(settings.in_flight)) for url in urls
        ]
        pool = Pool(
            workers, in_flight=settings.in_flight, dead_after=settings.dead_after, wait_s=settings.start_timeout_s
        )
        publisher = Publisher(pool, transport or FromDisk(settings.update_timeout_s), self._next_id)
        return pool, publisher, watch.Watch(pool)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
        """Runs ``work`` in the loop; ``what`` names what is waited for. Without a time-out the work has its own."""
        future = self._submit(work)
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    return future.result(LOOK_S)
                if future.done():  # the work itself raised a TimeoutError
                    return future.result()
                self._check()
                if end is not None and time.monotonic() > end:
                    raise RuntimeError(f"waited {timeout:g} s for {what}")
        except BaseException:
            future.cancel()
            raise

    def _take(self, done: queue.SimpleQueue[Group | None]) -> Group | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return done.get(timeout=LOOK_S)
            self._check()

    def _give_up(self, running: concurrent.futures.Future[None]) -> None:
        """Cancels a generation and tells the servers to drop what they still have of it."""

        async def drop() -> None:
            running.cancel()
            await asyncio.sleep(0)
            await asyncio.gather(*(self._abort_all(worker) for worker in self._pool.serving))

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(drop(), self._loop).result(CLOSE_S)
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            running.result(CLOSE_S)

    async def _abort_all(self, worker: Worker) -> None:
        try:
            await worker.client.admin("/abort_request", {"abort_all": True}, CLOSE_S / 2)
        except (ServerFailure, Refused) as error:
            log.info("could not abort the rest at %s: %s", worker.url, error)

    async def _shut_down(self) -> None:
        for task in self._background:
            task.cancel()
        if not self._servers:
            await asyncio.gather(*(self._leave(worker) for worker in self._pool.workers))
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.close()

    async def _leave(self, worker: Worker) -> None:
        if self._generating:
            await self._abort_all(worker)
        if self._version is not None and worker.reason:  # not serving: perhaps in the middle of an update
            await unpause(worker.client)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes the garbage collector look less often, for as long as requests are in flight.

    Their objects live long and become many at once. CPython's default is to look at the young ones at every 700th and
    at all of them whenever they have grown by a quarter: a third of the client's time at 8,192 in flight.
    """
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _raise_file_limit() -> None:
    """One connection per request in flight: the usual 1,024 files are not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
