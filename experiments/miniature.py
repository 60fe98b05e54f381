"""The paper's story on two CPU cores: an N = 16 stage until it stops improving, then N = 16 against N = 512.

    make miniature                                            # all seeds, unattended
    python -m experiments.miniature --out=runs/miniature      # the same; goes on where it was cut off
    python -m experiments.miniature --fast --out=runs/fast    # minutes: shows that it runs, not what it shows

For every seed one run of ``configs/miniature.py`` (stage ``prorl``: warm start, then N = 16 until held-out accuracy
stalls), and from its weights the two arms of the paper's comparison (``configs/sweeps/n_paper.py``): N = 16 as before,
and 32 times the rollouts on a quarter of the prompts, learning rate by the square root. Both train on about the same
number of samples. Optimiser and reference start afresh in both.

Results: ``curves.csv``, ``figure1.png``, ``tables.md``, and ``summary.md`` in ``<out>/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from brorl_jax import compare as compare_lib
from brorl_jax import evaluate, scores
from brorl_jax.commandline import load, make_folder
from brorl_jax.errors import UserError
from brorl_jax.metrics import read_jsonl
from brorl_jax.report.collect import add_axes
from experiments import files, sweep, tables
from experiments.miniature_figure import draw

CONFIG = "configs/miniature.py"
SWEEP = "configs/sweeps/n_paper.py"
STAGE = "prorl"
AXES = ("samples", "seconds")
TABLES = ("B1", "B2", "B3", "B4")


@dataclasses.dataclass(frozen=True)
class Size:
    """How long it is.

    Attributes:
        samples: That each arm trains on after the fork.
        looks: Evaluations of each arm over these.
        final_samples: Per held-out prompt, of the last checkpoints.
        overrides: Of every run.
    """

    samples: int
    looks: int
    final_samples: int
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FULL = Size(samples=163_840, looks=10, final_samples=16)
FAST = Size(
    samples=4096,
    looks=2,
    final_samples=4,
    overrides={
        "model.new.hidden": 32,
        "model.new.layers": 1,
        "model.new.ffn": 64,
        "warmup.steps": 60,
        "warmup.batch": 64,
        "warmup.until": 0.0,
        "train.steps": 4,
        "train.stop_stalled": 0,
        "eval.every": 2,
        "eval.max_prompts": 32,
        "eval.samples": 2,
        "rollout.prompts_per_step": 16,
        "filter.max_generation_batches": 1,
        "filter.dynamic": False,
    },
)


def stage(out: Path, seed: int, size: Size) -> sweep.Arm:
    """The run that both arms of a seed fork from."""
    overrides = {**size.overrides, "seed": seed, "name": STAGE}
    return sweep.arm(f"seed_{seed}/{STAGE}", CONFIG, overrides, out / f"seed_{seed}" / STAGE)


def arms(out: Path, seed: int, size: Size) -> list[sweep.Arm]:
    """The two arms of a seed, from the weights that its stage exported."""
    base = load(CONFIG)
    base.update_from_flattened_dict(dict(size.overrides))
    directory = out / f"seed_{seed}"
    fork = {"model.path": str(directory / STAGE / "model"), "warmup.steps": 0, "train.stop_stalled": 0, "seed": seed}
    made = []
    for name, overrides in sweep.read(SWEEP)[1](base).items():
        per_step = {"rollout.n": base.rollout.n, "rollout.prompts_per_step": base.rollout.prompts_per_step} | overrides
        steps = max(1, size.samples // (per_step["rollout.n"] * per_step["rollout.prompts_per_step"]))
        every = max(1, steps // size.looks)
        length = {"train.steps": steps, "eval.every": every, "checkpoint.every": every, "name": name}
        made.append(
            sweep.arm(
                f"seed_{seed}/{name}", CONFIG, {**size.overrides, **fork, **overrides, **length}, directory / name
            )
        )
    return made


def final_scores(arm: sweep.Arm, samples: int) -> None:
    """Scores an arm's last checkpoint with more samples than training takes; nothing to do if that is done.

    Raises:
        UserError: It failed.
    """
    command = [sys.executable, "-m", "brorl_jax.evaluate", f"--config={CONFIG}", f"--checkpoint={arm.workdir}"]
    if not list(arm.workdir.glob("eval/at_*/scores.json")):
        sweep.call(arm.name, [*command, f"--config.eval.samples={samples}"])


# --- what came of it -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run.

    Attributes:
        samples: float64 ``[looks]``, generated up to each evaluation, those that were filtered out included.
        seconds: The same, of the training steps alone.
        score, stderr: pass@1 and its standard error over prompts.
    """

    arm: str
    seed: int
    step: np.ndarray
    samples: np.ndarray
    seconds: np.ndarray
    score: np.ndarray
    stderr: np.ndarray


