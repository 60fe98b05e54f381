"""The paper's tables, published figures beside those of one's own runs.

    python -m experiments.tables --runs prorl=runs/n16 brorl=runs/n512
    python -m experiments.tables --runs n16=runs/s0/n16 n16=runs/s1/n16 n512=runs/s0/n512 --format latex --tables T1 B4

Runs of one name are seeds of one arm: their mean and standard deviation are shown. Efficiency comes from the training
logs, scores from ``<run>/eval/at_<step>`` (``python -m brorl_jax.evaluate --checkpoint=<run>``) or, where there is
none, from the evaluations during training. What no run measured stays empty. T1 to T5 are the paper's tables, B1 to B4
those of the blog post; ``published.json`` holds their figures with their sources.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brorl_jax.commandline import piped
from brorl_jax.errors import mistake
from brorl_jax.metrics import read_jsonl
from brorl_jax.report.collect import add_axes, check_run

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
TITLES = {
    "T1": "Efficiency and scores",
    "T2": "Dynamic-sampling pass rate and generation throughput",
    "T3": "Math",
    "T4": "Code",
    "T5": "Reasoning Gym",
    "B1": "Step scaling and rollout scaling",
    "B2": "Scores, hours and steps from one checkpoint",
    "B3": "Compute efficiency",
    "B4": "Token efficiency",
}
# Column of a published table -> data source whose pass@1 it holds, where the names differ.
BENCHMARKS = {"AMC": "amc23", "MATH": "math500", "Olympiad": "olympiadbench"}
FAMILIES = ("math", "code", "reasoning_gym")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run shows at one evaluation.

    Attributes:
        arm: Name given on the command line.
        step: Steps done; 0 is the start.
        log: Figures of the training log up to there, by column.
        scores: Metrics of the evaluation, ``eval/...``.
    """

    arm: str
    step: int
    log: dict[str, float]
    scores: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A mean over seeds, and its standard deviation where there are several."""

    mean: float
    deviation: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """One table: ``rows`` are (who, where the figures are from, cell by column)."""

    key: str
    columns: list[str]
    rows: list[tuple[str, str, dict[str, Cell]]]

    @property
    def title(self) -> str:
        number = f"Table {self.key[1]} of the {'paper' if self.key[0] == 'T' else 'blog post'}"
        return f"{number}: {TITLES[self.key]}"


def read_run(arm: str, directory: Path) -> list[Measured]:
    """A run at each of its separate evaluations, or at its last evaluation during training.

    Raises:
        ValueError: ``directory`` is not a run's, or holds what no run writes.
    """
    check_run(directory)
    try:
        return _read_run(arm, directory)
    except (LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{directory} holds what no run writes ({type(error).__name__}: {error})") from error


def _read_run(arm: str, directory: Path) -> list[Measured]:
    rows, _ = read_jsonl(directory / "metrics.jsonl")
    add_axes(rows)
    config = json.loads((directory / "config.json").read_text())
    evaluations = {}
    for path in directory.glob("eval/at_*/scores.json"):
        evaluations[int(path.parent.name.removeprefix("at_"))] = _figures(json.loads(path.read_text()))
    during = {row["step"]: row for row in rows if row.get("eval/pass@1") is not None}
    if not evaluations and during:
        evaluations = {max(during): _figures(during[max(during)])}
    if not evaluations and rows:
        evaluations = {rows[-1]["step"]: {}}
    return [
        Measured(arm, step, _log(config, [r for r in rows if 0 < r["step"] <= step], step), scores)
        for step, scores in sorted(evaluations.items())
    ]


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if value is not None}


def _log(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    log = {
        "N": config["rollout"]["n"],
        "prompts/step": config["rollout"]["prompts_per_step"],
        "RL steps": step,
    }
    if rows:
        generated = sum(r["samples/generated"] for r in rows)
        generation = sum(r.get("time/rollout_s", 0.0) for r in rows)
        groups = sum(r["groups/generated"] for r in rows)
        log |= {
            "samples (k)": rows[-1]["x/samples"] / 1000,
            "hours": rows[-1]["x/wall"] / 3600,
            "pass rate": 100 * sum(r["groups/kept"] for r in rows) / groups,
            "samples/s of the step": generated / rows[-1]["x/wall"],
        }
        log |= {"generation samples/s": generated / generation} if generation else {}
    return log


def _efficiency(m: Measured, columns: Iterable[str]) -> dict[str, float]:
    return {c: m.log[c] for c in columns if c in m.log}


def _families(m: Measured) -> dict[str, float]:
    """Points by family, and by benchmark where the run's data names no families."""
    names = {k.split("/")[2] for k in m.scores if k.startswith("eval/average/") and k.count("/") == 3}
    found = {name: m.scores.get(f"eval/average/{name}/pass@1") for name in names}
    found |= {} if names else {"held out": m.scores.get("eval/pass@1")}
    return {name: 100 * value for name, value in found.items() if value is not None}


