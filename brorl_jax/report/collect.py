"""Reads run directories for the report: whatever is there, whole or partial, of finished, stopped or running runs."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brorl_jax.metrics import read_jsonl

MAX_POINTS = 3000  # per curve; longer runs are thinned
BUDGET = 3_000_000  # bytes of rollouts in a report, over all its runs
STEPS = 5  # steps shown per run
PROMPTS = 8  # prompts shown per step
ROLLOUTS = 24  # rollouts shown per prompt
READ = 32_000_000  # characters read of one rollout file
HEAD, TAIL = 4000, 1500  # characters kept of a long text

EVENTS = (
    ("groups/starved", "starved: trained on fewer groups than asked for"),
    ("optim/skipped", "update skipped: gradient norm not finite"),
    ("engine/deaths", "a server was taken out of use"),
    ("engine/dropped", "samples that no server delivered"),
    ("samples/grader_error", "answers whose verifier failed"),
    ("samples/timeout", "answers whose verifier took too long"),
    ("reference/reset", "reference policy reset to the current policy"),
)

Row = dict[str, Any]


def collect(directories: Sequence[str | os.PathLike[str]], budget: int = BUDGET) -> list[Row]:
    """One JSON-able object per run: name, config, metrics, warmup, facts, events, notes and a choice of rollouts.

    Raises:
        ValueError: a directory is not a run's.
    """
    runs = [collect_run(Path(d), budget // max(len(directories), 1)) for d in directories]
    names = [run["name"] for run in runs]
    for run, directory in zip(runs, directories, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = str(directory).rstrip("/")
    return runs


def collect_run(directory: Path, budget: int) -> Row:
    """The report's data of one run (see ``collect``); ``budget`` bytes of rollouts."""
    check_run(directory)
    notes: list[str] = []
    rows = _read_metrics(directory / "metrics.jsonl", notes)
    warmup = _read_metrics(directory / "warmup.jsonl", notes)
    config = _read_config(directory / "config.json", notes)
    add_axes(rows)
    add_axes(warmup)
    facts = run_facts(rows, warmup, config)
    events = find_events(rows)
    superseded, _ = read_jsonl(directory / "metrics.superseded.jsonl")
    again = sorted({row["step"] for row in superseded if isinstance(row.get("step"), int)})
    if again:
        events.append({"step": again[0], "text": f"resumed; {len(again)} steps were trained again"})
    events.sort(key=lambda event: event["step"])
    prompts, shown = choose_rollouts(directory / "rollouts", budget, notes)
    return {
        "name": directory.resolve().name,
        "config": flatten(config),
        "facts": facts,
        "events": events,
        "metrics": columns(rows, notes),
        "warmup": columns(warmup, notes),
        "prompts": prompts,
        "shown": shown,
        "notes": notes,
    }