def read_curve(workdir: Path, arm: str) -> Curve:
    """The evaluations of the run in ``<out>/seed_<seed>/<arm>``.

    Raises:
        UserError: There are fewer than two.
    """
    rows, _ = read_jsonl(workdir / "metrics.jsonl")
    add_axes(rows)
    looking = np.cumsum([row.get("time/eval_s", 0.0) for row in rows])
    chosen = [i for i, row in enumerate(rows) if row.get("eval/pass@1") is not None]
    if len(chosen) < 2:
        raise UserError(f"{workdir}: {len(chosen)} evaluations; a curve needs at least two")
    source = next(key for key in rows[chosen[0]] if key.startswith("eval/") and key.endswith("/stderr"))

    def column(key: str) -> np.ndarray:
        return np.array([rows[i][key] for i in chosen], np.float64)

    seconds = column("x/wall") - looking[chosen]
    seed = int(workdir.parent.name.removeprefix("seed_"))
    return Curve(arm, seed, column("step"), column("x/samples"), seconds, column("eval/pass@1"), column(source))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two arms from one checkpoint: points gained since the fork when both have spent the same.

    Attributes:
        budget: What both have spent: all of what the arm spent that spent less.
        gains: By arm, float64 ``[seeds]``, interpolated between evaluations.
        low, high: 95 % interval of the mean difference over seeds (paired t), NaN for a single seed.
    """

    axis: str
    budget: list[float]
    gains: dict[str, np.ndarray]
    difference: float
    low: float
    high: float


def compare(curves: Sequence[Curve], axis: str) -> Comparison:
    """``n512`` minus ``n16`` at equal ``samples`` or ``seconds``, seed by seed."""
    seeds = sorted({c.seed for c in curves})
    names = list(dict.fromkeys(c.arm for c in curves))
    budgets, gains = [], {name: [] for name in names}
    for seed in seeds:
        pair = [c for c in curves if c.seed == seed]
        budget = min(float(getattr(c, axis)[-1]) for c in pair)
        budgets.append(budget)
        for c in pair:
            gains[c.arm].append(100 * (np.interp(budget, getattr(c, axis), c.score) - c.score[0]))
    first, second = (np.array(gains[name]) for name in names)
    d = second - first
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d)) if len(d) > 1 else float("nan")
    mean = float(d.mean())
    return Comparison(axis, budgets, {n: np.array(g) for n, g in gains.items()}, mean, mean - half, mean + half)


def slope(curve: Curve, last: int) -> tuple[float, float]:
    """Points per 1,000 steps over the last evaluations and its standard error, by least squares."""
    x, y = curve.step[-last:] / 1000, 100 * curve.score[-last:]
    if len(x) < 3:
        return float("nan"), float("nan")
    trend, _, _, _, error = stats.linregress(x, y)
    return float(trend), float(error)


def runs(out: Path) -> dict[str, list[Path]]:
    """Run directories by stage or arm, seeds in order.

    Raises:
        UserError: There are none, or a seed lacks one.
    """
    seeds = sorted(out.glob("seed_*"), key=lambda folder: int(folder.name.removeprefix("seed_")))
    names = sorted(
        {f.name for seed in seeds for f in seed.iterdir() if f.is_dir()} - {STAGE}, key=lambda n: (len(n), n)
    )
    found = {name: [seed / name for seed in seeds] for name in (STAGE, *names)}
    missing = [str(f) for folders in found.values() for f in folders if not (f / "metrics.jsonl").exists()]
    if not seeds or missing:
        raise UserError(f"{missing[0] if missing else out}: not there or not begun; run `make miniature` first")
    return found


def read_runs(out: Path) -> tuple[list[Curve], list[Curve]]:
    """The curves of the stages and of the arms after them."""
    curves = [read_curve(f, name) for name, folders in runs(out).items() for f in folders]
    return [c for c in curves if c.arm == STAGE], [c for c in curves if c.arm != STAGE]


def read_tables(out: Path, keys: Sequence[str] = TABLES) -> str:
    """Tables of the blog post or the paper with the miniature's figures beside the published ones, in Markdown."""
    measured = [m for name, folders in runs(out).items() for f in folders for m in tables.read_run(name, f)]
    return "\n\n".join(tables.as_markdown(tables.table(key, measured)) for key in keys)


