"""One training step of brorl_jax beside TRL's GRPOTrainer and tunix's GRPOLearner, on CPU: seconds and memory.

Every contender is a process of its own, in its own Python, with the same model and the same work (``Work``): a prompt,
N rollouts of a fixed length, one update. The first step compiles and is left out; the median of the others counts.
Results go to ``--out`` as JSON (every step) and as a Markdown table. README.md has the commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import n_scaling  # noqa: E402
from benchmarks.contenders.work import MARK, Work  # noqa: E402

OURS = "brorl_jax"
GOALS = {"step_s": 5.0, "generation_s": 3.0, "update_s": 3.0}  # times faster than either peer
TRAINED = 0.998  # at least this share of the tokens is in the loss: tunix leaves out sampled padding ids, 1 in 4,096
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

QUIET = 0.15  # cores that other processes may use meanwhile

Result = dict[str, Any]


class Failed(RuntimeError):
    """A contender ended without a result."""


def contend(python: str, module: str, work: Work, *args: str, timeout: float) -> Result:
    """Runs ``module`` in ``python`` and returns what it reports; what else it says goes to standard error.

    Raises:
        Failed: It does not exist, crashed, said nothing, or took longer than ``timeout`` seconds.
    """
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ENVIRONMENT
    command = [python, "-m", f"benchmarks.contenders.{module}", json.dumps(dataclasses.asdict(work)), *args]
    try:
        done = subprocess.run(command, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except OSError as error:
        raise Failed(f"cannot run {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"took longer than {timeout:g} s (--timeout)") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise Failed(f"ended with status {done.returncode}; see its messages above")
    return json.loads(lines[-1].removeprefix(MARK))


def summary(result: Result, work: Work) -> Result:
    """Medians over the timed steps, and ``wrong``: in what the contender did other work than it should have."""
    timed = result["steps"][1:]
    wrong = [] if len(timed) == work.steps else [f"{len(timed)} timed steps instead of {work.steps}"]
    for i, row in enumerate(result["steps"]):
        if row["generated_tokens"] != work.tokens:
            wrong.append(f"step {i} generated {row['generated_tokens']:g} tokens instead of {work.tokens}")
        if not TRAINED * work.tokens <= row["trained_tokens"] <= work.tokens:
            wrong.append(f"step {i} trained {row['trained_tokens']:g} tokens instead of {work.tokens}")
        if row["context_tokens"] != work.samples * work.prompt_tokens:
            wrong.append(f"step {i} trained on {row['context_tokens']:g} prompt tokens")
    if not result["moved"] > 0:
        wrong.append("no weight changed: every gradient was 0")
    medians = {key: statistics.median(row[key] for row in timed) for key in GOALS} if timed else {}
    last = result["steps"][-1]
    return medians | {
        "samples_per_s": work.samples / medians["step_s"] if timed else 0.0,
        "trained_tokens": last["trained_tokens"],
        "peak_rss_gib": last["peak_rss_gib"],
        "others_cores": max(row["others_cores"] for row in timed) if timed else 0.0,
        "wrong": wrong,
    }


def machine() -> Result:
    """Where this runs; a load average well above 0 at the start means that others use the machine, too."""

    def field(path: str, name: str) -> str:
        lines = Path(path).read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True)
    return {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": platform.platform(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "commit": commit.stdout.strip() or "unknown",
    }


def machine_line(where: Result) -> str:
    return (
        f"{where['cores']} cores of {where['cpu']}, {where['memory_gib']} GiB, {where['system']}; load average "
        f"{where['load_at_start']} at the start; brorl_jax at {where['commit']}."
    )


def compare(options: argparse.Namespace, work: Work) -> tuple[Result, str]:
    """All contenders on the same work."""
    pythons = {OURS: ("ours", sys.executable), "TRL": ("trl", options.trl_python)}
    pythons["tunix"] = ("tunix", options.tunix_python)
    out: Result = {"machine": machine(), "work": dataclasses.asdict(work), "contenders": {}, "skipped": {}}
    for name, (module, python) in pythons.items():
        if not python:
            out["skipped"][name] = f"--{module}-python was not given"
            continue
        print(f"{name}: {work.steps + 1} steps of {work.samples} rollouts", file=sys.stderr, flush=True)
        try:
            result = contend(python, module, work, timeout=options.timeout)
        except Failed as error:
            out["skipped"][name] = str(error)
        else:
            out["contenders"][name] = result | summary(result, work)
    done = out["contenders"]
    if OURS in done and "step_s" in done[OURS]:
        out["ratios"] = {
            name: {key: r[key] / done[OURS][key] for key in GOALS} for name, r in done.items() if name != OURS
        }
    out["failed"] = [name for name, why in out["skipped"].items() if pythons[name][1]]
    out["failed"] += [name for name, r in done.items() if r["wrong"]]
    if len({r["parameters"] for r in done.values()}) > 1:
        out["failed"].append("models differ in size")
    return out, compare_table(out, work)


def compare_table(out: Mapping[str, Any], work: Work) -> str:
    lines = [
        "# A step, side by side",
        "",
        f"{work.prompts} prompt of {work.prompt_tokens} tokens x {work.n} rollouts of {work.response_tokens} tokens, "
        f"one update; Qwen2 of {work.layers} layers, width {work.width}, vocabulary {work.vocab:,}; float32 on CPU. "
        f"Median of {work.steps} steps after the first.",
        "",
        machine_line(out["machine"]),
        "",
        "| | generation s | update s | step s | rollouts/s | peak memory GiB | tokens trained | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in out["contenders"].items():
        lines.append(
            f"| {name} | {r['generation_s']:.2f} | {r['update_s']:.2f} | {r['step_s']:.2f} | {r['samples_per_s']:.1f} "
            f"| {r['peak_rss_gib']:.2f} | {r['trained_tokens']:,.0f} of {work.tokens:,} | {r['parameters']:,} |"
        )
    for name, ratio in out.get("ratios", {}).items():
        cells = [f"{ratio[key]:.2f}x" for key in ("generation_s", "update_s", "step_s")]
        lines.append(f"| **{name} / {OURS}** | {' | '.join(cells)} | | | | |")
    goals = [f"{GOALS[key]:g}x" for key in ("generation_s", "update_s", "step_s")]
    lines.append(f"| goal | {' | '.join(goals)} | | | | |")
    for name, r in out["contenders"].items():
        lines += ["", f"{name}: {', '.join(f'{package} {version}' for package, version in r['versions'].items())}."]
        if r["others_cores"] > QUIET:
            busy = f"other processes used up to {r['others_cores']:.1f} cores during a step of {name}"
            lines += ["", f"**Not a quiet machine:** {busy}; its seconds do not count."]
        if r["wrong"]:
            lines += ["", f"**{name} did other work:** {'; '.join(r['wrong'])}."]
    for name, why in out["skipped"].items():
        lines += ["", f"{name} is missing: {why}."]
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Work]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="Python of an environment with TRL; without it TRL is left out")
    parser.add_argument("--tunix-python", help="Python of an environment with tunix; without it tunix is left out")
    parser.add_argument("--n-scaling", action="store_true", help="brorl_jax alone: throughput and memory against N")
    parser.add_argument("--small-n", type=int, default=16, help="with --n-scaling: the N to compare --n with")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a contender may take")
    group = parser.add_argument_group("the work")
    names = [f for f in dataclasses.fields(Work) if f.name != "prompts"]
    for f in names:
        group.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    options = parser.parse_args(argv)
    try:
        work = Work(**{f.name: getattr(options, f.name) for f in names})
        if options.n_scaling:
            n_scaling.check(work, options.small_n)
    except ValueError as error:
        parser.error(str(error))
    return options, work


def main(argv: list[str] | None = None) -> int:
    options, work = parse(argv)
    if options.n_scaling:

        def ours(work: Work, *args: str) -> Result:
            return contend(sys.executable, "ours", work, *args, timeout=options.timeout)

        out, table = scaling(options, work, ours)
    else:
        out, table = compare(options, work)
    name = "n_scaling" if options.n_scaling else "step"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(out, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(table)
    print(table)
    if out["failed"]:
        print(f"error: {', '.join(out['failed'])}: see the table", file=sys.stderr)
    return 1 if out["failed"] else 0


def scaling(options: argparse.Namespace, work: Work, ours: Callable[..., Result]) -> tuple[Result, str]:
    """``n_scaling`` with the machine and the checks of this module."""
    where = machine()
    out = n_scaling.measure(work, options.small_n, ours, summary)
    return {"machine": where, **out}, n_scaling.table(out, work, machine_line(where))


if __name__ == "__main__":
    sys.exit(main())
