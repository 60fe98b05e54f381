"""The grading service that all verifiers share.

``Grader.submit(group)`` returns at once, with a future; verdicts come from worker processes while other groups are
still being generated, and are written to the very samples that asked. Every distinct (verifier, prompt, extracted
answer) is scored once: equal answers that are under way share one verdict, later ones find it in a bounded cache. What
an answer can be decided by in microseconds (inline scorers, cheap paths) never reaches a worker.

A scorer that raises, returns no number in [0, 1], or takes its process down makes the sample a ``grader_error``; one
that runs out of time makes it a ``timeout``. Neither carries a reward: the sample is left out of its group, which is
neither a punishment nor, since left-out samples push nothing, an incentive; a group with too few others is dropped.
A verifier that means "too slow is wrong" (a time limit of the task itself) returns 0 before its deadline. Failures
are not asked again until :meth:`Grader.pop_metrics`, that is within a step; they may be the machine's fault.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

from brorl_jax.rewards.forkserver import STARTUP
from brorl_jax.rewards.pool import Item, Pool, Verdict
from brorl_jax.rewards.registry import Answer, Verifier, get
from brorl_jax.rewards.worker import describe, slot
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

__all__ = ["Grader", "GradingStats", "slot"]

MOST_WORKERS = 16  # that "one per core" means
MAX_OPEN = 1 << 16  # distinct answers under way; submit waits beyond
POLL = 0.1  # seconds between two looks at what may end a wait
SHOWN = 5  # error messages kept
Counts = defaultdict[str, float]
COUNTERS = ("answers", "unanswered", "graded", "cache_hits", "timeouts", "errors", "seconds")


@dataclasses.dataclass(slots=True)
class GradingStats:
    """What grading some groups came to.

    Attributes:
        statuses: Number of samples by status.
        unanswered: Scored samples that state no answer in the agreed place (reward 0).
        scored: Answers that were scored for these groups; equal answers to one prompt cost one.
        errors: The first few distinct failures, ``"<prompt id>: <message>"``.
    """

    statuses: Counter[Status] = dataclasses.field(default_factory=Counter)
    unanswered: int = 0
    scored: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)

    def add_error(self, message: str) -> None:
        """Keeps ``message`` if it is new and there is room."""
        if len(self.errors) < SHOWN and message not in self.errors:
            self.errors.append(message)

    def __iadd__(self, other: GradingStats) -> GradingStats:
        self.statuses += other.statuses
        self.unanswered += other.unanswered
        self.scored += other.scored
        for message in other.errors:
            self.add_error(message)
        return self


@dataclasses.dataclass(slots=True, eq=False)
class _Ticket:
    """One group under way."""

    group: Group
    future: futures.Future[GradingStats] = dataclasses.field(default_factory=futures.Future)
    stats: GradingStats = dataclasses.field(default_factory=GradingStats)
    open: int = 0  # distinct answers without a verdict


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    """One answer under way, and the samples that wait for it."""

    counts: Counts
    deadline: float
    waiting: list[tuple[_Ticket, list[Sample]]]


class Grader:
    """Grades groups of samples; a context manager, to be used from one thread.

    Args:
        workers: Processes; 0 is one per core, at most 16. They start with the first answer that needs one.
        cache: Verdicts remembered, the least recently used are forgotten.
        memory_gib: Address space of each worker; 0 is no limit.
        deadline_factor: Multiplies the deadline of every verifier, for slow machines.
    """

    def __init__(
        self, *, workers: int = 0, cache: int = 200_000, memory_gib: float = 4.0, deadline_factor: float = 1.0
    ):
        self.workers = workers or min(_cores(), MOST_WORKERS)
        self._memory, self._factor, self._size = int(memory_gib * 2**30), deadline_factor, cache
        self._lock = threading.Condition()
        self._pool: Pool | None = None
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._failed: dict[bytes, Verdict] = {}
        self._open: dict[bytes, _Asked] = {}
        self._tickets: set[_Ticket] = set()
        self._counts: dict[str, Counts] = {}
        self._errors = GradingStats()
        self._settled = 0
        self._failure: BaseException | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Groups under way are given up; their futures raise."""
        if self._pool is not None:
            self._pool.close()
        self._fail(RuntimeError("the grader was closed"))

    def submit(self, group: Group) -> futures.Future[GradingStats]:
        """Grades ``group`` in the background: fills ``status`` and ``reward`` of its samples, then sets the future.

        An aborted sample carries no reward. A response without an answer has reward 0.

        Raises:
            ValueError: unknown verifier, one that workers can't import, or two samples with the same index.
            RuntimeError: the grading processes have failed as a whole, or the grader is closed.
        """
        prompt, verifier = group.prompt, get(group.prompt.verifier)
        if len({s.index for s in group.samples}) != len(group.samples):
            raise ValueError(f"{prompt.id}: two samples of one group have the same index")
        if verifier.rules.where == "worker" and verifier.scorer.__module__ == "__main__":
            raise ValueError(
                f"verifier {verifier.name!r} is defined in the script that was started, where workers can't import "
                "it; put it into a module of its own"
            )
        ticket = _Ticket(group)
        counts = self._counts.setdefault(verifier.name.partition(":")[0], defaultdict(float))
        answers = _answers(ticket, verifier, counts)
        identity = _identity(prompt) if answers else b""
        items: list[Item] = []
        with self._lock:
            self._wait_for_room()
            self._tickets.add(ticket)
            for answer, samples in answers.items():
                item = self._look_up(ticket, verifier, counts, identity, answer, samples)
                if item is not None:
                    items.append(item)
            if items and self._pool is None:
                self._pool = Pool(
                    self.workers, memory=self._memory, deadline_factor=self._factor, on_failure=self._fail
                )
            finished = self._finished(ticket)
        if finished:
            ticket.future.set_result(ticket.stats)
        if items and self._pool is not None:
            self._pool.ask(items)
        return ticket.future

    def wait(
        self, pending: Iterable[futures.Future[GradingStats]], check: Callable[[], None] = lambda: None
    ) -> GradingStats:
        """Waits until all ``pending`` are graded, and returns their sum.

        Args:
            check: Called several times a second; raises to stop waiting.

        Raises:
            RuntimeError: the grading processes have failed, or nothing has moved for longer than any deadline allows.
        """
        pending = list(pending)
        idle = self._settled, 0.0
        while futures.wait(pending, timeout=POLL).not_done:
            check()
            idle = self._idle(*idle)
        total = GradingStats()
        for future in pending:
            total += future.result()
        return total

    def grade(self, groups: Iterable[Group], check: Callable[[], None] = lambda: None) -> GradingStats:
        """Submits ``groups`` and waits for them."""
        return self.wait([self.submit(group) for group in groups], check)

    def pop_metrics(self) -> dict[str, float]:
        """``grading/<scorer>/<counter>`` since the last call.

        ``answers`` stated by samples; ``unanswered`` samples; ``graded`` distinct answers scored anew; ``cache_hits``
        answers that cost nothing; ``timeouts`` and ``errors`` among the graded; ``seconds`` in scorers, all workers'.
        """
        with self._lock:
            metrics: dict[str, float] = {
                f"grading/{name}/{counter}": counts[counter]
                for name, counts in sorted(self._counts.items())
                for counter in COUNTERS
            }
            for counts in self._counts.values():
                counts.clear()
            self._failed.clear()
        return metrics

    def pop_errors(self) -> list[str]:
        """The first few distinct failures since the last call."""
        with self._lock:
            errors, self._errors = self._errors.errors, GradingStats()
        return errors

    def _look_up(
        self,
        ticket: _Ticket,
        verifier: Verifier,
        counts: Counts,
        identity: bytes,
        answer: str,
        samples: list[Sample],
    ) -> Item | None:
        """Gives ``samples`` their verdict, or lets them wait for one; an item if nobody has asked for it yet."""
        key = _digest(verifier.name.encode(), identity, answer.encode("utf-8", "surrogatepass"))
        counts["cache_hits"] += len(samples)
        if (reward := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            _fill(ticket, samples, Verdict(reward))
            return None
        if verdict := self._failed.get(key):
            _fill(ticket, samples, verdict)
            return None
        if asked := self._open.get(key):
            asked.waiting.append((ticket, samples))
            ticket.open += 1
            return None
        counts["cache_hits"] -= 1
        ticket.stats.scored += 1
        if verdict := _decide(verifier, answer, ticket.group.prompt):
            self._remember(key, verdict, counts, ticket.group.prompt)
            _fill(ticket, samples, verdict)
            return None
        deadline = verifier.rules.deadline * self._factor
        self._open[key] = _Asked(counts, deadline, [(ticket, samples)])
        ticket.open += 1
        settle = functools.partial(self._settle, key)
        return Item(verifier, ticket.group.prompt, identity, answer, settle)

    def _settle(self, key: bytes, item: Item, verdict: Verdict) -> None:
        """A worker's verdict; called from the pool's thread."""
        with self._lock:
            asked = self._open.pop(key, None)
            if asked is None:  # closed meanwhile
                return
            self._settled += 1
            self._remember(key, verdict, asked.counts, item.prompt)
            finished = []
            for ticket, samples in asked.waiting:
                _fill(ticket, samples, verdict)
                ticket.open -= 1
                if self._finished(ticket):
                    finished.append(ticket)
            self._lock.notify_all()
        for ticket in finished:
            ticket.future.set_result(ticket.stats)

    def _remember(self, key: bytes, verdict: Verdict, counts: Counts, prompt: Prompt) -> None:
        counts["graded"] += 1
        counts["seconds"] += verdict.seconds
        if verdict.status is None:
            self._cache[key] = verdict.reward
            if len(self._cache) > self._size:
                self._cache.popitem(last=False)
            return
        counts["timeouts" if verdict.status is Status.TIMEOUT else "errors"] += 1
        self._failed[key] = verdict
        self._errors.add_error(f"{prompt.id}: {verdict.message}")

    def _finished(self, ticket: _Ticket) -> bool:
        if ticket.open:
            return False
        self._tickets.discard(ticket)
        return True

    def _fail(self, error: BaseException) -> None:
        """Lets everything under way raise ``error``, and everything that comes."""
        with self._lock:
            self._failure = self._failure or error
            tickets, self._tickets = self._tickets, set()
            self._open.clear()
            self._lock.notify_all()
        for ticket in tickets:
            ticket.future.set_exception(self._failed_as_a_whole())

    def _wait_for_room(self) -> None:
        """Bounds what is under way; needs the lock, and gives it up while waiting."""
        idle = self._settled, 0.0
        while self._failure is None and len(self._open) >= MAX_OPEN:
            self._lock.wait(POLL)
            idle = self._idle(*idle)
        if self._failure is not None:
            raise self._failed_as_a_whole()

    def _failed_as_a_whole(self) -> RuntimeError:
        error = RuntimeError(f"grading has failed: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _idle(self, settled: int, seconds: float) -> tuple[int, float]:
        """How many verdicts there are, and seconds (of polls: a suspended run is not idle) that it has been as many."""
        if settled != self._settled:
            return self._settled, 0.0
        if seconds > self._longest():
            waits_for = self._pool.waits_for() if self._pool else "no worker was started"
            raise RuntimeError(f"grading has stood still for {seconds:.0f} s: {waits_for}")
        return settled, seconds + POLL

    def _longest(self) -> float:
        """Seconds after which some verdict must have come, whatever happens."""
        return 2 * STARTUP + 2 * max((asked.deadline for asked in list(self._open.values())), default=0.0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _identity(prompt: Prompt) -> bytes:
    """A name for all of the prompt that a scorer may read; tokens belong to the policy."""
    parts: list[Any] = [prompt.id, prompt.text, prompt.gold, prompt.source, prompt.meta]
    return _digest(json.dumps(parts, sort_keys=True, default=repr).encode())


def _answers(ticket: _Ticket, verifier: Verifier, counts: Counts) -> dict[str, list[Sample]]:
    """The samples by stated answer; what states none is judged on the spot."""
    answers: dict[str, list[Sample]] = {}
    for sample in ticket.group.samples:
        sample.status, sample.reward = None, float("nan")
        if sample.finish is Finish.ABORT:
            _fill(ticket, [sample], Verdict(status=Status.ABORTED))
            continue
        try:
            answer = verifier.extract(sample.text, truncated=sample.finish is Finish.LENGTH)
        except Exception as error:
            _fill(ticket, [sample], Verdict(status=Status.GRADER_ERROR, message=describe(error)))
            continue
        if answer is None:
            counts["unanswered"] += 1
            ticket.stats.unanswered += 1
            _fill(ticket, [sample], Verdict(0.0))
        else:
            counts["answers"] += 1
            answers.setdefault(answer.text, []).append(sample)
    return answers


def _decide(verifier: Verifier, answer: str, prompt: Prompt) -> Verdict | None:
    """The verdict, where it can be had without a worker."""
    start = time.perf_counter()
    try:
        score = verifier.decide(Answer(answer), prompt)
    except Exception as error:  # anything the scorer's libraries raise; it must never look like a wrong answer
        return Verdict(status=Status.GRADER_ERROR, message=describe(error))
    return None if score is None else Verdict(score, seconds=time.perf_counter() - start)


def _fill(ticket: _Ticket, samples: list[Sample], verdict: Verdict) -> None:
    stats = ticket.stats
    for sample in samples:
        truncated = Status.TRUNCATED if sample.finish is Finish.LENGTH else Status.OK
        sample.status, sample.reward = verdict.status or truncated, verdict.reward
        stats.statuses[sample.status] += 1
    if verdict.message:
        stats.add_error(f"{ticket.group.prompt.id}: {verdict.message}")
