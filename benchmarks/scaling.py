"""Time and memory of the update against N, T and V, and what computing a prompt once gains; README.md has the command.

Every case is a process of its own with made-up rollouts. The first update is left out; the median of the others counts.
Results go to ``--out`` as JSON and as a Markdown table, after every case, so that a stopped run can go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import step  # noqa: E402
from benchmarks.contenders.work import Work  # noqa: E402

Result = dict[str, Any]
RATIOS = ("4", "1", "1/4", "1/25")  # P/R


@dataclasses.dataclass(frozen=True)
class Case:
    """One update.

    Attributes:
        part: Table it belongs to.
        label: Its row, and its name in the results beside ``part``.
        work: What is trained.
        attention: ``xla`` or ``blockwise``.
        prompts: ``shared`` (once per group and micro-batch) or ``repeated`` (for every rollout).
    """

    part: str
    label: str
    work: Work
    attention: str = "xla"
    prompts: str = "shared"

    @property
    def name(self) -> str:
        return f"{self.part} {self.label}"


def cases(
    base: Work,
    *,
    samples: int,
    ns: Iterable[int],
    tokens: int,
    ts: Iterable[int],
    vs: Iterable[int],
    ratios: Iterable[str] = RATIOS,
) -> list[Case]:
    """All cases.

    Args:
        base: The model, and shapes where a curve doesn't vary them.
        samples: Of every update in the curve over N: ``samples / N`` prompts.
        tokens: Response tokens of every update in the curve over T, a quarter of them in a micro-batch.
    """
    found = [Case("N", f"{n}", dataclasses.replace(base, n=n, prompts=samples // n)) for n in ns]
    for t in ts:
        n = tokens // t
        work = dataclasses.replace(base, n=n, response_tokens=t, micro_rows=max(1, n // 4))
        found += [Case("T", f"{t} {attention}", work, attention) for attention in ("xla", "blockwise")]
    found += [Case("V", f"{v}", dataclasses.replace(base, vocab=v, n=min(base.n, 128))) for v in vs]
    whole = base.prompt_tokens + base.response_tokens
    for ratio in ratios:
        above, _, below = ratio.partition("/")
        p = max(2, round(whole * int(above) / (int(above) + int(below or 1))))
        work = dataclasses.replace(base, n=base.micro_rows, prompt_tokens=p, response_tokens=whole - p)
        found += [Case("P/R", f"{ratio} {prompts}", work, prompts=prompts) for prompts in ("shared", "repeated")]
    return found


def summary(case: Case, result: Result) -> Result:
    """The case's figures, and ``wrong``: that it trained on other tokens than it should have."""
    seconds = statistics.median(result["seconds"][1:])
    trained = result["trained_tokens"]
    return result | {
        "update_s": seconds,
        "tokens_per_s": trained / seconds,
        "ms_per_sample": 1e3 * seconds / case.work.samples,
        "wrong": [] if trained == case.work.tokens else [f"trained {trained} tokens instead of {case.work.tokens}"],
    }


def measure(
    todo: Iterable[Case], run: Callable[[Case], Result], known: Result, keep: Callable[[Result], None]
) -> Result:
    """Runs the cases that ``known`` lacks; ``keep`` is told after each."""
    done = dict(known)
    for case in todo:
        if case.name not in done:
            print(case.name, file=sys.stderr, flush=True)
            done[case.name] = summary(case, run(case)) | {"work": dataclasses.asdict(case.work)}
            keep(done)
    return done


HEADINGS = {
    "N": ("Rollouts per prompt N, the same number of samples", "N"),
    "T": ("Response tokens T, the same number of tokens", "T, attention"),
    "V": ("Vocabulary V", "V"),
    "P/R": ("Prompt once or for every rollout", "P/R, prompts"),
}


