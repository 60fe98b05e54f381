"""What many rollouts per prompt cost brorl_jax: throughput at two values of N, and memory of the update against N."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.work import Work

GOAL = 1.98  # [P]: 72.4 against 36.5 generated samples/s at N = 512 and 16
RATES = ("generation_s", "update_s", "step_s")

Result = dict[str, Any]


def check(work: Work, small_n: int) -> None:
    """Refuses an N that does not divide the samples.

    Raises:
        ValueError: It does not.
    """
    if small_n < 2 or work.n % small_n:
        raise ValueError(f"--small-n {small_n} must be at least 2 and divide --n {work.n}")


def measure(work: Work, small_n: int, run: Callable[..., Result], summary: Callable[[Result, Work], Result]) -> Result:
    """``work.n`` samples per step, of many prompts with ``small_n`` each and of one; then memory up to ``2 * work.n``.

    Args:
        run: ``(work, *arguments) -> result`` of a process of its own.
        summary: ``(result, work) -> medians and complaints``.
    """
    out: Result = {"work": dataclasses.asdict(work), "throughput": {}, "memory": {}, "failed": []}
    for n in (small_n, work.n):
        shape = dataclasses.replace(work, n=n, prompts=work.n // n)
        print(f"{shape.prompts} prompts x {n}", file=sys.stderr, flush=True)
        result = run(shape)
        row: Result = result | summary(result, shape) | {"prompts": shape.prompts}
        out["throughput"][n] = row
        out["failed"] += [f"N = {n}: {complaint}" for complaint in row["wrong"]]
    small, large = out["throughput"][small_n], out["throughput"][work.n]
    out["ratio"] = {key: small[key] / large[key] for key in RATES}
    n = small_n
    while n <= 2 * work.n:
        print(f"update of 1 prompt x {n}", file=sys.stderr, flush=True)
        shape = dataclasses.replace(work, n=n)
        out["memory"][n] = run(shape, "memory")
        if out["memory"][n]["trained_tokens"] != shape.tokens:
            out["failed"].append(f"N = {n}: trained {out['memory'][n]['trained_tokens']} tokens")
        n *= 2
    return out


def table(out: Result, work: Work, where: str) -> str:
    mib = 2**20
    lines = [
        "# Many rollouts per prompt",
        "",
        where,
        "",
        f"{work.n} rollouts of {work.response_tokens} tokens per step, prompts of {work.prompt_tokens} tokens; "
        f"rollouts per second, median of {work.steps} steps after the first.",
        "",
        "| prompts x N | generation | update | whole step | peak memory GiB |",
        "|---|---|---|---|---|",
    ]
    for n, r in out["throughput"].items():
        rates = " | ".join(f"{work.n / r[key]:.1f}" for key in RATES)
        lines.append(f"| {r['prompts']} x {n} | {rates} | {r['peak_rss_gib']:.2f} |")
    busiest = max(r["others_cores"] for r in out["throughput"].values())
    ratios = " | ".join(f"{out['ratio'][key]:.2f}x" for key in RATES)
    lines += [
        f"| **ratio** | {ratios} | |",
        f"| goal | {GOAL}x | | {GOAL}x | |",
        "",
        f"Other processes used up to {busiest:.1f} cores during a step.",
        "",
        f"Update of one prompt's N rollouts in micro-batches of {work.micro_rows}, MiB: what the compiled program "
        "plans for (buffers, and arguments: state and batch), and resident memory of the process before and at most.",
        "",
        "| N | micro-batches | buffers | arguments | of these the batch | resident before | most | added |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n, r in out["memory"].items():
        before, peak = r["rss_before_gib"] * 1024, r["rss_peak_gib"] * 1024
        lines.append(
            f"| {n} | {r['micro_batches']} | {r['compiled_temp_bytes'] / mib:.1f} "
            f"| {r['compiled_argument_bytes'] / mib:.1f} | {r['batch_bytes'] / mib:.2f} "
            f"| {before:.0f} | {peak:.0f} | {peak - before:.0f} |"
        )
    return "\n".join(lines) + "\n"
