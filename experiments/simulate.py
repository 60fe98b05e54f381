"""Figure 3 of the paper: the token-level simulation, its figure, its numbers, and what the paper leaves out.

    python -m experiments.simulate            # the figure's five N, checked against reference values
    python -m experiments.simulate --sweep    # Adam's eps, weight decay, learning rate, more N, sets or multiplicity
    python -m experiments.simulate --fgrpo    # lr 1e-2 and N = 2 ... 131,072, as in F-GRPO (2602.06717)

Results go to ``--out`` as CSV and PNG. Exit status 1: a reference value was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from brorl_jax.commandline import make_folder
from brorl_jax.errors import UserError
from brorl_jax.theory.simulator import AdamW, Record, Setup, simulate
from experiments import files

OUT = Path(__file__).parent / "results" / "simulator"
PAPER_N = (4, 8, 16, 512, 51_200)  # [P] Figure 3
FGRPO_N = tuple(2**k for k in range(1, 18))  # [FG] appendix J

# N: (Q_pos, share of improved correct tokens) after 1,000 seeded steps of PyTorch's AdamW in float64, seed 0, from an
# independent implementation. The paper prints no numbers; these lie on its curves. With 51,200 no correct token falls.
REFERENCE = {4: (0.601, 0.112), 8: (0.603, 0.222), 16: (0.607, 0.320), 512: (0.634, 0.628), 51_200: (0.647, 1.000)}
TOLERANCE = (0.001, 0.01)  # of the mean over seeds; half of the last printed digit and the spread between seeds

Row = dict[str, Any]


class Case(NamedTuple):
    """One curve: what is run, and the name of the panel that it belongs to."""

    panel: str
    setup: Setup
    adamw: AdamW = AdamW()


def run(cases: Sequence[Case], seeds: Sequence[int], threads: int | None = None) -> list[Record]:
    """All ``cases``, each over all ``seeds``; a thread per core takes one seed of one case at a time.

    On CPU that is faster than all seeds in one program: XLA leaves most of a run to one core, and one seed's arrays fit
    into its cache.
    """
    jobs = sorted(
        itertools.product(range(len(cases)), seeds), key=lambda job: -cases[job[0]].setup.n
    )  # long ones first
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        done = {(i, seed): pool.submit(simulate, cases[i].setup, cases[i].adamw, (seed,)) for i, seed in jobs}
        parts = [[done[i, seed].result() for seed in seeds] for i in range(len(cases))]
    return [jax.tree.map(lambda *x: np.concatenate(x), *records) for records in parts]


def rows(cases: Sequence[Case], seeds: Sequence[int], records: Sequence[Record], *, last: bool) -> Iterable[Row]:
    """The records as flat rows, a row per seed and logged step, or per seed (``last``)."""
    for case, record in zip(cases, records, strict=True):
        s, a = case.setup, case.adamw
        what = {"panel": case.panel, "n": s.n, "start": "seeded" if s.seeded else "unseeded", "reading": s.reading}
        what |= {"lr": a.lr, "eps": a.eps, "weight_decay": a.weight_decay}
        for i, seed in enumerate(seeds):
            for t in range(-1, 0) if last else range(record.step.shape[1]):
                figures = {name: float(x[i, t]) for name, x in record._asdict().items() if name != "step"}
                yield what | {"seed": seed, "step": int(record.step[i, t])} | figures


def check(cases: Sequence[Case], records: Sequence[Record]) -> list[str]:
    """A line per N: measured beside the reference; one that ends in MISSED lies outside the tolerance."""
    lines = []
    for case, record in zip(cases, records, strict=True):
        q_pos, improved = record.q_pos[:, -1], record.improved[:, -1]
        line = (
            f"N = {case.setup.n:>6}: Q_pos {q_pos.mean():.4f} ({q_pos.min():.4f} to {q_pos.max():.4f}),"
            f" improved {improved.mean():6.1%}, worst drop {record.worst_drop[:, -1].min():+.1e}"
        )
        if case.setup.n in REFERENCE:
            want = REFERENCE[case.setup.n]
            line += f"; reference {want[0]:.3f}, {want[1]:.1%}"
            far = abs(q_pos.mean() - want[0]) > TOLERANCE[0] or abs(improved.mean() - want[1]) > TOLERANCE[1]
            if far or np.any((record.worst_drop[:, -1] < 0) != (want[1] < 1)):
                line += " MISSED"
        lines.append(line)
    return lines


def figure_cases(ns: Sequence[int], base: Setup, adamw: AdamW = AdamW()) -> list[Case]:  # noqa: B008
    return [Case("figure", dataclasses.replace(base, n=n), adamw) for n in ns]


def sweep_cases(base: Setup) -> list[Case]:
    """One thing changed at a time from the figure's setup, at N = 16, 512 and 8,192."""
    cases = [Case("n", dataclasses.replace(base, n=n)) for n in (4, 16, *(2**k for k in range(6, 14)), 51_200)]
    cases += [Case("reading", dataclasses.replace(base, n=c.setup.n, reading="distinct")) for c in cases]
    for n in (16, 512, 8192):
        setup = dataclasses.replace(base, n=n)
        cases += [Case("eps", setup, AdamW(eps=eps)) for eps in (1e-6, 1e-8, 1e-10, 1e-12)]
        cases += [Case("weight_decay", setup, AdamW(weight_decay=decay)) for decay in (0.0, 1e-4, 1e-2, 1e-1)]
        cases += [Case("lr", setup, AdamW(lr=lr)) for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)]
        cases.append(Case("start", dataclasses.replace(setup, seeded=False)))
    return cases


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.simulate", description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sweep", action="store_true", help="vary what the paper leaves out")
    which.add_argument("--fgrpo", action="store_true", help="lr 1e-2, N = 2 ... 131,072, retained mass")
    parser.add_argument("--n", type=int, nargs="+", help="draws per step; default: the figure's five")
    parser.add_argument("--seeds", type=int, default=4, help="seeds 0 to SEEDS - 1 (default 4)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--correct", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="runs at a time; default: one per core")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(argv)


