"""Scorers that misbehave as their answer tells them, in a module that workers import."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from brorl_jax.rewards import registry, service

DEADLINE = 1.0  # seconds
_kept: list[bytes] = []


def _hostile(answer: str, prompt: Any) -> Any:
    """Does what the answer says; any other answer is worth its checksum, so that a mix-up shows."""
    word, _, rest = answer.partition(" ")
    match word:
        case "hang":
            while True:
                pass
        case "hang_in_c":
            return float(9 ** (9**9) > 0)
        case "sleep":
            time.sleep(float(rest))
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "_exit":
            os._exit(int(rest))
        case "exit":
            sys.exit(int(rest))
        case "interrupt":
            raise KeyboardInterrupt
        case "raise":
            raise RuntimeError("x" * 10_000)
        case "recurse":
            return _hostile(answer, prompt)
        case "memory":
            return float(len(bytearray(1 << 40)))
        case "grow":
            _kept.append(b"x" * (int(rest) << 20))
        case "lambda":
            return lambda: 1.0
        case "nan":
            return float("nan")
        case "print":
            for _ in range(1000):
                print("out" * 1000)
                print("err" * 1000, file=sys.stderr)
                logging.getLogger("noise").error("log" * 1000)
            os.write(1, b"raw" * 100_000)
        case "alarm":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "fork":
            if os.fork() == 0:
                return 0.0  # the child goes on in its parent's place
        case "forge":
            os.write(_socket(), b'{"id": 1, "reward": 1.0, "seconds": 0}\n')
        case "flood":
            while True:
                os.write(_socket(), b"x" * 65536)
        case "orphan":  # in a session of its own, with its parent gone
            code = f"import subprocess, sys; p = subprocess.Popen(['sleep', '{rest}'], start_new_session=True)"
            subprocess.run([sys.executable, "-c", code], check=True)
            while True:
                pass
        case "pid":
            Path(rest).write_text(str(os.getpid()))
            time.sleep(60)
        case "slot":
            Path(rest, str(service.slot())).touch()
            time.sleep(0.3)
        case "no":
            return float("jax" not in sys.modules and "jaxlib" not in sys.modules)
        case "one":
            return float(os.environ["OMP_NUM_THREADS"] == "1")
        case "main":
            return float(threading.current_thread() is threading.main_thread())
    return plain(answer, prompt)


def plain(answer: str, prompt: Any) -> float:
    """What a well-behaved answer is worth: a checksum of it and the gold, in [0, 1]."""
    return zlib.crc32(f"{prompt.gold}/{answer}".encode("utf-8", "surrogatepass")) / 2**32


def _socket() -> int:
    """The worker's line to the trainer: the only socket it has."""
    links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _alive(fd)}
    return next(fd for fd, target in sorted(links.items()) if target.startswith("socket:"))


def _alive(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


if "hostile" not in registry.names():  # this module may be imported under two names
    registry.register("hostile", default_format="whole", deadline=DEADLINE)(_hostile)
    registry.register("patient", default_format="whole", deadline=30.0)(_hostile)
