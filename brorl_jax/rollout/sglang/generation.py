"""One call of ``generate``: groups spread over the pool, samples tried again elsewhere, everything accounted for."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from brorl_jax import watchdog
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.rollout.sglang import protocol
from brorl_jax.rollout.sglang.client import Refused, ServerFailure
from brorl_jax.rollout.sglang.pool import Pool, State, Worker
from brorl_jax.types import Group, Sample

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.5, 2.0, 5.0)  # before a second, third, ... attempt at one sample
ABORT_S = 10.0
NOT_SENT = "not_sent"  # the server died while the sample waited for its turn there: no attempt was made


@dataclasses.dataclass
class Ledger:
    """What became of every sample asked for, and of every failed attempt at one: ``requested = delivered + dropped``.

    Attributes:
        requested: Samples.
        delivered: Samples that came, each with the version asked for.
        dropped: Samples that did not, by the reason of the last attempt; they are handed on as aborted.
        retried: Attempts that failed, by reason, whatever became of the sample.
        cancelled: Samples given up with the generator.
        prompt_tokens: Of the samples delivered.
        cached_tokens: Those of them that came from a server's prefix cache.
    """

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    retried: Counter[str] = dataclasses.field(default_factory=Counter)
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every sample is accounted for exactly once."""
        return self.requested == self.delivered + sum(self.dropped.values()) + self.cancelled


@dataclasses.dataclass
class _Open:
    """A group under way; ``worker`` is where its samples go, so that one prefix cache serves them all."""

    request: Request
    body: protocol.Body
    worker: Worker


@dataclasses.dataclass(frozen=True)
class Rules:
    """How hard to try: attempts at one sample, seconds for one attempt."""

    attempts: int
    timeout_s: float


class Generation:
    """Runs in the engine's event loop; ``emit`` is called with every complete group.

    Args:
        tag: The weight version that servers must report for every token; ``version`` is the same as a number.
        next_id: Makes request ids, all of one length.
    """

    def __init__(
        self,
        pool: Pool,
        sampling: Sampling,
        rules: Rules,
        limits: protocol.Limits,
        ledger: Ledger,
        *,
        tag: str,
        version: int,
        next_id: Callable[[], str],
        emit: Callable[[Group], None],
    ) -> None:
        self.pool, self.sampling, self.rules, self.limits, self.ledger = pool, sampling, rules, limits, ledger
        self.tag, self.version, self.next_id, self.emit = tag, version, next_id, emit
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self, requests: Sequence[Request]) -> None:
        """All groups, started in order as there is room. Raises what no retry can mend."""
        for worker in self.pool.workers:
            worker.load = 0  # a call that was given up may have left some
        self.ledger.requested += sum(len(r.seeds) for r in requests)
        before = self.ledger.delivered + sum(self.ledger.dropped.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    worker = await self.pool.pick()
                    self.pool.assign(worker, len(request.seeds))  # before anything else is picked
                    opened = _Open(request, protocol.Body(request.prompt.tokens, self.sampling), worker)
                    tasks.create_task(self._group(opened))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            done = self.ledger.delivered + sum(self.ledger.dropped.values()) - before
            self.ledger.cancelled += sum(len(r.seeds) for r in requests) - done

    async def _group(self, opened: _Open) -> None:
        if len(opened.request.seeds) > 1:
            await self._prefill(opened)
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(self._sample(opened, i)) for i in range(len(opened.request.seeds))]
        self.emit(Group(opened.request.prompt, [job.result() for job in jobs]))

    async def _prefill(self, opened: _Open) -> None:
        """Puts the prompt into its server's prefix cache, for all its samples to share.

        Sent together, the samples would fill whole prefill batches with copies of one prompt, since none is in the
        cache yet; SGLang's own way out (policy lpm) is off once 128 requests wait. What goes wrong here is counted,
        and the samples find their own way.
        """
        worker = opened.worker
        async with worker.slots:
            rid = self.next_id()
            if worker.state is State.SERVING:
                try:
                    await worker.client.generate(opened.body.prefill(rid), self.rules.timeout_s)
                except ServerFailure as error:
                    self._failed(worker, error, rid)

    async def _sample(self, opened: _Open, index: int) -> Sample:
        charged = opened.worker  # a sample is part of the load of the worker it is assigned to, for as long as it is
        attempts, reason = 0, ""
        try:
            while attempts < self.rules.attempts:
                if reason:
                    await asyncio.sleep(BACKOFF_S[min(attempts, len(BACKOFF_S)) - 1] if attempts else 0)
                    worker = await self._elsewhere(opened, charged)
                    self.pool.assign(charged, -1)
                    charged = worker
                    self.pool.assign(charged, 1)
                sample, reason = await self._attempt(opened, index, charged)
                if sample is not None:
                    self.ledger.delivered += 1
                    return sample
                attempts += reason != NOT_SENT
            self.ledger.dropped[reason] += 1
            return protocol.aborted(index, opened.request.seeds[index], self.version)
        finally:
            self.pool.assign(charged, -1)

    async def _elsewhere(self, opened: _Open, failed: Worker) -> Worker:
        """Where to try again: with the rest of its group if that has moved on, otherwise at another server."""
        if opened.worker is failed or opened.worker not in self.pool.serving:
            other = await self.pool.any_serving(avoid=failed)
            if opened.worker not in self.pool.serving:
                opened.worker = other  # the group follows only from a dead server, not for one failed request
            return other
        return opened.worker

    async def _attempt(self, opened: _Open, index: int, worker: Worker) -> tuple[Sample | None, str]:
        """The sample, or why this server did not deliver it."""
        async with worker.slots:
            rid, seed = self.next_id(), opened.request.seeds[index]
            if worker.state is not State.SERVING:  # died while this sample waited for a slot
                return None, NOT_SENT
            try:
                raw = await worker.client.generate(opened.body.sample(rid, seed), self.rules.timeout_s)
                sample, cached = protocol.parse(
                    raw,
                    rid=rid,
                    index=index,
                    seed=seed,
                    prompt_tokens=opened.body.prompt_tokens,
                    sampling=self.sampling,
                    tag=self.tag,
                    version=self.version,
                    vocab=self.limits.vocab,
                )
            except (ServerFailure, protocol.BadAnswer) as error:
                self._failed(worker, error, rid)
                return None, error.reason
            finally:
                watchdog.alive(f"an answer of {worker.url}")
        self.pool.succeeded(worker)
        self.ledger.prompt_tokens += opened.body.prompt_tokens
        self.ledger.cached_tokens += cached
        return sample, ""

    def _failed(self, worker: Worker, error: ServerFailure | protocol.BadAnswer, rid: str) -> None:
        if not self.ledger.retried[error.reason]:
            log.warning("%s; trying again (the first of its kind since the last step)", error)
        self.ledger.retried[error.reason] += 1
        self.pool.failed(worker, error)
        if error.reason == "stale_version":
            self.pool.bury(worker, str(error))
        if error.reason == "timeout":
            self._abort(worker, rid)

    def _abort(self, worker: Worker, rid: str) -> None:
        """Tells the server to stop working for a request that nobody waits for; whether it hears is its own affair."""

        async def tell() -> None:
            try:
                await worker.client.admin("/abort_request", {"rid": rid}, ABORT_S)
            except (ServerFailure, Refused) as error:
                log.info("could not abort %s at %s: %s", rid, worker.url, error)

        task = asyncio.get_running_loop().create_task(tell())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first leaf of nested groups: one cause is enough."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
