"""The near side of grading: hands items to workers, one at a time each, and replaces workers that hang or die.

One thread in the trainer watches everything: answers, deadlines, deaths. It never blocks on a worker; sockets are
non-blocking and every wait of it is bounded. It reads what has arrived before it judges a deadline, so that a trainer
that was busy for a while blames nobody; nor does one that was suspended (by a batch system, say) together with its
workers, since time in which it did not wake up does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from brorl_jax.rewards import worker as worker_lib
from brorl_jax.rewards.forkserver import STARTUP, ForkServer
from brorl_jax.rewards.registry import Verifier
from brorl_jax.types import Prompt, Status

QUICK = 0.02  # seconds; of verifiers that are quicker on average, a worker gets a second item in advance
STUCK = 0.1  # seconds on one item, after which what waits behind it is offered to idle workers
AWAY = 0.5  # seconds by which the thread may wake up late
BARREN = 8  # workers lost in a row without any result, before the pool gives up
MAX_REPLY = 1 << 16  # bytes


@dataclasses.dataclass(slots=True)
class Verdict:
    """What became of one answer.

    Attributes:
        reward: In [0, 1]; NaN where ``status`` says that there is none.
        status: None, ``TIMEOUT`` or ``GRADER_ERROR``.
        message: Why there is no reward.
        seconds: Wall clock in the scorer.
    """

    reward: float = float("nan")
    status: Status | None = None
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class Item:
    """One answer to be scored, once. ``prompt_key`` names everything about the prompt that a scorer may read."""

    verifier: Verifier
    prompt: Prompt
    prompt_key: bytes
    answer: str
    settle: Callable[[Item, Verdict], None]
    ident: int = 0
    shared: bool = False  # has been offered to a second worker
    done: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Worker:
    slot: int
    pid: int
    sock: socket.socket
    items: deque[Item] = dataclasses.field(default_factory=deque)  # the first is being scored
    since: float = 0.0  # when that began
    warm: set[str] = dataclasses.field(default_factory=set)  # verifiers whose modules are imported
    prompts: OrderedDict[bytes, None] = dataclasses.field(default_factory=OrderedDict)
    unsent: bytearray = dataclasses.field(default_factory=bytearray)
    unread: bytes = b""
    spent: bool = False  # has done its last item


def modules(verifier: Verifier) -> tuple[str, ...]:
    """What a process must import to know ``verifier`` and to be quick at it."""
    return (verifier.scorer.__module__, *verifier.rules.preload)


class Pool:
    """Killable worker processes behind one thread; started by the first item.

    Args:
        workers: Number of processes, at least 1.
        memory: Bytes of address space of each; 0 is no limit.
        deadline_factor: Multiplies every verifier's deadline.
        on_failure: Called once, from the pool's thread, if the pool as a whole has failed.
    """

    def __init__(
        self, workers: int, *, memory: int, deadline_factor: float, on_failure: Callable[[BaseException], None]
    ):
        self.workers = workers
        self._memory, self._factor, self._on_failure = memory, deadline_factor, on_failure
        self._inbox: deque[Item] = deque()
        self._ids = itertools.count(1)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread: threading.Thread | None = None
        self._closing = False
        # below: of the thread alone
        self._selector = selectors.DefaultSelector()
        self._server: ForkServer | None = None
        self._team: list[_Worker] = []
        self._mean: dict[str, float] = {}  # seconds per item by verifier, over the last few
        self._barren = 0

    def ask(self, items: Iterable[Item]) -> None:
        """Queues ``items``; each is settled from the pool's thread."""
        self._inbox.extend(items)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
            self._thread.start()
        self._ring()

    def close(self) -> None:
        """Ends all processes, whatever they are doing; items that are left are never settled."""
        self._closing = True
        self._ring()
        if self._thread is not None:
            self._thread.join()
        for end in (self._wake, self._woken):
            end.close()
        self._selector.close()

    def waits_for(self) -> str:
        """What the workers are at, for an error message."""
        current = [(worker.slot, item) for worker in list(self._team) for item in list(worker.items)[:1]]
        items = [f"worker {slot}: {item.verifier.name} of {item.prompt.id}" for slot, item in current]
        return f"{len(self._inbox)} answers queued; {'; '.join(items) or 'no worker at work'}"

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"x")

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            self._start()
            while not self._closing:
                self._assign()
                before, pause = time.monotonic(), self._pause()
                ready = self._selector.select(pause)
                if (elapsed := time.monotonic() - before) > pause + AWAY:
                    for worker in self._team:
                        worker.since += elapsed
                for key, events in ready:
                    self._serve(key, events)
                self._judge(before)  # all that had arrived by then has been read
        except BaseException as error:
            if not self._closing:
                self._on_failure(error)
        finally:
            self._stop()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._woken:
            self._woken.recv(1 << 12)
        elif self._server and key.fileobj is self._server.control:
            self._restart()
        elif key.data in self._team:  # not replaced by an event before this one
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _start(self) -> None:
        """The fork server, then the workers."""
        self._server = server = ForkServer(memory=self._memory, given_up=lambda: self._closing)
        server.load(itertools.chain.from_iterable(modules(item.verifier) for item in list(self._inbox)))
        for slot in range(self.workers):
            pid, sock, _ = server.fork(slot)
            self._team.append(_Worker(slot, pid, sock))
            self._selector.register(sock, selectors.EVENT_READ, self._team[-1])
        self._selector.register(server.control, selectors.EVENT_READ, None)

    def _stop(self) -> None:
        for worker in self._team:
            worker.sock.close()
        if self._server is not None:
            self._server.close()
        self._team, self._server = [], None

    def _restart(self) -> None:
        """After the loss of the fork server, and so of all workers."""
        verdict = Verdict(status=Status.GRADER_ERROR, message="the grading processes were killed")
        self._count_loss(verdict.message)
        for worker in self._team:
            self._abandon(worker, verdict)
        if self._server is not None:
            self._selector.unregister(self._server.control)
        self._stop()
        self._start()

    # --- items ---

    def _assign(self) -> None:
        """Gives queued items to workers with room, idle ones first."""
        for room in (0, 1):
            for worker in self._team:
                while len(worker.items) == room and (item := self._next()):
                    if room and not (
                        self._mean.get(item.verifier.name, QUICK) < QUICK and item.verifier.name in worker.warm
                    ):
                        self._inbox.appendleft(item)
                        break
                    self._send(worker, item)

    def _next(self) -> Item | None:
        while self._inbox:
            item = self._inbox.popleft()
            if not item.done:
                return item
        return None

    def _send(self, worker: _Worker, item: Item) -> None:
        needed = modules(item.verifier)
        if self._server is not None:
            self._server.load(needed)
        item.ident = item.ident or next(self._ids)
        prompt = None if item.prompt_key in worker.prompts else item.prompt
        worker_lib.remember(worker.prompts, item.prompt_key, None)
        message = (item.ident, item.verifier.name, needed, item.prompt_key, prompt, item.answer)
        worker.unsent += worker_lib.frame(message)
        if not worker.items:
            worker.since = time.monotonic()
        worker.items.append(item)
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        try:
            while worker.unsent:
                del worker.unsent[: worker.sock.send(worker.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            worker.unsent.clear()  # it is dead, as reading from it will say
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.sock, events, worker)

    def _read(self, worker: _Worker) -> None:
        try:
            data = worker.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        if len(worker.unread) > MAX_REPLY or not all(self._take(worker, line) for line in lines):
            self._replace(worker, Verdict(status=Status.GRADER_ERROR, message="the worker spoke out of turn"))
        elif worker.spent:
            self._replace(worker, None)
        elif not data:
            self._replace(worker, Verdict(status=Status.GRADER_ERROR, message="the worker died"))

    def _take(self, worker: _Worker, line: bytes) -> bool:
        """Takes one reply; False if it is none to what was asked."""
        try:
            reply = json.loads(line)
            item = worker.items[0]
            if reply["id"] != item.ident:
                return False
            if "ready" in reply:
                worker.warm.add(item.verifier.name)
                worker.since = time.monotonic()
                return True
            failed = Status.GRADER_ERROR if "error" in reply else None
            verdict = Verdict(reply.get("reward", float("nan")), failed, reply.get("error", ""), reply["seconds"])
        except (ValueError, KeyError, TypeError, IndexError):
            return False
        worker.items.popleft()
        worker.since, worker.spent = time.monotonic(), "spent" in reply
        self._barren = 0
        mean = self._mean.get(item.verifier.name, verdict.seconds)
        self._mean[item.verifier.name] = mean + (verdict.seconds - mean) / 16
        self._settle(item, verdict)
        return True

    def _settle(self, item: Item, verdict: Verdict) -> None:
        if not item.done:
            item.done = True
            item.settle(item, verdict)

    # --- deadlines and deaths ---

    def _limit(self, worker: _Worker) -> float:
        verifier = worker.items[0].verifier
        return verifier.rules.deadline * self._factor if verifier.name in worker.warm else STARTUP

    def _pause(self) -> float:
        """Seconds until something is to be judged, at most one."""
        now, pause = time.monotonic(), 1.0
        for worker in self._team:
            if worker.items:
                due = STUCK if len(worker.items) > 1 and not worker.items[1].shared else self._limit(worker)
                pause = min(pause, worker.since + due - now)
        return max(0.0, pause)

    def _judge(self, now: float) -> None:
        for worker in list(self._team):
            if not worker.items:
                continue
            if now - worker.since >= (limit := self._limit(worker)):
                message = f"no verdict within {limit:g} s"
                self._mean[worker.items[0].verifier.name] = limit
                self._replace(worker, Verdict(status=Status.TIMEOUT, message=message, seconds=now - worker.since))
            elif now - worker.since >= STUCK:
                for item in list(worker.items)[1:]:
                    if not item.shared:
                        item.shared = True
                        self._inbox.appendleft(item)

    def _replace(self, worker: _Worker, verdict: Verdict | None) -> None:
        """Kills ``worker``, settles what it was at with ``verdict`` (None: nothing) and starts another in its place."""
        assert self._server is not None
        try:
            pid, sock, ended = self._server.fork(worker.slot, worker.pid)
        except ConnectionError:
            return self._restart()
        if verdict and verdict.status is Status.GRADER_ERROR:
            verdict.message += f" ({ended})"
        if verdict and not worker.items:
            self._count_loss(verdict.message)
        self._abandon(worker, verdict)
        self._team[self._team.index(worker)] = new = _Worker(worker.slot, pid, sock)
        self._selector.register(sock, selectors.EVENT_READ, new)

    def _abandon(self, worker: _Worker, verdict: Verdict | None) -> None:
        """Parts from a worker; what it had in advance goes back to the head of the queue."""
        self._selector.unregister(worker.sock)
        worker.sock.close()
        if worker.items and verdict:
            self._settle(worker.items.popleft(), verdict)
        self._inbox.extendleft(reversed(worker.items))
        worker.items.clear()

    def _count_loss(self, why: str) -> None:
        self._barren += 1
        if self._barren > max(BARREN, 2 * self.workers):
            raise RuntimeError(f"{self._barren} grading processes in a row were lost without a result; the last: {why}")
