"""Compares two evaluations, prompt by prompt.

    python -m brorl_jax.compare runs/eval/prorl runs/eval/brorl

Each is the ``--out`` of an evaluation, or a run, whose last evaluation counts. Differences are second minus first, on
the prompts that both have: the paper's one-tailed paired t-test (arXiv 2510.01180) and a 95 % bootstrap interval over
prompts. Learning curves against steps, samples, tokens and hours: ``python -m brorl_jax.report A B``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from brorl_jax import evaluate, scores
from brorl_jax.commandline import piped
from brorl_jax.errors import mistake
from brorl_jax.scores import Difference


def markdown(differences: Mapping[str, Difference]) -> str:
    """One line per benchmark, in points (hundredths)."""
    lines = [
        "| benchmark | prompts | A | B | B - A | 95 % interval | t | p (B not better) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, d in differences.items():
        interval = f"{100 * d.low:+.2f} to {100 * d.high:+.2f}"
        test = f"{d.t:.2f} | {d.p:.2g}" if d.t == d.t else "|"
        values = f"{100 * d.a:.2f} | {100 * d.b:.2f} | {100 * d.difference:+.2f}"
        lines.append(f"| {name} | {d.prompts:,} | {values} | {interval} | {test} |")
    return "\n".join(lines) + "\n"


@piped
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m brorl_jax.compare", description="Paired differences between two evaluations."
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="--out of an evaluation, or --workdir of a run")
    args = parser.parse_args(argv)
    try:
        print(markdown(scores.compare(evaluate.read(args.a), evaluate.read(args.b))), end="")
    except (ValueError, OSError) as error:
        print(f"error: {mistake(error) or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
