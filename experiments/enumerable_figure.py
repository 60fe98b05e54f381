"""The figure of ``experiments.enumerable``: exact curves per N, seed bands, against steps and against samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (
    ("q_pos", "correct mass $Q_{pos}$"),
    ("pass@16", "pass@16"),
    ("worst_drop", "worst drop of a correct answer"),
    ("retained", "retained correct mass"),
)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Four figures against steps (above) and samples (below); a band spans the seeds, the line is their mean."""
    sizes = sorted({row["n"] for row in rows})
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(sizes)))
    figure, axes = plt.subplots(2, len(PANELS), figsize=(15, 6.4), constrained_layout=True)
    for n, colour in zip(sizes, colours, strict=True):
        seeds = sorted({row["seed"] for row in rows if row["n"] == n})
        runs = [[row for row in rows if row["n"] == n and row["seed"] == seed] for seed in seeds]
        steps = [row["step"] for row in runs[0]]
        samples = np.mean([[row["samples"] for row in run] for run in runs], axis=0)
        for column, (key, title) in enumerate(PANELS):
            values = np.array([[row[key] for row in run] for run in runs])
            for ax, x in ((axes[0, column], steps), (axes[1, column], samples)):
                ax.plot(x, values.mean(0), color=colour, label=f"N = {n}", lw=1.6)
                ax.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
            axes[0, column].set(title=title, xlabel="step")
            axes[1, column].set(xlabel="samples", xscale="log", xlim=(8, None))
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.2)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
