"""Grading 8,192 answers beside a plain loop over math-verify, and what scorers that hang or die cost, on CPU.

16 prompts x 512 responses with short answers in boxes: with repeats as a policy makes them, and all different. The
plain loop is one process that parses every response and compares it with the gold answer, parsed once per prompt; the
service has one worker per core. Both see the same responses. README.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks.step import machine, machine_line  # noqa: E402
from brorl_jax.rewards import Grader  # noqa: E402
from brorl_jax.types import Finish, Group, Prompt, Sample, Status  # noqa: E402
from tests.helpers import hostile_scorers  # noqa: E402  (registers "hostile")

Kinds = dict[str, tuple[list[str], str]]  # by kind: gold answers, and a template of other answers
Result = dict[str, Any]

# Gold answers in the shares of MATH-500, where of 500 there are 316 integers, 54 fractions, 23 lists, tuples and
# intervals, 30 with a root or pi, and other expressions; and how a wrong answer of the kind looks.
INTEGERS = ["27", "-1", "4", "1080", "70", "33", "256", "11", "98", "720"]
KINDS: Kinds = {
    "integer": (INTEGERS, "{a}"),
    "fraction": ([r"\frac{14}{3}", r"\frac{3}{56}"], r"\frac{{{a}}}{{{b}}}"),
    "tuple": ([r"\left( 3, \frac{\pi}{2} \right)"], r"\left( {a}, \frac{{\pi}}{{{b}}} \right)"),
    "root": ([r"3\sqrt{13}"], r"{a}\sqrt{{{b}}}"),
    "polynomial": (["6r^2-4r-24", r"x^3+3x-6"], "{a}r^2-{b}r-{c}"),
}
# The gold answer in other words, which takes algebra to tell.
EQUAL: Kinds = {
    "root": ([r"3\sqrt{13}"], r"\sqrt{{117}}+{a}\sqrt{{{b}}}-{a}\sqrt{{{b}}}"),
    "polynomial": (["6r^2-4r-24"], "2(3r^2-2r-12)+{a}s^{{{b}}}-{a}s^{{{b}}}"),
    "sine": ([r"\sin x"], r"\sin x+{a}\cos {b}y-{a}\cos {b}y"),
    "complex": (["3+4i"], "3+4i+{a}i-{a}i"),  # left to math-verify's own parser
}
# Assumed, not measured: prompts are answered right with a frequency between these, evenly spread, as those are that
# dynamic sampling keeps; the k-th most frequent wrong answer is given in proportion to k ** -TAIL, of POOL in all.
EASE = (0.1, 0.9)
TAIL, POOL = 1.2, 2_000
HOSTILE = ("hang", "hang_in_c", "stop", "kill", "_exit 0", "memory", "raise", "flood")
SLACK = 1.0  # seconds beyond its deadline that a scorer may cost
GOALS = {"repeats": 20.0, "distinct": 1.0, "symbolic": 1.0}  # times the plain loop's rate (distinct: and cores)


def golds(kinds: Kinds, count: int) -> list[tuple[str, str]]:
    """``count`` pairs of a gold answer and how other answers look."""
    pairs = [(gold, other) for examples, other in kinds.values() for gold in examples]
    return [pairs[i % len(pairs)] for i in range(count)]


def answers(gold: str, other: str, n: int, rng: random.Random, right: float | None) -> list[str]:
    """``n`` answers to one prompt, the gold one with frequency ``right``; None: all different, gold included."""
    wrong: dict[str, None] = {}  # an ordered set
    while len(wrong) < (n - 1 if right is None else POOL):
        a, b, c = (rng.randrange(2, 60 + len(wrong)) for _ in range(3))
        text = other.format(a=a, b=b, c=c)
        if text != gold:
            wrong[text] = None
    said = [gold, *wrong]
    if right is not None:
        tail = [k**-TAIL for k in range(1, POOL + 1)]
        said = rng.choices(said, [right, *((1 - right) * w / sum(tail) for w in tail)], k=n)
    rng.shuffle(said)
    return said


def work(kinds: Kinds, prompts: int, n: int, *, repeats: bool) -> list[Group]:
    """Groups of responses to grade; the same in every process."""
    rng, nothing = random.Random(0), np.zeros(0, np.float32)
    groups = []
    for i, (gold, other) in enumerate(golds(kinds, prompts)):
        prompt = Prompt(f"bench/{i}", np.zeros(1, np.int32), "", gold, "math", "bench")
        right = EASE[0] + (EASE[1] - EASE[0]) * i / max(1, prompts - 1) if repeats else None
        said = answers(gold, other, n, rng, right)
        texts = [rf"Putting all of this together, the answer is $\boxed{{{answer}}}$." for answer in said]
        samples = [Sample(k, k, nothing, nothing, Finish.STOP, 0, text) for k, text in enumerate(texts)]
        groups.append(Group(prompt, samples))
    return groups


class Clock:
    """Wall clock, and processor seconds of this process and its live descendants, since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), self._cpu(os.getpid())

    def read(self) -> dict[str, float]:
        """What has passed, as ``{"s", "cpu_s"}``."""
        return {"s": time.perf_counter() - self.wall, "cpu_s": self._cpu(os.getpid()) - self.cpu}

    def _cpu(self, pid: int) -> float:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # user, system
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if pid == os.getpid():
            children = [c for t in Path("/proc/self/task").glob("*/children") for c in t.read_text().split()]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(self._cpu(int(child)) for child in children)


