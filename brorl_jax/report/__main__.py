"""Command line of the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from brorl_jax.commandline import piped
from brorl_jax.errors import mistake
from brorl_jax.report import summary, write_report


@piped
def main(argv: Sequence[str] | None = None) -> int:
    """Write a report and print the summary of each run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m brorl_jax.report", description="Write one self-contained HTML page about one or more runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory (the --workdir of training)")
    parser.add_argument("--out", metavar="FILE", help="page to write (default: report.html in the first run)")
    args = parser.parse_args(argv)
    try:
        path = write_report(args.runs, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {mistake(error) or error}", file=sys.stderr)
        return 2
    for run in args.runs:
        print(summary(run))
    print(f"report: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
