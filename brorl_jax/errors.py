"""The errors that are shown to the user without a traceback."""

from __future__ import annotations

import errno

# What a path can be that the user must mend: no permission, read-only, a disk that is full, a file for a folder, ...
UNUSABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


class UserError(ValueError):
    """Something the user can mend. The message is one line: what is wrong, with which value, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def mistake(error: BaseException) -> str:
    """What to say of a ``UserError``, or of a path that can't be used; empty for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in UNUSABLE:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)  # a write knows no name
    return ""
