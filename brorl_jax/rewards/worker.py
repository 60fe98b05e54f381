"""The far side of grading: a fork server that makes, ends and replaces workers, and the workers themselves.

The trainer starts one fork server, a plain Python process without jax and without threads. It imports the verifiers
once and forks workers, so that a new one is there within milliseconds. It alone reaps them, and only when it is told
to: no process id can be taken for another's. A worker leads a session of its own, and whatever a scorer started dies
with it: its process group at once, what left that group because it is adopted by the fork server.

Nobody outlives the trainer: the fork server ends when its socket closes or its parent is another, a worker by the
kernel's parent-death signal. Signals of the terminal (Ctrl-C) and of a batch system (SIGTERM) are the trainer's affair.
Kills of strays, parent-death signals and the choice of who dies when memory is short need Linux; elsewhere they are
left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brorl_jax.rewards.registry import Answer, get

KNOWN_PROMPTS = 64  # that a worker remembers; the trainer keeps the same list and sends a prompt once
MESSAGE_CHARS = 500  # of an error
_HEADER = 8
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK = 1.0  # seconds between two looks at the parent
_PATIENCE = 5.0  # seconds for a killed process to be gone

_slot = 0


def slot() -> int:
    """Number of the worker this runs in, from 0; 0 outside of workers. No two live workers of a run share one."""
    return _slot


def frame(message: Any) -> bytes:
    """A request as it goes to a worker: its length, then a pickle."""
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(_HEADER, "big") + payload


def describe(error: BaseException) -> str:
    """``<type>: <message>`` in bounded length, whatever the exception's own ``__str__`` does."""
    try:
        text = str(error)
    except Exception:
        text = "(its message can't be shown)"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS]


def serve(fd: int, memory: int) -> None:
    """Runs the fork server on the socket ``fd``, one JSON line per request.

    ``{"do": "load", "modules": [...]}`` imports; ``{"do": "fork", "slot": k, "old": pid | None}`` ends the worker
    ``old`` with all it started, forks another on the socket that comes along, and answers ``{"pid", "ended"}``.

    Args:
        memory: Bytes of address space of each worker; 0 is no limit.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)  # a handler, since an ignored signal stays ignored in what scorers start
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent, workers, buffer = os.getppid(), set(), b""
    sockets: list[int] = []
    with socket.socket(fileno=fd) as control:
        _answer(control, {"ready": True})
        while os.getppid() == parent:
            _reap(_children() - workers)
            if not select.select([control], [], [], _TICK)[0]:
                continue
            data, received, *_ = socket.recv_fds(control, 1 << 16, 4)
            if not data:
                break
            sockets += received
            *lines, buffer = (buffer + data).split(b"\n")
            for request in map(json.loads, lines):
                if request["do"] == "load":
                    load(request["modules"])
                    continue
                ended = _end(request["old"], workers)
                pid = _fork(sockets.pop(0), control, request["slot"], memory)
                workers.add(pid)
                _answer(control, {"pid": pid, "ended": ended})
    for pid in list(workers):
        _end(pid, workers)


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the trainer has gone, as reading will say
        control.sendall(json.dumps(message).encode() + b"\n")


def load(modules: Iterable[str]) -> None:
    """Imports what there is of ``modules``; what is missing or broken is the scorer's to report."""
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> set[int]:
    """Children of this process that are not reaped; only Linux tells."""
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(pid: int | None, workers: set[int]) -> str:
    """Kills a worker and everything it started; says how the worker ended."""
    if pid is None:
        return ""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    status, end = 0, time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.001)
    workers.discard(pid)
    while (strays := _children() - workers) and time.monotonic() < end:  # the children of a stray come to us next
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)
        _reap(strays)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _fork(fd: int, control: socket.socket, number: int, memory: int) -> int:
    server = os.getpid()
    if pid := os.fork():
        os.close(fd)
        return pid
    try:
        control.close()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            _limit(memory)
            with socket.socket(fileno=fd) as sock:
                _work(sock, number, memory)
    finally:
        os._exit(0)


def _limit(memory: int) -> None:
    """Bounded memory, no core files, the first to die when the machine's memory is short, and silence."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def _work(sock: socket.socket, number: int, memory: int) -> None:
    """Scores one answer after another until the socket closes, or until its memory is half used up."""
    global _slot
    _slot, me = number, os.getpid()
    prompts: OrderedDict[bytes, Any] = OrderedDict()
    warm: set[str] = set()
    stream = sock.makefile("rb")
    while header := stream.read(_HEADER):
        ident, name, modules, key, prompt, answer = pickle.loads(stream.read(int.from_bytes(header, "big")))
        prompt = remember(prompts, key, prompt)
        if name not in warm:
            load(modules)
            warm.add(name)
            sock.sendall(json.dumps({"id": ident, "ready": True}).encode() + b"\n")
        start = time.perf_counter()
        reply: dict[str, Any] = {"id": ident}
        try:
            reply["reward"] = get(name).score(Answer(answer), prompt)
        except BaseException as error:  # sys.exit() and what else a library may raise: none ends the worker
            reply["error"] = describe(error)
            if isinstance(error, MemoryError):
                reply["spent"] = True
        if os.getpid() != me:  # the scorer forked, and this is the child
            os._exit(0)
        signal.alarm(0)  # left behind by the scorer
        reply["seconds"] = time.perf_counter() - start
        if memory and _peak() > memory / 2:  # what a library keeps would leave ever less to the answers to come
            reply["spent"] = True
        sock.sendall(json.dumps(reply).encode() + b"\n")
        if "spent" in reply:
            return


def _peak() -> int:
    """Bytes of memory this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def remember(known: OrderedDict[bytes, Any], key: bytes, value: Any) -> Any:
    """Looks up ``key``, or adds ``value`` and drops the entry used least recently. Both sides do it, in step."""
    if key in known:
        known.move_to_end(key)
    else:
        known[key] = value
        if len(known) > KNOWN_PROMPTS:
            known.popitem(last=False)
    return known[key]
