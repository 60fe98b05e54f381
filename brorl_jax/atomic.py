"""Replace a file or directory in one step, so that a reader sees the old contents or the new, never half of either."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


def write_text(target: Path, text: str) -> None:
    """``target`` becomes ``text``. A kill may leave ``<name>.partial`` beside it."""
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    partial.replace(target)


@contextlib.contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yields an empty sibling directory to fill; on success it is synced to disk and takes the place of ``target``.

    If the body raises, or the process dies, ``target`` is what it was. After a kill, a hidden sibling
    ``.<name>.partial-*`` may remain and can be deleted.

    Where the file system cannot exchange two directories in one call, the old one is first renamed to
    ``.<name>.previous``; a crash between the two renames leaves it there, complete.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            if path.is_file():
                path.chmod(partial.stat().st_mode & 0o666)  # safetensors writes private files
            _sync(path)
        _swap(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    """``target`` becomes ``new``; what ``target`` was, if anything, ends up at ``new`` for deletion."""
    if not target.exists():
        new.rename(target)
        return
    if _exchange(new, target):
        return
    previous = target.with_name(f".{target.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)
    new.rename(target)
    shutil.rmtree(previous)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths atomically (Linux ``renameat2``); False where the system or file system has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
