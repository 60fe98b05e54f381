"""A run on one screen of text: what it started from, what it reached, what it cost."""

from __future__ import annotations

import os
from pathlib import Path

from brorl_jax.progress import duration
from brorl_jax.report.collect import Row, collect_run


def summary(workdir: str | os.PathLike[str], report: str | os.PathLike[str] | None = None) -> str:
    """The text printed at the end of a run.

    Args:
        workdir: The run's directory (of a finished, stopped or running run).
        report: Path of its report, named in the last line if given.
    """
    run = collect_run(Path(workdir), budget=0)
    facts = run["facts"]
    lines = [("run", f"{run['name']}: {facts['state']}")]
    lines += _outcome(facts)
    lines += _cost(facts)
    events = [event["text"] for event in run["events"]]
    for text in dict.fromkeys(events):
        lines.append(("note", f"{text}{f' (at {n} steps)' if (n := events.count(text)) > 1 else ''}"))
    lines += [("note", note) for note in run["notes"]]
    if report is not None:
        lines.append(("report", str(report)))
    width = max(len(label) for label, _ in lines)
    rule = "-" * 72
    return "\n".join([rule, *(f"{label:<{width}}  {text}" for label, text in lines), rule])


def _outcome(facts: Row) -> list[tuple[str, str]]:
    lines = []
    if facts["held_out"]:
        first, last, best = facts["held_out"]
        text = f"{first:.1%} -> {last:.1%}   ({100 * (last - first):+.1f} points, best {best:.1%})"
        lines.append(("held-out pass@1", text))
    if facts["reward"]:
        lines.append(("reward", "{:.3f} -> {:.3f}".format(*facts["reward"])))
    return lines


def _cost(facts: Row) -> list[tuple[str, str]]:
    total = f" of {facts['total']}" if facts["total"] else ""
    lines = [("steps", f"{facts['step']}{total}")]
    if facts["samples"]:
        lines.append(("samples", f"{facts['samples']:,.0f} ({facts['tokens']:,.0f} response tokens)"))
    if facts["warmup_steps"]:
        lines.append(("warm-up", f"{facts['warmup_steps']} steps in {duration(facts['warmup_wall'] or 0.0)}"))
    if facts["wall"] is not None:
        lines.append(("wall time", duration(facts["wall"])))
    return lines