def table(todo: list[Case], done: Mapping[str, Result], where: str) -> str:
    lines = ["# The update against its sizes", "", where]
    for part, (title, first) in HEADINGS.items():
        rows = [(case, done[case.name]) for case in todo if case.part == part and case.name in done]
        lines += [
            "",
            f"## {title}",
            "",
            f"| {first} | update s | ms/sample | tokens/s | buffers MiB | resident, most MiB |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for case, r in rows:
            lines.append(
                f"| {case.label} | {r['update_s']:.2f} | {r['ms_per_sample']:.2f} | {r['tokens_per_s']:,.0f} "
                f"| {r['compiled_temp_bytes'] / 2**20:.0f} | {r['rss_peak_gib'] * 1024:.0f} |"
            )
        if rows:
            work = dataclasses.asdict(rows[0][0].work)
            names = ("prompt_tokens", "response_tokens", "n", "prompts", "micro_rows", "vocab", "layers", "width")
            lines += ["", "First row: " + ", ".join(f"{name} {work[name]:,}" for name in names) + "."]
        if part == "P/R":
            lines += ["", *_gains(rows)]
    busiest = max((r["others_cores"] for r in done.values()), default=0.0)
    if busiest > step.QUIET:
        lines += [
            "",
            f"**Not a quiet machine:** other processes used up to {busiest:.1f} cores; its seconds do not count.",
        ]
    lines += [f"\n**{name} is wrong:** {'; '.join(r['wrong'])}." for name, r in done.items() if r["wrong"]]
    return "\n".join(lines) + "\n"


def _gains(rows: list[tuple[Case, Result]]) -> list[str]:
    """Repeated over shared, for every ratio that has both."""
    lines = ["| P/R | tokens that are saved, P/(P+R) | update | buffers |", "|---|---|---|---|"]
    found = {case.label: (case.work, r) for case, r in rows}
    for ratio in RATIOS:
        if f"{ratio} shared" in found and f"{ratio} repeated" in found:
            (work, once), (_, each) = found[f"{ratio} shared"], found[f"{ratio} repeated"]
            share = work.prompt_tokens / (work.prompt_tokens + work.response_tokens)
            time, memory = (each[key] / once[key] for key in ("update_s", "compiled_temp_bytes"))
            lines.append(f"| {ratio} | {100 * share:.1f} % | {time:.2f}x | {memory:.2f}x |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a case may take")
    parser.add_argument("--steps", type=int, default=3, help="timed updates of a case")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short curves, to see that it works")
    options = parser.parse_args(argv)
    if options.tiny:
        base = Work(
            n=8, micro_rows=4, prompt_tokens=8, response_tokens=8, vocab=32, layers=1, width=16, heads=2, ffn=16
        )
        sizes: dict[str, Any] = {"samples": 8, "ns": (8,), "tokens": 64, "ts": (16,), "vs": (64,), "ratios": ("1",)}
    else:
        base = Work(prompt_tokens=128, response_tokens=128)
        sizes = {"samples": 1024, "ns": (16, 32, 64, 128, 256, 512, 1024), "tokens": 16_384}
        sizes |= {"ts": (64, 256, 1024, 4096), "vs": (4096, 16_384, 65_536, 151_936)}
    todo = cases(dataclasses.replace(base, steps=options.steps), **sizes)
    file = options.out / "scaling.json"
    known = json.loads(file.read_text()) if file.exists() else {"machine": step.machine(), "cases": {}}
    known["cases"] = {
        c.name: r for c in todo if (r := known["cases"].get(c.name)) and r["work"] == dataclasses.asdict(c.work)
    }

    def keep(done: Result) -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": known["machine"], "cases": done}, indent=1) + "\n")

    def run(case: Case) -> Result:
        return step.contend(sys.executable, "update", case.work, case.attention, case.prompts, timeout=options.timeout)

    done = measure(todo, run, known["cases"], keep)
    page = table(todo, done, step.machine_line(known["machine"]))
    (options.out / "scaling.md").write_text(page)
    print(page)
    return 1 if any(r["wrong"] for r in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
