"""An evaluation with files: identity, finished prompts, scores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from brorl_jax import assemble, evaluate, scores
from brorl_jax import config as config_lib
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.metrics import plain, write_jsonl
from brorl_jax.models import sharding
from brorl_jax.progress import Progress
from brorl_jax.scores import Row
from brorl_jax.types import Prompt

# What decides a row besides the prompts; how it is computed (engine, mesh, grading) may change between two sittings.
IDENTITY = ("seed", "model.path", "model.revision", "model.new", "data.eval", "data.system_prompt", "eval.samples",
            "eval.temperature", "eval.top_p", "rollout.max_tokens", "rollout.stop_ids")  # fmt: skip
COLUMNS = ("prompts", "pass@1", "stderr", "length", "length_correct", "truncated_rate")

Checkpoint = tuple[Path, str]
"""A run's directory, and a step, ``last`` or ``best``."""


def run(
    config: Config, checkpoint: Checkpoint | None, out: Path | None = None, check: Callable[[], None] = lambda: None
) -> Path:
    """Evaluates the model of ``config``, or a checkpoint of it, and returns ``<out>/scores.json``.

    ``out`` may be left out for a checkpoint: ``<workdir>/eval/at_<step>``.

    Raises:
        UserError: Something is missing, or ``out`` holds another evaluation.
    """
    config = config_lib.freeze(config)
    step = _step(*checkpoint) if checkpoint else 0
    if out is None:
        if checkpoint is None:
            raise ValueError("an evaluation of a model needs a folder for its results")
        out = checkpoint[0] / "eval" / f"at_{step:06d}"
    out.mkdir(parents=True, exist_ok=True)
    model = assemble.build_model(config, checkpoint[0] if checkpoint else out)
    try:
        prompts = assemble.held_out_prompts(config, model.tokenizer)
        rows = _resume(out, _identity(config, checkpoint, step), prompts)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    done = {row.prompt_id for row in rows}
    total = sum(len(chosen) for chosen in prompts.values())
    if len(done) < total:
        params = model.weights() if checkpoint is None else _restored(checkpoint[0], step, model)
        engine = assemble.build_engine(config, model, workdir=out, check=check)
        with (
            contextlib.closing(engine),  # servers that it started, perhaps
            assemble.build_grader(config) as grader,
            open(out / "prompts.jsonl", "a", encoding="utf-8") as file,
            Progress(total, start=len(done), title="evaluate", fields=(), every=max(1, total // 20)) as progress,
        ):
            engine.publish(params, 0)
            del params
            finished = evaluate.evaluate(
                engine,
                model.tokenizer,
                prompts,
                samples=config.eval.samples,
                sampling=assemble.eval_sampling(config, model.tokenizer),
                grader=grader,
                seed=config.seed,
                skip=done,
                check=check,
            )
            for row in finished:
                print(json.dumps(row.to_json()), file=file, flush=True)
                rows.append(row)
                progress.update(len(rows), {})
            for message in grader.pop_errors():
                progress.note(f"not graded: {message}")
    return _write_scores(config, rows, out)


def _step(workdir: Path, which: str) -> int:
    if not (workdir / "checkpoints").is_dir():  # opening them would make the folder
        raise UserError(f"{workdir} has no checkpoints; give the --workdir of a run")
    checkpointer = Checkpointer(workdir, keep=1)
    steps, best = checkpointer.steps, checkpointer.best
    checkpointer.close()
    step = {"last": max(steps, default=None), "best": best}[which] if not which.isdigit() else int(which)
    if step is None or step not in steps:
        raise UserError(
            f"{workdir} has no checkpoint --step={which}; there are: {', '.join(map(str, steps)) or 'none'}"
        )
    return step


def _restored(workdir: Path, step: int, model: assemble.Model) -> Any:
    checkpointer = Checkpointer(workdir, keep=1)
    where = sharding.weight_shardings(model.mesh, model.cfg)
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.shapes, where)
    try:
        return checkpointer.restore_params(placed, step)
    except ValueError as error:
        raise UserError(f"cannot read checkpoint {step} of {workdir}: {error}") from error
    finally:
        checkpointer.close()


def _identity(config: Config, checkpoint: Checkpoint | None, step: int) -> dict[str, Any]:
    def value(path: str) -> Any:
        node: Any = config
        for part in path.split("."):
            node = node[part]
        return node.to_dict() if hasattr(node, "to_dict") else node

    where = {} if checkpoint is None else {"checkpoint": str(checkpoint[0].resolve()), "step": step}
    return json.loads(json.dumps({path: value(path) for path in IDENTITY} | where))


def _resume(out: Path, identity: dict[str, Any], prompts: Mapping[str, Sequence[Prompt]]) -> list[Row]:
    """The rows already in ``out``, each once, of prompts that are asked for."""
    path = out / "evaluation.json"
    if path.exists():
        try:
            saved = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} can't be read ({error}); choose another --out") from error
        if different := [key for key in {**identity, **saved} if identity.get(key) != saved.get(key)]:
            raise UserError(f"{out} holds an evaluation with another {', '.join(different)}; choose another --out")
    evaluate.write_json(path, identity)
    if not (out / "prompts.jsonl").exists():
        return []
    wanted = {p.id for chosen in prompts.values() for p in chosen}
    rows = {row.prompt_id: row for row in evaluate.read(out) if row.prompt_id in wanted}
    # A kill may have left half a line: rewritten, so that the next line begins on one of its own.
    write_jsonl(out / "prompts.jsonl", (row.to_json() for row in rows.values()))
    return list(rows.values())


def _write_scores(config: Config, rows: list[Row], out: Path) -> Path:
    headings = {name: source.heading for name, source in config.data.eval.items()}
    metrics = scores.metrics(rows, headings)
    table = markdown(metrics, list(headings), sorted({h for h in headings.values() if h}))
    (out / "scores.md").write_text(table)
    print(table)
    return evaluate.write_json(out / "scores.json", {k: plain(v) for k, v in metrics.items()})


def markdown(metrics: Mapping[str, float], sources: Sequence[str], headings: Sequence[str]) -> str:
    """One line per benchmark, then the averages."""
    most = max((int(k.rpartition("@")[2]) for k in metrics if "/pass@" in k), default=1)
    columns = [*COLUMNS[:3], *([f"pass@{most}"] if most > 1 else []), *COLUMNS[3:]]
    lines = [f"| benchmark | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]

    def line(name: str, prefix: str) -> str:
        return f"| {name} | {' | '.join(_cell(c, metrics.get(f'{prefix}/{c}')) for c in columns)} |"

    lines += [line(source, f"eval/{source}") for source in sources]
    firsts = list(dict.fromkeys(h.split("/")[0] for h in headings))
    for heading in dict.fromkeys([*firsts, *headings]):
        lines.append(line(f"**{heading}**", f"eval/average/{heading}"))
        if f"eval/average/{heading}/plain/pass@1" in metrics:
            lines.append(line(f"**{heading}**, mean of its headings", f"eval/average/{heading}/plain"))
    lines.append(line("**all**", "eval"))
    return "\n".join(lines) + "\n"


def _cell(column: str, value: float | None) -> str:
    if value is None or value != value:
        return ""
    if column in ("prompts", "length", "length_correct"):
        return f"{value:,.0f}"
    return f"{100 * value:.2f} %"