def plain_loop(groups: Sequence[Group]) -> tuple[dict[str, float], list[list[float]]]:
    """What math-verify takes for every response, and its scores by group."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parse(r"$\frac{1}{2}$")  # what is made at the first call
    clock, scores = Clock(), []
    for group in groups:
        gold = parse(rf"\boxed{{{group.prompt.gold}}}")
        scores.append([float(verify(gold, parse(sample.text))) for sample in group.samples])
    return clock.read(), scores


def service(grader: Grader, groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, float]]:
    """What the grading service takes for the same responses, and its counters."""
    grader.pop_metrics()
    clock = Clock()
    grader.grade(groups)
    took = clock.read()
    return took, {key.rpartition("/")[2]: value for key, value in grader.pop_metrics().items() if "/math/" in key}


def compare(name: str, make: Callable[[], list[Group]], workers: int, rounds: int) -> Result:
    """The service (a fresh one each round, median) and the plain loop on the same work."""
    ours, counts = [], {}
    for _ in range(rounds):
        groups = make()
        with Grader(workers=workers) as grader:
            grader.grade([warm(k) for k in range(4 * workers)])
            took, counts = service(grader, groups)
        ours.append(took)
    plain, scores = plain_loop(groups)
    median = {key: statistics.median(took[key] for took in ours) for key in plain}
    samples = [sample for group in groups for sample in group.samples]
    unlike = [
        {"gold": group.prompt.gold, "response": sample.text, "ours": sample.reward, "plain": score}
        for group, row in zip(groups, scores, strict=True)
        for sample, score in zip(group.samples, row, strict=True)
        if sample.reward != score
    ]
    return {
        "answers": len(samples),
        "distinct": len({(g.prompt.id, s.text) for g in groups for s in g.samples}),
        "right": sum(sample.reward for sample in samples) / len(samples),
        "service": median,
        "plain": plain,
        "ratio": plain["s"] / median["s"],
        "goal": GOALS[name] * (1 if name == "repeats" else workers),
        "counters": counts,
        "unlike": len(unlike),
        "unlike_examples": unlike[:5],
        "unscored": sum(sample.status is not Status.OK for sample in samples),
    }


def warm(k: int) -> Group:
    """An answer that a worker has to think about, so that it has imported all it needs."""
    nothing = np.zeros(0, np.float32)
    prompt = Prompt(f"warm/{k}", np.zeros(1, np.int32), "", r"\sqrt{8}", "math", "bench")
    return Group(prompt, [Sample(0, 0, nothing, nothing, Finish.STOP, 0, rf"\boxed{{2\sqrt{{2}}+{k}x-{k}x}}")])


def misbehave(workers: int, n: int) -> list[Result]:
    """One answer of ``n`` misbehaves: its status, seconds until all have one, and how many others were scored."""
    rows, nothing = [], np.zeros(0, np.float32)
    with Grader(workers=workers) as grader:
        for bad in ("nothing", *HOSTILE):  # the first starts the workers
            prompt = Prompt(f"hostile/{bad}", np.zeros(1, np.int32), "", "", "hostile", "bench")
            texts = [bad, *map(str, range(1, n))]
            group = Group(prompt, [Sample(k, k, nothing, nothing, Finish.STOP, 0, t) for k, t in enumerate(texts)])
            start = time.perf_counter()
            grader.grade([group])
            seconds = time.perf_counter() - start
            others = sum(sample.status is Status.OK for sample in group.samples[1:])
            rows.append({"what": bad, "status": str(group.samples[0].status), "seconds": seconds, "others_ok": others})
    return rows[1:]


def run(options: argparse.Namespace) -> tuple[Result, str]:
    """All of it; the table, and the reasons to fail."""
    where, prompts, n = machine(), options.prompts, options.n
    cores = len(os.sched_getaffinity(0))
    cases = {
        "repeats": lambda: work(KINDS, prompts, n, repeats=True),
        "distinct": lambda: work(KINDS, prompts, n, repeats=False),
        "symbolic": lambda: work(EQUAL, prompts, n, repeats=False),
    }
    out: Result = {"machine": where, "workers": cores, "cases": {}, "failed": []}
    for name, make in cases.items():
        print(f"{name}: {prompts} x {n} answers", file=sys.stderr, flush=True)
        row = out["cases"][name] = compare(name, make, cores, options.rounds)
        if row["unscored"]:
            out["failed"].append(f"{name}: {row['unscored']} answers have no verdict")
    print("answers that hang or die", file=sys.stderr, flush=True)
    deadline = hostile_scorers.DEADLINE
    out["hostile"] = misbehave(cores, n)
    for row in out["hostile"]:
        if row["seconds"] > deadline + SLACK or row["others_ok"] != n - 1:
            out["failed"].append(f"{row['what']}: {row['seconds']:.1f} s, {row['others_ok']} of {n - 1} others graded")
    return out, table(out, n, deadline)


def table(out: Result, n: int, deadline: float) -> str:
    titles = {
        "repeats": "with repeats",
        "distinct": "all different",
        "symbolic": "all different, all right in other words",
    }
    lines = [
        "# Grading",
        "",
        machine_line(out["machine"]),
        "",
        f"Answers per second, {out['workers']} workers; the plain loop is one process.",
        "",
        "| answers | distinct | service | plain loop | ratio | goal | processor seconds | verdicts that differ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in out["cases"].items():
        ours, plain = row["service"], row["plain"]
        lines.append(
            f"| {row['answers']:,} {titles[name]} | {row['distinct']:,} | {row['answers'] / ours['s']:,.0f} | "
            f"{row['answers'] / plain['s']:,.0f} | {row['ratio']:.1f}x | {row['goal']:g}x | "
            f"{ours['cpu_s']:.1f} to {plain['cpu_s']:.1f} | {row['unlike']} |"
        )
    lines += [
        "",
        f"One of {n} answers misbehaves, with a deadline of {deadline:g} s: seconds until all have their verdicts.",
        "",
        "| what it does | its status | seconds | others graded |",
        "|---|---|---|---|",
    ]
    for row in out["hostile"]:
        lines.append(f"| `{row['what']}` | {row['status']} | {row['seconds']:.2f} | {row['others_ok']} of {n - 1} |")
    lines += [f"\n**Failed:** {why}." for why in out["failed"]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=512, help="answers per prompt")
    parser.add_argument("--rounds", type=int, default=3, help="of the service; the median counts")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results")
    options = parser.parse_args(argv)
    out, text = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "grading.json").write_text(json.dumps(out, indent=1))
    (options.out / "grading.md").write_text(text)
    print(text)
    return 1 if out["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