def _benchmarks(m: Measured, columns: Iterable[str], family: str) -> dict[str, float]:
    row = {c: m.scores.get(f"eval/{BENCHMARKS.get(c, c.lower())}/pass@1") for c in columns}
    row["Avg"] = m.scores.get(f"eval/average/{family}/pass@1")
    return {c: 100 * value for c, value in row.items() if value is not None}


def _categories(m: Measured, columns: Iterable[str]) -> dict[str, float]:
    row = {c: m.scores.get(f"eval/average/reasoning_gym/{c}/pass@1") for c in columns}
    row |= {"Avg": m.scores.get("eval/average/reasoning_gym/pass@1")}
    row |= {"mean of categories": m.scores.get("eval/average/reasoning_gym/plain/pass@1")}
    return {c: 100 * value for c, value in row.items() if value is not None}


def _tokens(m: Measured) -> dict[str, float]:
    row = {}
    for name, score in _families(m).items():
        length = m.scores.get("eval/length" if name == "held out" else f"eval/average/{name}/length")
        row |= {name: score} | ({f"{name} tokens": length} if length is not None else {})
    return row


COST = ("N", "prompts/step", "RL steps", "samples (k)", "hours")
MATH = ("AIME24", "AIME25", "AMC", "MATH", "Minerva", "Olympiad")
CODE = ("apps", "codecontests", "codeforces", "taco", "humanevalplus", "mbppplus")
GYM = [
    "algebra",
    "algorithmic",
    "arc",
    "arithmetic",
    "code",
    "cognition",
    "games",
    "geometry",
    "graphs",
    "induction",
    "logic",
]  # the paper's names
CELLS: dict[str, Callable[[Measured], dict[str, float]]] = {
    "T1": lambda m: _efficiency(m, COST) | _families(m),
    "T2": lambda m: _efficiency(m, ("N", "pass rate", "generation samples/s", "samples/s of the step")),
    "T3": lambda m: _benchmarks(m, MATH, "math"),
    "T4": lambda m: _benchmarks(m, CODE, "code"),
    "T5": lambda m: _categories(m, GYM),
    "B1": lambda m: _efficiency(m, ("N", "prompts/step", "samples (k)")),
    "B2": lambda m: _efficiency(m, ("N", "RL steps", "hours")) | _families(m),
    "B3": lambda m: _efficiency(m, ("N", "pass rate", "generation samples/s", "samples/s of the step")),
    "B4": lambda m: _efficiency(m, ("N",)) | _tokens(m),
}


def table(key: str, measured: Sequence[Measured]) -> Table:
    """Table ``key`` with the published rows first, then a row per arm and step."""
    rows = []
    for published in PUBLISHED[key]["rows"]:
        cells = {c: Cell(float(v)) for c, v in published.items() if c != "arm"}
        if key == "T5":
            cells["mean of categories"] = Cell(float(np.mean([published[c] for c in GYM])))
        rows.append((published["arm"], "published", cells))
    arms: dict[tuple[str, int], list[dict[str, float]]] = {}
    for m in measured:
        arms.setdefault((m.arm, m.step), []).append(CELLS[key](m))
    for (arm, step), seeds in arms.items():
        several = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
        rows.append((f"{arm}, step {step}{several}", "measured", _over_seeds(seeds)))
    used = {c for _, _, cells in rows for c in cells}
    names = GYM if key == "T5" else FAMILIES
    order = dict.fromkeys([*COST, *MATH, *CODE, *names, *(c for _, _, cells in rows for c in cells)])
    return Table(key, [c for c in order if c in used], rows)


