"""Several processes train one model: who they are, and the few things they do together on the host.

Every process runs the same loop on the same prompts. It generates and grades its ``share`` of each round, then all of
them hold all groups (``gather``); from there on they compute the same, each for its own devices. What is written, is
written by one. In one process, everything here is the identity.

Importing this imports no jax: who takes part is settled before that is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brorl_jax import watchdog
from brorl_jax.config import Config, ConfigError, derived
from brorl_jax.config_fields import leaves
from brorl_jax.errors import UserError, mistake
from brorl_jax.processes import link as link_lib

T = TypeVar("T")
PORT = 29_400  # of process 0 under SLURM, plus the job's number modulo 1,000
NOTICE_S = 1.0  # by when the link knows of a process that died on a machine that lives

_link: link_lib.Link | None = None


class Place(NamedTuple):
    """Which process this is.

    Attributes:
        index: 0 to ``count - 1``.
        count: Of all processes.
        coordinator: Host and port of process 0.
    """

    index: int
    count: int
    coordinator: tuple[str, int]


ALONE = Place(0, 1, ("", 0))


def place(processes: str, process_id: int | None, coordinator: str, environment: Mapping[str, str]) -> Place:
    """From the flags ``--processes``, ``--process_id`` and ``--coordinator``; ``--processes=slurm`` asks ``srun``.

    Raises:
        UserError: They say too little, or too much.
    """
    if processes == "slurm":
        names = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
        if missing := [name for name in names if name not in environment]:
            raise UserError(f"--processes=slurm: {missing[0]} is not set; start the processes with srun")
        if process_id is not None:
            raise UserError(f"--process_id={process_id}: SLURM numbers the processes; leave it out")
        count, index = int(environment["SLURM_NTASKS"]), int(environment["SLURM_PROCID"])
        port = PORT + int(environment["SLURM_JOB_ID"]) % 1000
        coordinator = coordinator or f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    elif not processes.isdecimal() or int(processes) < 1:
        raise UserError(f"--processes={processes}: must be a number from 1, or slurm")
    else:
        count, index = int(processes), process_id or 0
        if count == 1 and (coordinator or process_id is not None):
            raise UserError("--coordinator and --process_id need --processes, the number of processes")
        if count > 1 and (process_id is None or not coordinator):
            raise UserError(
                f"--processes={count} needs --process_id (0 to {count - 1}) and --coordinator=host:port of process 0"
            )
    if not 0 <= index < count:
        raise UserError(f"--process_id={index}: must be from 0 to {count - 1}, since --processes={count}")
    if count == 1:
        return ALONE
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(f"--coordinator={coordinator}: write host:port, an address of process 0 that all can reach")
    return Place(index, count, (host.strip("[]"), int(port)))


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu-[003-007,9],login`` -> ``gpu-003``."""
    first = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def check(config: Config, count: int) -> None:
    """Raises ``ConfigError`` where ``config`` cannot be shared among ``count`` processes."""
    if count == 1:
        return
    for path in ("rollout.overlap", "model.offload_reference", "optim.offload"):
        if _value(config, path):
            raise ConfigError(f"config.{path} = True: not with several processes; set it to False")
    devices = derived(config)["devices"]
    if devices % count:
        raise ConfigError(f"config.mesh: its {devices} devices cannot be shared evenly among {count} processes")
    if config.rollout.prompts_per_step % count:
        raise ConfigError(
            f"config.rollout.prompts_per_step = {config.rollout.prompts_per_step}: use a multiple of the {count} "
            "processes, or some wait for the others in every step"
        )
    if config.rollout.engine != "sglang":
        return
    urls = config.rollout.sglang.urls
    for path in ("rollout.sglang.router", "rollout.sglang.launch.servers"):
        if value := _value(config, path):
            raise ConfigError(
                f"config.{path} = {value!r}: each process needs servers of its own; "
                "name them in config.rollout.sglang.urls, which are dealt out"
            )
    if len(urls) % count:
        raise ConfigError(
            f"config.rollout.sglang.urls = {tuple(urls)!r}: {len(urls)} servers cannot be dealt evenly to {count} "
            "processes"
        )


@contextlib.contextmanager
def together(where: Place, config: Config, workdir: str) -> Iterator[None]:
    """Connects the processes, and jax's runtimes with them. One that fails inside ends here, and the others with it.

    Raises:
        UserError: Processes are missing, or were not started with the same settings.
    """
    global _link
    if where.count == 1:
        yield
        return
    check(config, where.count)
    limits = config.processes
    facts = {f"config.{path}": _value(config, path) for path in leaves(config)}
    facts |= {"--workdir": os.path.abspath(workdir)}
    facts |= {name: metadata.version(name) for name in ("jax", "jaxlib")}
    facts["_jax_port"] = 0 if where.index else _free_port(where.coordinator[0])
    peers, facts = link_lib.connect(
        where.coordinator, where.index, where.count, facts, start_timeout_s=limits.start_timeout_s
    )
    _link = link_lib.Link(where.index, where.count, peers, lost_after_s=limits.lost_after_s, wait_s=limits.wait_s)
    try:
        _check_shared(Path(workdir))
        _start_jax(where, facts["_jax_port"], limits)
        yield
        _finish()
    except BaseException as error:
        _fail(error)