def write_results(out: Path) -> Path:
    """Reads the runs and writes ``<out>/results``; returns that directory."""
    results = out / "results"
    results.mkdir(exist_ok=True)
    stages, forks = read_runs(out)
    files.write_csv(results / "curves.csv", table_rows([*stages, *forks]), digits=8)
    draw(stages, forks, results / "figure1.png")
    (results / "tables.md").write_text(read_tables(out) + "\n")
    (results / "summary.md").write_text(summary(out))
    return results


def table_rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """A row per evaluation of every run, columns as in :class:`Curve`."""
    names = [field.name for field in dataclasses.fields(Curve)][2:]
    return [
        {"arm": c.arm, "seed": c.seed} | {name: float(getattr(c, name)[i]) for name in names}
        for c in curves
        for i in range(len(c.step))
    ]


def summary(out: Path) -> str:
    """What came of it, in Markdown: the plateau before the fork, then the arms at equal budgets."""
    stages, forks = read_runs(out)
    compared = [compare(forks, axis) for axis in AXES]
    lines = [
        "## Before the fork: N = 16",
        "",
        "| seed | steps | start | best | at the fork | slope of the last 6 evaluations, points per 1,000 steps |",
        "|---|---|---|---|---|---|",
    ]
    for c in stages:
        trend, error = slope(c, 6)
        score = 100 * c.score
        cells = f"{score[0]:.1f} | {score.max():.1f} | {score[-1]:.1f} | {trend:+.1f} ± {error:.1f}"
        lines.append(f"| {c.seed} | {c.step[-1]:.0f} | {cells} |")
    names = list(compared[0].gains)
    lines += ["", "## After it: points of held-out pass@1 gained since the fork", ""]
    lines += [f"| at equal | seed | both spent | {' | '.join(names)} | difference |", "|---" * (4 + len(names)) + "|"]
    for c in compared:
        seeds = sorted({curve.seed for curve in forks})
        for i, seed in enumerate(seeds):
            gains = [c.gains[name][i] for name in names]
            values = " | ".join(f"{g:+.1f}" for g in gains)
            lines.append(f"| {c.axis} | {seed} | {c.budget[i]:,.0f} | {values} | {gains[1] - gains[0]:+.1f} |")
        means = " | ".join(f"{c.gains[name].mean():+.1f}" for name in names)
        interval = "" if np.isnan(c.low) else f" ({c.low:+.1f} to {c.high:+.1f})"
        lines.append(f"| {c.axis} | all | | {means} | {c.difference:+.1f}{interval} |")
    lines += ["", "The interval is 95 %, paired over seeds. Over prompts, the last checkpoints of each seed:", ""]
    ends = {
        f"seed {a.parent.name.removeprefix('seed_')}, A = {names[0]}, B = {names[1]}": scores.compare(
            *(evaluate.read(next(f.glob("eval/at_*"))) for f in (a, b))
        )["all"]
        for a, b in zip(*(runs(out)[name] for name in names), strict=True)
    }
    return "\n".join(lines) + "\n" + compare_lib.markdown(ends)


@files.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then writes the results; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.miniature", description="ProRL and BroRL in miniature."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/miniature"), metavar="DIR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--fast", action="store_true", help="minutes instead of hours; the figures mean nothing")
    args = parser.parse_args(argv)
    size = FAST if args.fast else FULL
    make_folder("--out", args.out)
    for seed in dict.fromkeys(args.seeds):
        for arm in (stage(args.out, seed, size), *arms(args.out, seed, size)):
            sweep.run([arm])
            final_scores(arm, size.final_samples)
    results = write_results(args.out)
    print((results / "summary.md").read_text())
    print(f"Figure 1, tables and numbers: {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
