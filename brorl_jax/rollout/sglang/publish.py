"""New weights to every server: hand over, check, prove, and only then use; the dead are brought back the same way.

Order, for one worker: pause (whatever is still under way there is aborted) -> load, which also flushes the prefix cache
-> its ``success`` and the version it reports -> continue -> probe. Nothing of ours is in flight meanwhile, so no sample
mixes versions; the version of each token is checked all the same (``protocol``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from brorl_jax.rollout.sglang import protocol, weights
from brorl_jax.rollout.sglang.client import Client, Refused, ServerFailure
from brorl_jax.rollout.sglang.pool import Pool, State, Worker

log = logging.getLogger(__name__)

CALL_S = 30.0
PAUSE_S = 120.0
FLUSH_TRIES, FLUSH_SLEEP_S = 3, 1.0
REVIVE_EVERY_S = 2.0  # doubles with every try that fails, up to a minute
# Mean |difference| in nats between the probe's log-probabilities at a server and in the trainer; kernels differ by
# about 1e-6 in float32 and 0.01 to 0.02 in bfloat16, other weights by 0.1 and more.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class UpdateFailed(Exception):
    """A server did not take the new weights, or what it took is not what was sent."""


@dataclasses.dataclass(frozen=True)
class Version:
    """Weights that servers can be given.

    Attributes:
        number: As samples carry it.
        tag: As servers report it; unlike the number, no other run uses it.
        directory: Where they lie.
        probe_tokens: int32 ``[P]``, a fixed prompt.
        probe_logp: float32 ``[P]``, the trainer's log-probabilities of its tokens but the first, then of the most
            likely next one.
        tolerance: Largest mean difference from them.
    """

    number: int
    tag: str
    directory: Path
    probe_tokens: np.ndarray
    probe_logp: np.ndarray
    tolerance: float


class Transport(Protocol):
    """How weights get into a paused server. See docs/sglang.md for one that bypasses the file system."""

    async def hand_over(self, client: Client, version: Version) -> None:
        """Returns when the server holds the weights and says so; otherwise raises.

        Raises:
            UpdateFailed, Refused, ServerFailure: It does not.
        """
        ...


@dataclasses.dataclass(frozen=True)
class FromDisk:
    """The server reads the version's directory; trainer and server see the same path."""

    timeout_s: float

    async def hand_over(self, client: Client, version: Version) -> None:
        payload = {
            "model_path": str(version.directory),
            "load_format": "auto",  # a server may have been started with dummy weights
            "weight_version": version.tag,
            "flush_cache": True,
        }
        for attempt in range(FLUSH_TRIES):
            try:
                said = await client.admin("/update_weights_from_disk", payload, self.timeout_s)
            except Refused as error:
                if "flushed" not in str(error) or attempt + 1 == FLUSH_TRIES:
                    raise UpdateFailed(str(error)) from error
                await asyncio.sleep(FLUSH_SLEEP_S)  # the last requests are still leaving
                continue
            if not said or not said.get("success"):
                raise UpdateFailed(f"{client.url} did not load {version.directory}: {said}")
            return


async def update(worker: Worker, version: Version, transport: Transport, next_id: Callable[[], str]) -> None:
    """Gives one worker the weights of ``version`` and proves that it has them.

    Raises:
        UpdateFailed, Refused, ServerFailure, protocol.BadAnswer: The worker must not be used.
    """
    client = worker.client
    try:
        await client.admin("/pause_generation", {"mode": "abort"}, PAUSE_S)
        await transport.hand_over(client, version)
    finally:
        await unpause(client)
    reported = (await client.get("/model_info", CALL_S)).get("weight_version")
    if reported != version.tag:
        raise UpdateFailed(f"{client.url} reports weights {reported!r} after an update to {version.tag!r}")
    raw = await client.generate(protocol.probe_body(version.probe_tokens, next_id()), CALL_S)
    found = protocol.parse_probe(raw)
    if found.shape != version.probe_logp.shape:
        raise UpdateFailed(f"{client.url}: the probe has {found.shape} log-probabilities")
    gap = float(np.abs(found - version.probe_logp).mean())
    if not gap <= version.tolerance:  # NaN fails, too
        raise UpdateFailed(
            f"{client.url} computes something else than the trainer after an update to {version.tag}: the probe "
            f"prompt's log-probabilities differ by {gap:.3g} nats on average, at most {version.tolerance:g} is rounding"
        )


async def unpause(client: Client) -> None:
    """Lets a server generate again; never raises, since it runs when other things have gone wrong."""
    try:
        await client.admin("/continue_generation", {}, CALL_S)
    except (ServerFailure, Refused) as error:
        log.warning("could not unpause %s: %s", client.url, error)


FAILURES = (UpdateFailed, Refused, ServerFailure, protocol.BadAnswer)


class Publisher:
    """Keeps every worker of a pool at the current version."""

    def __init__(self, pool: Pool, transport: Transport, next_id: Callable[[], str]) -> None:
        self.pool, self.transport, self.next_id = pool, transport, next_id
        self.current: Version | None = None
        self.restarts = 0
        self._lock = asyncio.Lock()  # an update to all and a revival must not cross

    async def to_all(self, version: Version) -> None:
        """Updates every worker that is not dead, at the same time; one that fails is taken out, the rest go on.

        Raises:
            UpdateFailed: None took the weights. The message has each one's reason.
        """
        async with self._lock:
            self.current = version
            workers = [w for w in self.pool.workers if w.state is not State.DEAD]
            for worker in workers:
                worker.state, worker.reason = State.STALE, f"being updated to {version.tag}"
            await asyncio.gather(*(self._one(worker, version) for worker in workers))
            if not self.pool.serving:
                raise UpdateFailed(f"no server took the weights {version.tag}: {self.pool.reasons()}")

    async def _one(self, worker: Worker, version: Version) -> None:
        try:
            await update(worker, version, self.transport, self.next_id)
        except FAILURES as error:
            self.pool.bury(worker, str(error))
        else:
            self.pool.serve(worker)

    async def revive_forever(self) -> None:
        """Watches the dead, one task each, until cancelled."""
        tasks: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                self.pool.died.clear()
                for worker in self.pool.workers:
                    if worker.state is State.DEAD and (worker not in tasks or tasks[worker].done()):
                        tasks[worker] = asyncio.get_running_loop().create_task(self._revive(worker))
                await self.pool.died.wait()
        finally:
            for task in tasks.values():
                task.cancel()

    async def _revive(self, worker: Worker) -> None:
        """Tries, ever less often, until the worker serves the version that is then current."""
        pause = REVIVE_EVERY_S
        while worker.state is State.DEAD:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 60.0)
            try:
                if worker.server is not None and not worker.server.alive():
                    log.warning("restarting %s (%s)", worker.url, worker.server.last_words())
                    await asyncio.to_thread(worker.server.restart)
                    self.restarts += 1
                    pause = REVIVE_EVERY_S
                await worker.client.get("/model_info", CALL_S)
                async with self._lock:
                    if self.current is not None:
                        directory, tag = self.current.directory, self.current.tag
                        await asyncio.to_thread(weights.verify, directory, tag, contents=True)
                        await update(worker, self.current, self.transport, self.next_id)
                        self.pool.serve(worker)
            except (*FAILURES, ValueError, OSError) as error:
                worker.reason = f"{worker.reason.split(' (still ')[0]} (still out: {error})"
