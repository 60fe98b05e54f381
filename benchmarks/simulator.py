"""The paper's token-level simulation: ``brorl_jax.theory.simulator`` beside a plain NumPy loop, in one run.

    .venv/bin/python benchmarks/simulator.py

Both do Figure 3: five N, four seeds, 1,000 steps over 128,000 tokens, the same figures logged every 10 steps. The table
goes to standard output and to ``results/simulator.md``. README.md says what is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import step  # noqa: E402
from benchmarks.contenders.work import others_seconds  # noqa: E402
from brorl_jax.theory.simulator import AdamW, Setup  # noqa: E402
from experiments.simulate import PAPER_N, figure_cases, run  # noqa: E402

GOAL = 10.0  # times faster than NumPy
AGREE = 5e-4  # of Q_pos at the end, mean over seeds, between the two: draws differ


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max())
    return p / p.sum()


class NumpyLoop:
    """The experiment as the paper words it, on logits, in float64 (float32 logits do not resolve a step)."""

    def __init__(self, setup: Setup, adamw: AdamW) -> None:
        correct = np.arange(setup.vocab) < setup.correct
        self.setup, self.adamw = setup, adamw
        self.z = np.where(correct & setup.seeded, 3.0, 0.0)
        self.z[0] = 5.0 if setup.seeded else 0.0
        self.z0, self.p = self.z, softmax(self.z)
        self.p0 = self.p
        self.rewards = np.where(correct, 1.0, -1.0)
        self.m, self.v, self.t = np.zeros_like(self.z), np.zeros_like(self.z), 0

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return np.bincount(rng.choice(self.p.size, self.setup.n, p=self.p), minlength=self.p.size)

    def step(self, counts: np.ndarray) -> None:
        a, n, p = self.adamw, self.setup.n, self.p
        centred = self.rewards - counts @ self.rewards / n
        weight = centred * (counts if self.setup.reading == "multiplicity" else counts > 0)
        g = -p * (weight - weight @ p) / n
        self.t += 1
        self.m = a.b1 * self.m + (1 - a.b1) * g
        self.v = a.b2 * self.v + (1 - a.b2) * g * g
        m, v = self.m / (1 - a.b1**self.t), self.v / (1 - a.b2**self.t)
        self.z = self.z * (1 - a.lr * a.weight_decay) - a.lr * m / (np.sqrt(v) + a.eps)
        self.p = softmax(self.z)

    def figures(self) -> dict[str, float]:
        p, correct = self.p, self.setup.correct
        change = (p - self.p0)[:correct]
        return {
            "q_pos": p[:correct].sum(),
            "improved": (change > 0).mean(),
            "worst_drop": change.min(),
            "retained": 1 - np.maximum(-change, 0).sum() / self.p0[:correct].sum(),
            "entropy": -(p * np.log(p)).sum(),
        }


def numpy_run(setup: Setup, seed: int) -> float:
    """Q_pos at the end."""
    loop, rng = NumpyLoop(setup, AdamW()), np.random.default_rng(seed)
    log = [loop.figures()]
    for t in range(1, setup.steps + 1):
        loop.step(loop.draw(rng))
        if t % setup.log_every == 0:
            log.append(loop.figures())
    return log[-1]["q_pos"]


def timed(what: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, cores that other processes used meanwhile, and the result."""
    began, others = time.perf_counter(), others_seconds()
    result = what()
    seconds = time.perf_counter() - began
    return seconds, max(0.0, others_seconds() - others) / seconds, result


def compare(setups: Sequence[Setup], seeds: Sequence[int]) -> tuple[list[str], bool]:
    """The table's lines, and whether both did the same work. The whole figure twice (the first compiles), each N."""
    lines = ["| N | NumPy, s | brorl_jax, s | times faster | Q_pos, NumPy | Q_pos, brorl_jax | cores used by others |"]
    lines += ["|---|---|---|---|---|---|---|"]
    same, loops = True, []
    cases = figure_cases([s.n for s in setups], setups[0])
    first, _, _ = timed(lambda: run(cases, seeds))
    again, busy, _ = timed(lambda: run(cases, seeds))
    for setup, case in zip(setups, cases, strict=True):
        ours, b1, (record,) = timed(lambda case=case: run([case], seeds))
        loop, b2, q_pos = timed(lambda setup=setup: np.mean([numpy_run(setup, seed) for seed in seeds]))
        loops.append(loop)
        mine = float(record.q_pos[:, -1].mean())
        same &= abs(mine - q_pos) < AGREE
        cells = [f"{setup.n:,}", f"{loop:.1f}", f"{ours:.1f}", f"{loop / ours:.1f}", f"{q_pos:.4f}", f"{mine:.4f}"]
        lines.append("| " + " | ".join([*cells, f"{max(b1, b2):.2f}"]) + " |")
    total = sum(loops)
    lines.append(f"| all | {total:.1f} | {again:.1f} | {total / again:.1f} | | | {busy:.2f} |")
    lines.append(f"| all, compiling | {total:.1f} | {first:.1f} | {total / first:.1f} | | | |")
    return lines, same


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=PAPER_N, help="draws per step; default: the figure's five")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--correct", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    where = step.machine_line(step.machine())
    base = Setup(n=1, vocab=options.vocab, correct=options.correct, steps=options.steps)
    lines, same = compare([dataclasses.replace(base, n=n) for n in options.n], range(options.seeds))
    head = f"{options.seeds} seeds x {options.steps} steps, {options.vocab:,} tokens; goal {GOAL:g} times. {where}"
    table = "\n".join([head, "", *lines, *([] if same else ["", f"**Q_pos differs by more than {AGREE}.**"])])
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "simulator.md").write_text(table + "\n")
    return int(not same)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the first run compiles, whatever ran before
    raise SystemExit(main())
