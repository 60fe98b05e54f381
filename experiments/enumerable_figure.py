"""The figure of ``experiments.enumerable``: exact curves per N, against steps, samples and correct mass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.simulator_figures import STYLE, band, colours

LABELS = {
    "step": "step",
    "samples": "samples",
    "q_pos": "correct mass $Q_{pos}$",
    "pass@16": "pass@16",
    "retained": "retained correct mass",
    "worst_drop": "worst drop of a correct answer",
    "improved": "improved correct answers",
}
AGAINST = (("step", "q_pos"), ("step", "pass@16"), ("samples", "q_pos"))
AT_EQUAL_MASS = ("retained", "worst_drop", "improved")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Above: means and ranges of the seeds. Below, at the same correct mass: a line for each seed."""
    sizes = sorted({row["n"] for row in rows})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        above, below = figure.subplots(2, 3)
        for n, colour in zip(sizes, colours(len(sizes)), strict=True):
            mine = [row for row in rows if row["n"] == n]
            seeds = sorted({row["seed"] for row in mine})

            def of(key: str, mine: Any = mine, seeds: Any = seeds) -> np.ndarray:
                return np.array([[row[key] for row in mine if row["seed"] == seed] for seed in seeds])

            for axes, (x, y) in zip(above, AGAINST, strict=True):
                band(axes, of(x)[:, 1:].mean(axis=0), of(y)[:, 1:], color=colour, label=f"{n}")
                axes.set(xlabel=LABELS[x], ylabel=LABELS[y])
            for axes, y in zip(below, AT_EQUAL_MASS, strict=True):
                axes.plot(of("q_pos")[:, 1:].T, of(y)[:, 1:].T, color=colour, linewidth=1.1)
                axes.set(xlabel=LABELS["q_pos"], ylabel=LABELS[y])
        above[2].set_xscale("log")
        figure.legend(*above[0].get_legend_handles_labels(), title="N", loc="outside right center")
        figure.savefig(path, dpi=100)