def _check_shared(workdir: Path) -> None:
    """Raises ``UserError`` unless all processes see what process 0 writes: each writes its part of a checkpoint."""
    mark = workdir / ".seen_by_all"
    if is_writer():
        mark.write_text(secrets.token_hex())
    written = gather_json(mark.read_text() if is_writer() else "", "the workdir")[0]
    seen = gather_json(mark.exists() and mark.read_text() == written, "the workdir")
    if is_writer():
        mark.unlink()
    if not all(seen):
        blind = ", ".join(str(i) for i, sees in enumerate(seen) if not sees)
        raise UserError(f"--workdir={workdir}: not the same folder for process {blind} as for process 0; share it")


def _start_jax(where: Place, port: int, limits: Config) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    jax.distributed.initialize(
        link_lib.text((where.coordinator[0], port)),
        where.count,
        where.index,
        cluster_detection_method="deactivate",
        initialization_timeout=int(limits.start_timeout_s),
        heartbeat_timeout_seconds=int(limits.wait_s),  # our link is the one that watches
    )
    jax.devices()  # all together: a process that waits for another's word first would not answer jax's question


def _finish() -> None:
    import jax

    assert _link is not None
    barrier("the end")
    jax.distributed.shutdown()  # where it waits for the others, for minutes, the link still watches
    _link.leave()


def _fail(error: BaseException) -> None:
    """Says why this process ends, to the user and the others, and ends it: at a regular exit jax waits for them."""
    code = 1
    try:
        code, line = _explain(error)
        assert _link is not None
        if _link.agreed and isinstance(error, SystemExit):
            _finish()
        else:
            _link.leave(line)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever else fails, such as a print to a closed pipe
        os._exit(code)


def _explain(error: BaseException) -> tuple[int, str]:
    """Shows the error; its exit status, and the line that tells the others."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1, error.code.removeprefix("error: ")
        return error.code or 0, f"exit status {error.code or 0}"
    time.sleep(NOTICE_S)  # an error over a dead process names none: leave it to the link, which ends this one
    if line := mistake(error):
        print(f"error: {line}", file=sys.stderr)
        return 2, line
    traceback.print_exception(error)
    return 1, f"{type(error).__name__}: {error}".splitlines()[0]


def _value(config: Config, path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return json.loads(json.dumps(config, default=list))


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0), family=link_lib.family(host)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise UserError(f"--coordinator: process 0 has no address {host} ({error.strerror or error})") from error


def index() -> int:
    """Number of this process, from 0."""
    return _link.index if _link else 0


def count() -> int:
    """How many processes there are."""
    return _link.count if _link else 1


def is_writer() -> bool:
    """Whether this process writes what one alone must write."""
    return index() == 0


def share(items: Sequence[T]) -> list[T]:
    """This process's items: every ``count``-th, beginning with its own number."""
    return list(items[index() :: count()])


def unshare(shares: Sequence[Sequence[T]]) -> list[T]:
    """The items in their first order, from all processes' shares."""
    out: list[Any] = [None] * sum(map(len, shares))
    for i, items in enumerate(shares):
        out[i :: len(shares)] = items
    return out


def gather(value: T, what: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> list[T]:
    """``value`` of every process, in order of their numbers. All must call it.

    Args:
        what: What it is, for messages about processes that do not come.
        encode, decode: The others' values travel as bytes.
    """
    if _link is None:
        return [value]
    with watchdog.excused(f"waiting for other processes at {what!r}"):
        parts = _link.gather(encode(value), what)
    return [value if i == _link.index else decode(part) for i, part in enumerate(parts)]


def gather_json(value: T, what: str) -> list[T]:
    """``gather`` of a JSON value."""
    return gather(value, what, lambda x: json.dumps(x).encode(), json.loads)


def barrier(what: str) -> None:
    """Returns when all processes have come."""
    gather_json(None, what)


def writer_first(make: Callable[[], T], what: str) -> T:
    """``make()``, on process 0 before the others, which find what it left on disk."""
    if not is_writer():
        barrier(what)
    made = make()
    if is_writer():
        barrier(what)
    return made


def title(name: str) -> str:
    """``name`` of a display; with this process's number, unless it is the writer's."""
    return name if is_writer() else f"{name} (process {index()})"


def folder(workdir: Path) -> Path:
    """Where this process keeps its records: ``workdir`` for the writer, ``workdir/processes/<number>`` for others."""
    return workdir if is_writer() else workdir / "processes" / str(index())


def ask_to_stop(signum: int) -> None:
    """Passes a signal on; to be called from its handler, so it only leaves a note to the link's thread."""
    if _link is not None:
        _link.stop_signal = _link.stop_signal or signum


def asked_to_stop() -> int:
    """The signal that some process got, 0 without one; at different times in different processes."""
    return _link.stop_signal if _link else 0


def agree_to_stop(signum: int, what: str) -> int:
    """The signal that all processes stop for now, 0 if none: the same answer everywhere."""
    agreed = max(gather_json(signum, what))
    if _link is not None:
        _link.agreed = bool(agreed)
    return agreed


def check_same(facts: Mapping[str, str], what: str) -> None:
    """Raises ``UserError`` where some process has other ``facts`` than process 0."""
    everyone = gather_json(dict(facts), what)
    for i, theirs in enumerate(everyone):
        for key in {**everyone[0], **theirs}:
            if (ours := everyone[0].get(key)) != (other := theirs.get(key)):
                raise UserError(f"{what}: process {i} has {key} = {other!r}, process 0 has {ours!r}")


def end_together(what: str) -> None:
    """Returns when all processes have come; from here on, each may exit as it likes."""
    barrier(what)
    if _link is not None:
        _link.agreed = True


def lone(check: Callable[[], None]) -> Callable[[], None]:
    """``check`` where one process may stop by itself; in several, which stop together, nothing."""
    return check if _link is None else (lambda: None)
