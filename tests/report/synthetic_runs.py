"""Makes run directories that look like real ones, for tests and for looking at the report.

python tests/report/synthetic_runs.py OUT_DIR
"""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from pathlib import Path

HOSTILE = (
    '</script><script>window.pwned=1</script><!-- <img src=x onerror="window.pwned=1"> {{data}} &lt;b&gt; '
    "\x00\x07\x1b[31m\u2028\u2029\u202egnirts\u202c é漢字 😀 \ud800 \\u003c '\"` </style>"
)


def write_run(
    directory: Path,
    *,
    n: int = 16,
    prompts: int = 64,
    steps: int = 60,
    done: int | None = None,
    gain: float = 0.45,
    seed: int = 0,
    hostile: bool = False,
) -> Path:
    """A run of ``done`` (default: all) of ``steps`` steps whose held-out accuracy climbs by about ``gain``."""
    random.seed(seed)
    done = steps if done is None else done
    directory.mkdir(parents=True)
    config = {
        "name": "quickstart",
        "seed": seed,
        "model": {"path": "", "new": {"family": "qwen3", "hidden": 128, "layers": 3}},
        "rollout": {"engine": "local", "n": n, "prompts_per_step": prompts, "max_tokens": 32, "temperature": 1.0},
        "filter": {"dynamic": True, "max_generation_batches": 4},
        "algo": {"advantage": "reinforce++-baseline", "loss": "ppo_clip", "kl": {"estimator": "k2", "coef": 1e-4}},
        "optim": {"lr": 2e-4, "lr_rule": "sqrt", "clip_norm": 1.0},
        "data": {"train": {"sums": {"kind": "reasoning_gym", "task": "basic_arithmetic"}}},
        "train": {"steps": steps},
    }
    (directory / "config.json").write_text(json.dumps(config))
    lines = [{"step": s, "time": 1e9 + s / 3, "warmup/loss": 2.8 * math.exp(-s / 60) + 0.4} for s in range(1, 321)]
    (directory / "warmup.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    rows = [{"step": 0, "time": 1e9 + 200, "eval/pass@1": 0.31, "eval/sums/pass@1": 0.31, "time/eval_s": 4.0}]
    rows += [metrics_row(step, n, prompts, steps, gain) for step in range(1, done + 1)]
    if done > 6:
        rows[5]["groups/starved"] = 1
        rows[6]["optim/skipped"] = 1
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= done))
    for step in {1, 10, 20, 30, 40, 50, 60} & set(range(done + 1)):
        write_rollouts(directory / "rollouts", step, n, gain * step / steps, hostile)
    return directory


