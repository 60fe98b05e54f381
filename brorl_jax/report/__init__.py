"""One page that shows what a run did: ``python -m brorl_jax.report runs/x [runs/y ...]``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from brorl_jax import atomic
from brorl_jax.report.collect import collect
from brorl_jax.report.render import render
from brorl_jax.report.summary import summary

__all__ = ["summary", "write_report"]


def write_report(directories: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of one run, or of several overlaid, and return its path.

    Args:
        directories: Run directories; at least one. They may be of stopped or running runs.
        out: The page to write; by default ``report.html`` in the first run. Replaced atomically.

    Raises:
        ValueError: no directory given, or one is not a run's.
    """
    if not directories:
        raise ValueError("give at least one run directory")
    path = Path(out) if out is not None else Path(directories[0]) / "report.html"
    page = render(collect(directories))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, page)
    return path
