"""Figure 1 in miniature: held-out accuracy of N = 16 and N = 512 from one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.simulator_figures import STYLE

if TYPE_CHECKING:
    from experiments.miniature import Curve

COLOURS = {"n16": "#3b4cc0", "n512": "#d1672b"}
AXES = (("samples", 1000, "thousand samples"), ("seconds", 60, "minutes"))


def draw(stages: Sequence[Curve], forks: Sequence[Curve], path: Path | None = None) -> Figure:
    """Against samples and against time, the fork at 0: a thin line per seed, the mean over seeds thick."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        for axes, (axis, unit, label) in zip(figure.subplots(1, 2, sharey=True), AXES, strict=True):
            for c in stages:
                x = getattr(c, axis)
                axes.plot(
                    (x - x[-1]) / unit,
                    100 * c.score,
                    color="0.6",
                    lw=0.9,
                    label="N = 16, before" if c is stages[0] else None,
                )
            for name in dict.fromkeys(c.arm for c in forks):
                runs = [c for c in forks if c.arm == name]
                colour = COLOURS.get(name)
                for c in runs:
                    axes.plot(getattr(c, axis) / unit, 100 * c.score, color=colour, lw=0.9, alpha=0.5)
                end = min(getattr(c, axis)[-1] for c in runs)
                grid = np.linspace(0, end, 50)
                mean = np.mean([np.interp(grid, getattr(c, axis), c.score) for c in runs], axis=0)
                axes.plot(grid / unit, 100 * mean, color=colour, lw=2.4, label=f"N = {name.removeprefix('n')}")
            axes.axvline(0, color="0.8", lw=1, zorder=0)
            axes.set(xlabel=f"{label} since the fork")
        figure.axes[0].set(ylabel="held-out pass@1, %")
        figure.axes[0].legend()
        if path:
            figure.savefig(path)
    return figure
