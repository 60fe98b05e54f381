"""Five-line programs per second through the code verifier, isolated, on CPU. README.md has the command.

Each program is different and has three tests, so that nothing comes from a cache; half of them are wrong. What is timed
is a whole batch through the grading service: a fresh sandbox per program, its tests, its end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks.step import machine, machine_line  # noqa: E402
from brorl_jax.rewards import Grader, sandbox  # noqa: E402
from brorl_jax.types import Finish, Group, Prompt, Sample  # noqa: E402

GOAL = 25.0  # programs per second
FORMS = {
    "stdin": (
        "import sys\ntotal = {k}\nfor line in sys.stdin:\n    total += int(line)\nprint(total{wrong})",
        {"kind": "stdin", "inputs": ["2\n", "5\n", "9\n"]},
    ),
    "call": (
        "def f(values):\n    total = {k}\n    for x in values:\n        total += x\n    return total{wrong}",
        {"kind": "call", "fn": "f", "inputs": [[[2]], [[5]], [[9]]]},
    ),
    "assert": (
        "def f(values):\n    total = {k}\n    for x in values:\n        total += x\n    return total{wrong}",
        {"kind": "assert"},
    ),
}


def batch(form: str, size: int, number: int) -> tuple[list[Group], list[float]]:
    """One group per program, unlike those of other numbers, and the rewards that they must get."""
    source, fields = FORMS[form]
    groups, rewards, nothing = [], [], np.zeros(0, np.float32)
    for k in range(size):
        sums = [k + x for x in (2, 5, 9)]
        tests = dict(fields)
        if form == "assert":
            tests["tests"] = [f"assert f([{x}]) == {k + x}" for x in (2, 5, 9)]
        else:
            tests["outputs"] = [str(s) if form == "stdin" else s for s in sums]
        prompt = Prompt(f"{form}/{number}/{k}", np.zeros(1, np.int32), "", "", "code", "bench", {"tests": tests})
        text = f"```python\n{source.format(k=k, wrong=' + 1' * (k % 2))}\n```"
        groups.append(Group(prompt, [Sample(k, 0, nothing, nothing, Finish.STOP, 0, text)]))
        rewards.append(1.0 - k % 2)
    return groups, rewards


def measure(form: str, size: int, rounds: int) -> tuple[float, int]:
    """Programs per second (the median of rounds) and the number of wrong rewards."""
    seconds, wrong = [], 0
    with Grader() as grader:
        grader.grade(batch(form, 2 * grader.workers, -1)[0])  # starts the workers and their testers
        for number in range(rounds):
            groups, rewards = batch(form, size, number)
            start = time.perf_counter()
            grader.grade(groups)
            seconds.append(time.perf_counter() - start)
            wrong += sum(g.samples[0].reward != r for g, r in zip(groups, rewards, strict=True))
    return size / statistics.median(seconds), wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results")
    options = parser.parse_args(argv)
    sandbox.check()
    where, failed = machine(), 0
    lines = ["# Sandbox", "", machine_line(where), "", f"{len(os.sched_getaffinity(0))} workers, isolated.", ""]
    lines += ["| tests | programs per second | goal | wrong rewards |", "|---|---|---|---|"]
    for form in FORMS:
        rate, wrong = measure(form, options.programs, options.rounds)
        lines.append(f"| {form} | {rate:.0f} | {GOAL:.0f} | {wrong} |")
        failed += wrong
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sandbox.md").write_text(text)
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