def check_run(directory: Path) -> None:
    """Raises ``ValueError`` unless ``directory`` looks like a run's."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the --workdir of a run")
    if not any((directory / name).exists() for name in ("config.json", "metrics.jsonl", "warmup.jsonl")):
        inside = ", ".join(sorted(p.name for p in directory.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"{directory} is not a run directory: it has neither config.json nor metrics.jsonl (found: {inside}); "
            "give the --workdir of a run"
        )


def _read_metrics(path: Path, notes: list[str]) -> list[Row]:
    rows, torn = read_jsonl(path)
    if torn:
        notes.append(f"{path.name}: {len(torn)} unreadable line(s) left out")
    return sorted((r for r in rows if isinstance(r.get("step"), int)), key=lambda row: row["step"])


def _read_config(path: Path, notes: list[str]) -> Row:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config, problem = {}, "config.json is missing"
    except (ValueError, OSError) as error:
        config, problem = {}, f"config.json cannot be read: {error}"
    else:
        problem = "" if isinstance(config, dict) else "config.json holds no object"
    if problem:
        notes.append(problem)
    return config if isinstance(config, dict) else {}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested mappings as one with dotted keys; sequences stay values."""
    flat: Row = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: Any) -> float | None:
    """The value if it is a finite number."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def add_axes(rows: list[Row]) -> None:
    """Adds the cumulative x axes ``x/samples``, ``x/tokens`` (of responses) and ``x/wall`` (seconds).

    The wall clock is the sum of what the steps report about themselves, so the pause before a resume does not count;
    where they say nothing, the time between lines.
    """
    samples = tokens = wall = 0.0
    before: float | None = None
    for row in rows:
        generated = number(row.get("samples/generated")) or 0.0
        samples += generated
        counted = number(row.get("tokens/generated"))
        tokens += generated * (number(row.get("length/mean")) or 0.0) if counted is None else counted
        now = number(row.get("time"))
        phases = [number(v) or 0.0 for k, v in row.items() if k.startswith("time/") and k != "time/step_s"]
        own = number(row.get("time/step_s")) or sum(phases)
        if own:
            wall += own
        elif now is not None and before is not None:
            wall += max(now - before, 0.0)
        before = now if now is not None else before
        row |= {"x/samples": samples, "x/tokens": tokens, "x/wall": wall}


def series(rows: Iterable[Row], key: str) -> list[float]:
    """The finite values of a metric, in order."""
    return [v for row in rows if (v := number(row.get(key))) is not None]


def run_facts(rows: list[Row], warmup: list[Row], config: Mapping[str, Any]) -> Row:
    """What the head of a report and the text summary say about a run; absent values are ``None``."""
    reward, held_out = series(rows, "reward/mean"), series(rows, "eval/pass@1")
    window = max(1, min(5, len(reward) // 4))
    train = config.get("train")
    total = train.get("steps") if isinstance(train, Mapping) else None
    step = rows[-1]["step"] if rows else 0
    finished = isinstance(total, int) and step >= total
    state = "finished" if finished else "stopped early or still running" if rows else "no step finished yet"
    end = rows[-1] if rows else {}
    return {
        "title": config.get("name") or None,
        "state": state,
        "finished": finished,
        "step": step,
        "total": total,
        "wall": end.get("x/wall"),
        "warmup_wall": warmup[-1]["x/wall"] if warmup else None,
        "warmup_steps": warmup[-1]["step"] if warmup else None,
        "samples": end.get("x/samples"),
        "tokens": end.get("x/tokens"),
        "reward": [sum(reward[:window]) / window, sum(reward[-window:]) / window] if reward else None,
        "held_out": [held_out[0], held_out[-1], max(held_out)] if held_out else None,
        "evaluations": len(held_out),
    }


def find_events(rows: Iterable[Row]) -> list[Row]:
    """The steps at which something happened that a reader of the curves should know."""
    events = []
    for row in rows:
        for key, text in EVENTS:
            if count := number(row.get(key)):
                events.append({"step": row["step"], "text": f"{text} ({count:g} times)" if count > 1 else text})
    return events


def columns(rows: list[Row], notes: list[str]) -> dict[str, list[Any]]:
    """Rows as one list per key (6 significant digits, ``None`` where absent); long runs are thinned evenly.

    A row with an evaluation is always kept: those are few and each cost minutes.
    """
    every = math.ceil(len(rows) / MAX_POINTS)
    if every > 1:
        last = len(rows) - 1
        rows = [r for i, r in enumerate(rows) if i % every == 0 or i == last or "eval/pass@1" in r]
        notes.append(f"curves show every {every}th step of a long run")
    keys = dict.fromkeys(key for row in rows for key in row if key != "time")
    table: dict[str, list[Any]] = {}
    for key in keys:
        values = [number(row.get(key)) for row in rows]
        if any(v is not None for v in values):
            table[key] = [float(f"{v:.6g}") if isinstance(v, float) else v for v in values]
    return table


def choose_rollouts(directory: Path, budget: int, notes: list[str]) -> tuple[list[Row], Row]:
    """Prompts with rollouts from evenly spaced steps (first and last included), and what was left out.

    Per step, prompts spread from the lowest to the highest mean reward; per prompt the rollouts with the highest and
    the lowest rewards. Texts are cut in the middle. Stops adding prompts where the byte budget ends.
    """
    files = sorted(directory.glob("step_*.jsonl.gz"))
    steps = _spread(files, STEPS)
    chosen: list[Row] = []
    used = cut = 0
    for place, path in enumerate(steps):
        allowed = (budget - used) // (len(steps) - place)
        groups, complete = read_groups(path, notes)
        groups.sort(key=lambda g: g["mean_reward"])
        start = used
        picks = _spread(groups, PROMPTS)
        for pick in picks:
            group = _shrink(pick)
            size = len(json.dumps(group))
            if used - start + size > allowed:
                cut += 1
                continue
            used += size
            chosen.append(group | {"of_prompts": len(groups), "complete": complete})
    return chosen, {"steps": len({g["step"] for g in chosen}), "of_steps": len(files), "cut": cut, "bytes": used}


def _spread(items: list[Any], count: int) -> list[Any]:
    """``count`` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def read_groups(path: Path, notes: list[str]) -> tuple[list[Row], bool]:
    """The groups of one rollout file, and whether all of it was read (it stops after ``READ`` characters)."""
    groups: dict[Any, Row] = {}
    read, complete = 0, True
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                read += len(line)
                if read > READ and groups:
                    complete = False
                    break
                row = json.loads(line)
                group = groups.setdefault(row["prompt_id"], _new_group(row))
                group["rollouts"].append({k: v for k, v in row.items() if k not in group})
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        notes.append(f"rollouts/{path.name} is damaged; what could be read of it is shown ({type(error).__name__})")
        complete = False
    for group in groups.values():
        rewards = series(group["rollouts"], "reward")
        group["n"] = len(group["rollouts"])
        group["mean_reward"] = sum(rewards) / len(rewards) if rewards else -1.0
        group["solved"] = sum(r >= 1.0 for r in rewards)
        group["levels"] = {
            "high": group["solved"],
            "mid": sum(0.0 < r < 1.0 for r in rewards),
            "low": sum(r <= 0.0 for r in rewards),
            "none": group["n"] - len(rewards),
        }
    return list(groups.values()), complete


