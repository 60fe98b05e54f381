"""What the experiments' commands share: their tables as CSV, and mistakes as one line."""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from brorl_jax.commandline import piped
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Interrupted


def write_csv(path: Path, rows: Sequence[dict[str, Any]], digits: int) -> None:
    """Rows with the keys of the first one; floats to so many significant digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def at_least(least: int, **values: int) -> None:
    """Checks whole numbers of the command line, by the name of their option.

    Raises:
        UserError: One is below ``least``.
    """
    for name, value in values.items():
        if value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")


def guarded(main: Callable[..., int]) -> Callable[..., int]:
    """``main``, where a ``UserError`` ends as one line and is returned as status 2, a signal as 128 + its number.

    (:func:`brorl_jax.commandline.guarded` exits instead, as absl wants of what parses flags.)
    """

    @piped
    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except Interrupted as signal:
            print(f"{signal}: stopped. The same command goes on from here.", file=sys.stderr)
            return 128 + signal.signum

    return wrapper