def write_served(directory: Path) -> None:
    """A short run with rollout servers, nothing of which failed."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"rollout": {"engine": "sglang"}}))
    rates = {"samples_per_s": 30.0, "server_tokens_per_s": 110.0, "publish_s": 0.2, "cache_hit_rate": 0.87}
    counts = {"running_mean": 20.0, "queued_mean": 0.0, "retries": 0.0, "dropped": 0.0, "servers": 2.0}
    engine = {f"engine/{name}": value for name, value in (rates | counts).items()}
    spent = {"time/rollout_s": 3.0, "time/update_s": 1.0, "time/step_s": 4.5}
    rows = [{"step": 0, "time": 1e9, "eval/pass@1": 0.1}]  # of the weights that it began with
    rows += [{"step": step, "time": 1e9 + step, "reward/mean": 0.1 * step} | engine | spent for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_row(step: int, n: int, prompts: int, steps: int, gain: float) -> dict:
    """One plausible object of metrics.jsonl."""
    reward = 0.31 + gain * (1 - math.exp(-3 * step / steps)) + random.gauss(0, 0.015)
    zero, one = 0.35 * (1 - reward) + random.uniform(0, 0.05), 0.5 * reward**2
    rollout, update = 2.1 + 0.002 * step + random.uniform(0, 0.3), 1.4 + random.uniform(0, 0.2)
    times = {"rollout": rollout, "reward": 0.05, "pack": 0.08, "score": 0.4, "update": update, "publish": 0.02}
    if step == 1:
        times |= {"rollout": 21.0, "update": 33.0}
    if step % 10 == 0:
        times |= {"eval": 4.0, "checkpoint": 0.7}
    row = {
        "step": step,
        "time": 1e9 + 200 + 5 * step,
        "reward/mean": reward,
        "source/sums/reward": reward,
        "source/sums/kept": 1 - zero - one,
        "source/words/reward": reward / 2,
        "source/words/kept": zero,
        "groups/generated": prompts * 2,
        "groups/pass_rate": 1 - zero - one,
        "groups/all_zero": zero,
        "groups/all_one": one,
        "groups/informative": 1 - zero - one,
        "samples/generated": prompts * n * 2,
        "length/mean": 9 + 4 * math.exp(-step / 20) + random.gauss(0, 0.1),
        "length/truncated_rate": 0.08 * math.exp(-step / 8),
        "policy/entropy": 0.9 * math.exp(-step / 40) + random.gauss(0, 0.02),
        "policy/kl_ref": 0.002 * step + random.uniform(0, 0.004),
        "policy/clip_high": random.uniform(0, 0.01),
        "mismatch/kl": random.uniform(0, 3e-6),
        "optim/grad_norm": None if step == 6 else random.lognormvariate(-1, 0.4),
        "throughput/tokens_per_s": 9000 + 30 * step + random.gauss(0, 250),
        "memory/rss_gib": 1.1 + 0.02 * math.log(step),
        **{f"time/{k}_s": v for k, v in times.items()},
        "time/step_s": sum(times.values()) + 0.12,
    }
    if step % 10 == 1:  # where rollouts branch, less is left over with more rollouts
        row["mass_balance/unsampled"] = 0.3 / math.sqrt(n) * math.exp(-step / 80) + random.uniform(0, 0.005)
        row["mass_balance/sign_certain"] = 1 - 2 * row["mass_balance/unsampled"]
        row["mass_balance/mood_abs"] = 0.2 + random.uniform(0, 0.02)
        row["mass_balance/unsampled_2"] = row["mass_balance/unsampled"] ** 2 / 20
        row["mass_balance/gain"] = 0.08 * math.exp(-step / 80) + random.uniform(0, 0.005)
        row["mass_balance/at_risk"] = row["mass_balance/unsampled"] / 20
    if step % 10 == 0:
        row["eval/pass@1"] = row["eval/sums/pass@1"] = min(reward + 0.01, 1.0)
    return row


def write_rollouts(directory: Path, step: int, n: int, skill: float, hostile: bool) -> None:
    """Rollouts of 12 sums; every other prompt has a hostile response if asked for."""
    directory.mkdir(exist_ok=True)
    with gzip.open(directory / f"step_{step:06d}.jsonl.gz", "wt", encoding="utf-8") as file:
        for p in range(12):
            a, b = random.randint(100, 999), random.randint(100, 999)
            chance = min(0.97, max(0.02, p / 14 + skill))
            right = [random.random() < chance for _ in range(n)]
            mean = sum(right) / n
            outcome = "trained" if 0 < mean < 1 else "filtered: equal rewards"
            for i, good in enumerate(right):
                answer = a + b if good else a + b + random.choice([-100, -10, -1, 1, 10, 90])
                text = f"{a} + {b}\n= {a // 100 * 100} + {b // 100 * 100} + {a % 100 + b % 100}\n#### {answer}"
                lost = i == n - 1 and p == 5
                row = {
                    "step": step,
                    "prompt_id": f"sums/{step}-{p}",
                    "source": "sums",
                    "verifier": "numeric",
                    "prompt": f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n",
                    "gold": str(a + b),
                    "sample": i,
                    "seed": 2**62 + i,
                    "response": HOSTILE if hostile and p % 2 and i == 0 else text,
                    "n_tokens": len(text) // 2,
                    "finish": "abort" if lost else "length" if i % 11 == 10 else "stop",
                    "status": "aborted" if lost else "truncated" if i % 11 == 10 else "ok",
                    "reward": None if lost else float(good),
                    "shaped_reward": None if lost else float(good),
                    "advantage": 0.0 if lost else round(good - mean, 4),
                    "mean_logp": -random.random(),
                    "weight_version": step - 1,
                    "outcome": "excluded: aborted" if lost else outcome,
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write_run(out / "quickstart-n16", n=16, prompts=64, seed=0, hostile=True)
    write_run(out / "quickstart-n512", n=512, prompts=16, seed=1, gain=0.38, done=41)