def _over_seeds(seeds: Sequence[Mapping[str, float]]) -> dict[str, Cell]:
    cells = {}
    for column in dict.fromkeys(c for seed in seeds for c in seed):
        values = [seed[column] for seed in seeds if column in seed]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        cells[column] = Cell(float(np.mean(values)), deviation)
    return cells


def _number(column: str, value: float) -> str:
    if column in ("N", "prompts/step", "RL steps") or column.endswith("tokens"):
        return f"{value:,.0f}"
    if column == "hours" or column == "samples (k)":
        return f"{value:,.1f}" if value >= 100 else f"{value:,.3g}"
    return f"{value:,.2f}"


def _text(column: str, cell: Cell | None, plus_minus: str = "±") -> str:
    if cell is None:
        return ""
    text = _number(column, cell.mean)
    return f"{text} {plus_minus} {_number(column, cell.deviation)}" if cell.deviation else text


def _grid(t: Table, plus_minus: str = "±") -> list[list[str]]:
    body = [[who, origin, *(_text(c, cells.get(c), plus_minus) for c in t.columns)] for who, origin, cells in t.rows]
    return [["", "", *t.columns], *body]


def as_text(t: Table) -> str:
    """Columns aligned for a terminal."""
    grid = _grid(t)
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    lines = ["  ".join(f"{x:<{w}}" if i < 2 else f"{x:>{w}}" for i, (x, w) in enumerate(zip(r, widths, strict=True)))
             for r in grid]  # fmt: skip
    return "\n".join([t.title, "-" * len(t.title), *(line.rstrip() for line in lines), _source(t)])


def as_markdown(t: Table) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in _grid(t)]
    return "\n".join([f"**{t.title}**", "", head, "|---" * (2 + len(t.columns)) + "|", *body, "", _source(t)])


def as_latex(t: Table) -> str:
    def line(row: Sequence[str]) -> str:
        escaped = (x.replace("%", r"\%").replace("_", r"\_").replace("&", r"\&") for x in row)
        return " & ".join(escaped) + r" \\"

    head, *body = [line(row) for row in _grid(t, r"$\pm$")]
    lines = [rf"\begin{{tabular}}{{ll{'r' * len(t.columns)}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([f"% {t.title}. {_source(t)}", *lines, r"\end{tabular}"])


def as_csv(t: Table) -> str:
    """A line per row with full precision; a deviation stands in a column of its own."""
    out = io.StringIO()
    deviations = [c for c in t.columns if any(cells[c].deviation for _, _, cells in t.rows if c in cells)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "arm", "origin", *t.columns, *(f"{c} sd" for c in deviations)])
    for who, origin, cells in t.rows:
        means = [repr(cells[c].mean) if c in cells else "" for c in t.columns]
        spread = [repr(cells[c].deviation) if c in cells and cells[c].deviation else "" for c in deviations]
        writer.writerow([t.key, who, origin, *means, *spread])
    return out.getvalue().rstrip("\n")


def _source(t: Table) -> str:
    letter, _, where = PUBLISHED[t.key]["source"].partition(",")
    return f"Published: {PUBLISHED['sources'][letter]},{where}. Scores are in points, pass rates in per cent."


FORMATS = {"text": as_text, "markdown": as_markdown, "latex": as_latex, "csv": as_csv}


@piped
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description="The paper's tables.")
    parser.add_argument("--runs", nargs="*", default=[], metavar="NAME=DIR", help="runs; one name twice: two seeds")
    parser.add_argument("--tables", nargs="*", default=list(TITLES), choices=list(TITLES), metavar="KEY")
    parser.add_argument("--format", default="text", choices=list(FORMATS))
    args = parser.parse_args(argv)
    try:
        measured = []
        for item in args.runs:
            name, equals, directory = item.partition("=")
            if not equals:
                raise ValueError(f"--runs {item}: write NAME=DIR, such as brorl=runs/brorl_n512")
            measured += read_run(name, Path(directory))
    except (ValueError, OSError) as error:
        print(f"error: {mistake(error) or error}", file=sys.stderr)
        return 2
    print("\n\n".join(FORMATS[args.format](table(key, measured)) for key in args.tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