def plan(options: argparse.Namespace) -> tuple[str, list[Case]]:
    """The name of the results, and the curves.

    Raises:
        UserError: Options that mean nothing.
    """
    files.at_least(1, seeds=options.seeds, steps=options.steps, threads=options.threads, n=min(options.n or [1]))
    if options.sweep and options.n:
        raise UserError("--sweep has its own N; leave out --n")
    log_every = next(k for k in (10, 5, 4, 3, 2, 1) if options.steps % k == 0)
    try:
        base = Setup(n=1, vocab=options.vocab, correct=options.correct, steps=options.steps, log_every=log_every)
    except ValueError as error:
        raise UserError(f"--vocab, --correct: {error}") from error
    if options.sweep:
        return "sweep", sweep_cases(base)
    if options.fgrpo:
        return "fgrpo", figure_cases(options.n or FGRPO_N, base, AdamW(lr=1e-2))
    return "figure3", figure_cases(options.n or PAPER_N, base)


@files.guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    name, cases = plan(options)
    make_folder("--out", options.out)
    seeds = range(options.seeds)
    began = time.perf_counter()
    records = run(cases, seeds, options.threads)
    print(f"{len(cases)} curves x {len(seeds)} seeds x {options.steps} steps in {time.perf_counter() - began:.1f} s")
    files.write_csv(options.out / f"{name}.csv", list(rows(cases, seeds, records, last=name == "sweep")), digits=7)

    from experiments import simulator_figures  # matplotlib is slow to import, and the numbers do not need it

    simulator_figures.DRAW[name](cases, records).savefig(options.out / f"{name}.png")
    print(f"wrote {options.out / name}.csv and .png")
    if name != "figure3":
        return 0
    lines = check(cases, records) if dataclasses.replace(cases[0].setup, n=1) == Setup(n=1) else []
    print("\n".join(lines) if lines else "no reference values for this setup")
    return int(any(line.endswith("MISSED") for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