def _new_group(row: Row) -> Row:
    keys = ("step", "prompt_id", "source", "verifier", "prompt", "gold", "weight_version")
    return {key: row.get(key) for key in keys} | {"rollouts": []}


def _shrink(group: Row) -> Row:
    """The group as the page shows it: equal rollouts merged, sorted by reward, the middle left out, long texts cut."""
    merged: dict[tuple[Any, ...], Row] = {}
    for row in group["rollouts"]:
        same = tuple(str(row.get(key)) for key in ("response", "reward", "advantage", "finish", "status", "n_tokens"))
        merged.setdefault(same, row | {"samples": []})["samples"].append(row.get("sample"))
    rollouts = sorted(merged.values(), key=lambda r: -(number(r.get("reward")) or 0.0))
    group = group | {"distinct": len(rollouts)}
    if len(rollouts) > ROLLOUTS:
        rollouts = rollouts[: ROLLOUTS // 2] + rollouts[-ROLLOUTS // 2 :]
    small = [r | {"response": cut_text(str(r.get("response") or "")), "seed": str(r.get("seed"))} for r in rollouts]
    return group | {"prompt": cut_text(str(group["prompt"] or "")), "rollouts": small}


def cut_text(text: str) -> str:
    """Long texts lose their middle, and say how much of it."""
    left_out = len(text) - HEAD - TAIL
    return text if left_out <= 0 else f"{text[:HEAD]}\n[… {left_out:,} characters left out …]\n{text[-TAIL:]}"
