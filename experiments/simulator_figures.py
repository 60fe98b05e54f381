"""The simulator's figures, from records to matplotlib. No logic of their own, no global state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brorl_jax.theory.simulator import Record

if TYPE_CHECKING:
    from experiments.simulate import Case

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
}
MARKERS = "osD^vP"


def colours(count: int) -> np.ndarray:
    """Dark to bright, in order, readable without colour vision and in grey."""
    return matplotlib.colormaps["viridis"](np.linspace(0.05, 0.88, count))


def band(axes: Axes, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """The mean over seeds as a line, their whole range as a band."""
    (line,) = axes.plot(x, y.mean(axis=0), **style)
    axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0)


def over_steps(cases: Sequence[Case], records: Sequence[Record], third: str = "worst_drop") -> Figure:
    """Three panels over steps, a curve per N: Q_pos, the improved share, and the worst drop (or retained mass)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.5), layout="constrained")
        axes = figure.subplots(1, 3)
        for case, record, colour in zip(cases, records, colours(len(cases)), strict=True):
            x, style = record.step[0], {"color": colour, "label": f"{case.setup.n:,}"}
            band(axes[0], x, record.q_pos, **style)
            band(axes[1], x, 100 * record.improved, **style)
            band(axes[2], x, 100 * record.retained if third == "retained" else 1e6 * record.worst_drop, **style)
        axes[0].set(title="Correct mass", ylabel=r"$Q_{pos}$")
        axes[1].set(title="Correct tokens above their start", ylabel="% of correct tokens", ylim=(-3, 103))
        if third == "retained":
            axes[2].set(title="Retained correct mass", ylabel=r"% of $Q_{pos}$ at step 0")
        else:
            axes[2].set(title="Worst drop of a correct token", ylabel=r"$\min_i\ p_i - p_i(0)$, in $10^{-6}$")
            axes[2].set_yscale("symlog", linthresh=1, linscale=0.6)
            axes[2].axhline(0, color="0.6", linewidth=0.8, zorder=1)
        for a in axes:
            a.set(xlabel="step", xlim=(0, records[0].step[0, -1]))
        _caption(figure, cases, records)
        figure.legend(
            *axes[0].get_legend_handles_labels(), title="N", loc="outside right center", ncols=1 + (len(cases) > 10)
        )
    return figure


def _caption(figure: Figure, cases: Sequence[Case], records: Sequence[Record]) -> None:
    """Which reading of the sample, and what a band is."""
    readings, seeds = {case.setup.reading for case in cases}, len(records[0].step)
    how = {"multiplicity": "a token counts as often as drawn", "distinct": "each drawn token counts once"}
    text = " / ".join(f"{how[reading]} ({reading})" for reading in sorted(readings))
    figure.suptitle(f"{text}; mean and range of {seeds} seeds", fontsize=9, color="0.35")


def sweep(cases: Sequence[Case], records: Sequence[Record]) -> Figure:
    """Final Q_pos, improved share and worst drop (rows) against each thing that was varied (columns)."""
    columns = {
        "reading": "draws per step, N",
        "eps": "Adam's eps",
        "weight_decay": "weight decay",
        "lr": "learning rate",
    }
    figures: list[tuple[str, Callable[[Record], Any]]] = [
        (r"$Q_{pos}$", lambda r: r.q_pos[:, -1]),
        ("% improved", lambda r: 100 * r.improved[:, -1]),
        (r"worst drop, $10^{-6}$", lambda r: 1e6 * r.worst_drop[:, -1]),
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 7.5), layout="constrained")
        grid = figure.subplots(3, 4, sharex="col")  # each its own y: eps and rate move far more than N
        for j, (panel, label) in enumerate(columns.items()):
            curves = _curves(panel, cases, records)
            for i, (name, of) in enumerate(figures):
                for (curve, points), colour, marker in zip(curves.items(), colours(len(curves)), MARKERS, strict=False):
                    x = np.array([p for p, _ in points])
                    y = np.stack([of(record) for _, record in points], axis=1)
                    band(grid[i, j], x, y, color=colour, marker=marker, markersize=4, label=curve)
                _dress(grid[i, j], panel, name if j == 0 else "", last=i == 2, label=label)
            grid[0, j].legend(fontsize=8)
        _caption(figure, [case for case in cases if case.panel != "reading"], records)
    return figure


def _curves(panel: str, cases: Sequence[Case], records: Sequence[Record]) -> dict[str, list[tuple[float, Record]]]:
    curves: dict[str, list[tuple[float, Record]]] = {}
    for case, record in zip(cases, records, strict=True):
        if panel == "reading" and case.panel in ("n", "reading"):
            curves.setdefault(case.setup.reading, []).append((case.setup.n, record))
        elif case.panel == panel:
            curves.setdefault(f"N = {case.setup.n:,}", []).append((getattr(case.adamw, panel), record))
    return curves


def _dress(axes: Axes, panel: str, name: str, *, last: bool, label: str) -> None:
    if panel == "weight_decay":
        axes.set_xscale("symlog", linthresh=1e-4, linscale=0.5)
        axes.set_xlim(left=-3e-5)
    else:
        axes.set_xscale("log")
    axes.set_ylabel(name)
    if last:  # the worst drop
        axes.set_yscale("symlog", linthresh=1, linscale=0.6)
        axes.set_xlabel(label)


DRAW: dict[str, Callable[[Sequence[Any], Sequence[Record]], Figure]] = {
    "figure3": over_steps,
    "sweep": sweep,
    "fgrpo": lambda cases, records: over_steps(cases, records, "retained"),
}
