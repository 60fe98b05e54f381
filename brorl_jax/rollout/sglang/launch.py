"""Servers of our own: the command line for a config, and processes that end with us.

Each runs behind ``guard.py`` in a process group of its own. Nothing is ever killed by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang import guard

STOP_S = 15.0
READY_S = 5.0
GONE_S = 5.0
LAST_BYTES = 4000
# The trainer's own settings must not leak into the server's process.
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_PLATFORMS")
KEYS = {"api-key": "SGLANG_API_KEY", "admin-api-key": "SGLANG_ADMIN_API_KEY"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One server to start.

    Attributes:
        command: Its whole command line.
        env: Its whole environment.
        url: Where it will answer.
        log: File that its output is appended to.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(repr=False)
    url: str
    log: Path


def specs(
    launch: Any, servers: int, *, model: Path, dtype: str, context: int, seed: int, logs: Path, keys: Path | None = None
) -> list[Spec]:
    """The servers that ``rollout.sglang.launch`` describes.

    Args:
        launch: That section of the config.
        servers: How many, on consecutive ports.
        model: Directory with ``config.json``; weights are published later, so none are loaded.
        dtype: Served.
        context: Most tokens of prompt and response.
        seed: Of the servers' sampling; each gets another one.
        logs: Directory of the log files.
        keys: File with the servers' keys, see ``write_keys``.

    Raises:
        UserError: There is no such interpreter.
    """
    python = Path(launch.python).expanduser()
    if not python.is_file():
        raise UserError(
            f"rollout.sglang.launch.python = {launch.python}: no such file; it must be the Python of an environment "
            "with sglang (`make sglang-cpu` makes one for CPUs, docs/sglang.md says how for GPUs)"
        )
    each = launch.tp * launch.dp
    extra = dict(entry.split("=", 1) for entry in launch.env)
    found = []
    for i in range(servers):
        flags = {
            "--model-path": model,
            "--load-format": "dummy",
            "--dtype": dtype,
            "--context-length": context,
            "--host": launch.host,
            "--port": launch.port + i,
            "--tp-size": launch.tp,
            "--dp-size": launch.dp,
            "--mem-fraction-static": launch.mem_fraction,
            "--random-seed": (seed + i) % 2**31,
            "--weight-version": "none",
            "--log-level-http": "warning",  # not a line for every sample
        }
        for flag in launch.flags:  # may overrule ours
            name, _, value = flag.partition("=")
            flags[name] = value
        command = [str(python.absolute()), "-m", "sglang.launch_server"]
        if keys is not None:
            command += ["--config", str(keys)]
        command += [str(part) for name, value in flags.items() for part in ([name, value] if value != "" else [name])]
        command += ["--skip-tokenizer-init", "--skip-server-warmup", "--enable-metrics"]
        env = (
            {k: v for k, v in os.environ.items() if k not in (*DROPPED, *KEYS.values())}
            | {"HF_HUB_OFFLINE": "1"}
            | extra
        )
        if launch.gpus:
            if len(launch.gpus) < servers * each:
                raise UserError(f"{servers} servers need {servers * each} GPUs, rollout.sglang.launch.gpus names fewer")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in launch.gpus[i * each : (i + 1) * each])
        host = "127.0.0.1" if launch.host == "0.0.0.0" else launch.host
        url, log = f"http://{host}:{launch.port + i}", logs / f"sglang_{launch.port + i}.log"
        found.append(Spec(tuple(command), env, url, log))
    return found


def write_keys(folder: Path) -> Path | None:
    """The keys of the environment as a file that servers read and only this user can; command lines are public."""
    lines = [f"{option}: {os.environ[name]!r}\n" for option, name in KEYS.items() if os.environ.get(name)]
    if not lines:
        return None
    handle, path = tempfile.mkstemp(".yaml", "keys-", folder)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.writelines(lines)
    return Path(path)


class Server:
    """A server process that we started."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; it needs half a minute or more until it answers.

        Raises:
            UserError: Somebody else has its port: the trainer would take theirs for ours.
        """
        where = urllib.parse.urlsplit(self.spec.url)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended is nobody
            try:
                probe.bind((where.hostname, where.port))
            except OSError as error:
                hint = "set rollout.sglang.launch.port and host to what is free on this machine"
                raise UserError(f"cannot start a server at {self.spec.url}: {error}; {hint}") from error
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", guard.__file__, str(os.getpid()), *self.spec.command]
        with self.spec.log.open("ab") as log:
            log.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(self.spec.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                env=dict(self.spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether it runs; that does not mean it answers."""
        # WNOWAIT: as long as nobody has collected it, its id, which is also its group's, is given to nobody else.
        return self._process is not None and not os.waitid(
            os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        )

    def answers(self) -> bool:
        """Whether it is up and takes requests."""
        direct, url = urllib.request.build_opener(urllib.request.ProxyHandler({})), f"{self.spec.url}/ready"
        with contextlib.suppress(OSError, http.client.HTTPException), direct.open(url, timeout=READY_S) as answer:
            return answer.status == 200
        return False

    def tell(self) -> None:
        """Asks it to end; ``stop`` waits for that."""
        if self._process is not None and self.alive():
            os.kill(self._process.pid, signal.SIGTERM)  # the guard ends the group

    def restart(self) -> None:
        """Starts it again, after having ended what is left of it."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Ends its process group; returns when the group is gone."""
        process, end = self._process, time.monotonic() + STOP_S
        if process is None:
            return
        self.tell()
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # where the guard itself was killed, the others may still be there
        process.wait()
        self._process, end = None, time.monotonic() + GONE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:  # ports and GPU memory are free only when the last of them has ended
                os.killpg(process.pid, 0)
                time.sleep(0.05)

    def last_words(self) -> str:
        """The last lines of its log, on one line."""
        try:
            with self.spec.log.open("rb") as file:
                file.seek(max(0, self.spec.log.stat().st_size - LAST_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return str(error)
        telling = [line.strip() for line in lines if "Error" in line or "error" in line] or lines
        return f"{self.spec.log} ends with: {' | '.join(telling[-2:])[-400:]}"


def stop_all(servers: Sequence[Server]) -> None:
    """Stops all, telling each before waiting for any."""
    for server in servers:
        server.tell()
    for server in servers:
        server.stop()
