"""The checks behind ``config.validate``: every field by itself (``config_fields.py``), then impossible combinations.

Each check raises ``ConfigError`` with one line: the field, its value, what is wrong and what to do. Nothing is loaded;
the one file looked at is ``<model.path>/config.json``, where it is a local directory, for the context length.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from brorl_jax import config as fields
from brorl_jax import config_fields
from brorl_jax.config import Config
from brorl_jax.config_fields import categories, fail


def check(config: Config, purpose: str = "train") -> None:
    """Runs every check in order, cheapest first; raises ``ConfigError`` at the first problem."""
    config_fields.check(config)
    _check_model(config)
    _check_sglang(config)
    if purpose == "evaluate":
        _check_evaluation(config)
        return
    _check_data(config)
    _check_rollout(config)
    _check_algorithm(config)
    _check_reference_and_shaping(config)
    _check_batch(config)


def _context(path: str) -> int | None:
    """The context of a local model directory (``max_position_embeddings``); None where it cannot be known here."""
    file = pathlib.Path(path) / "config.json"
    if not path or not file.is_file():
        return None
    try:
        context = json.loads(file.read_text())["max_position_embeddings"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # loading the model reports a broken file properly
    return context if isinstance(context, int) else None


def _check_model(config: Config) -> None:
    new = config.model.new
    if not config.model.path:
        if new.heads % new.kv_heads:
            fail("model.new.kv_heads", new.kv_heads, f"must divide model.new.heads = {new.heads}")
        if new.head_dim < 2 or new.head_dim % 2:
            fail("model.new.head_dim", new.head_dim, "must be even: rotary embeddings turn pairs")
        if new.vocab_size < 259:
            fail("model.new.vocab_size", new.vocab_size, "must be at least 259: 256 bytes and 3 special tokens")
        if config.model.revision:
            fail("model.revision", config.model.revision, "a revision needs model.path; a new model has none")
    context, length = _context(config.model.path), config.data.max_prompt_tokens + config.rollout.max_tokens
    if context is not None and length > context:
        fail(
            "rollout.max_tokens",
            config.rollout.max_tokens,
            f"with data.max_prompt_tokens = {config.data.max_prompt_tokens} makes {length} tokens, more than the "
            f"model's context of {context}; lower one of them",
        )


def _rows(entry: Config) -> dict[Any, tuple[float, float]]:
    """What is read -> (first item, end): sources that read the same with overlapping ranges share prompts."""
    if entry.kind == "reasoning_gym":
        return {_task(entry.task, entry.params): (entry.seed, entry.seed + entry.size)}
    if entry.kind == "reasoning_gym_category":
        tasks = categories()[entry.category]
        items = -(-entry.size // len(tasks))  # of each task
        return {_task(task, entry.params.get(task, {})): (entry.seed, entry.seed + items) for task in tasks}
    if entry.kind == "instructions":
        return {(entry.kind,): (entry.seed, entry.seed + entry.size)}
    read = (entry.kind, entry.path, *(entry.get(key, "") for key in ("name", "split", "revision")))
    return {read: (entry.start, entry.start + entry.size if entry.size else math.inf)}


def _task(name: str, params: Any) -> tuple[str, ...]:
    return "reasoning_gym", name, json.dumps(dict(params), sort_keys=True, default=dict)


def _check_evaluation(config: Config) -> None:
    if not config.data.eval:
        fail("data.eval", {}, "nothing to evaluate; add a source with brorl_jax.config.source(kind, ...)")


def _check_data(config: Config) -> None:
    data = config.data
    if not data.train:
        fail("data.train", {}, "no source of prompts; add one with brorl_jax.config.source(kind, ...)")
    if config.warmup.steps and not data.warmup:
        fail("warmup.steps", config.warmup.steps, "the warm start has no data; add a source to data.warmup or set 0")
    if config.warmup.until and not data.eval:
        fail("warmup.until", config.warmup.until, "nothing to measure it on; add a source to data.eval or set 0")
    if config.eval.every and not data.eval:
        fail("eval.every", config.eval.every, "nothing to evaluate; add a source to data.eval or set 0")
    trained = [
        (f"data.{stage}.{other}", twin.kind, *item)
        for stage in ("train", "warmup")
        for other, twin in data[stage].items()
        for item in _rows(twin).items()
    ]
    for name, entry in data.eval.items():
        held_out = _rows(entry)
        for twin, kind, read, (begin, stop) in trained:
            first, end = held_out.get(read, (0, 0))
            if first < stop and begin < end:
                key = "seed" if entry.kind in fields.PROCEDURAL else "start"
                task = f" of {read[1]}" if "_category" in entry.kind + kind else ""
                problem = f"shares items {max(first, begin):g} to {min(end, stop):g}{task} with {twin}"
                problem += ", so they are not held out; keep the ranges apart"
                fail(f"data.eval.{name}.{key}", entry[key], problem)


def _check_rollout(config: Config) -> None:
    rollout, updates = config.rollout, config.algo.updates_per_step
    if rollout.n < 2:
        fail(
            "rollout.n",
            rollout.n,
            f"advantage {config.algo.advantage!r} compares the samples of a prompt; use 2 or more",
        )
    if rollout.prompts_per_step % updates:
        fail(
            "algo.updates_per_step",
            updates,
            f"must divide rollout.prompts_per_step = {rollout.prompts_per_step}: mini-batches are made of whole groups",
        )
    if not rollout.temperature > 0:
        fail("rollout.temperature", rollout.temperature, "training rollouts are sampled; use a temperature above 0")
    for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if rollout[key] != neutral:
            fail(
                f"rollout.{key}",
                rollout[key],
                f"training rollouts need the full distribution, otherwise engine and "
                f"trainer disagree on every token; use {neutral} (evaluation may truncate)",
            )
    stall = config.train.stall_timeout_s
    for key in ("timeout_s", "start_timeout_s", "update_timeout_s"):  # the longest waits without a sign of progress
        if rollout.engine == "sglang" and 0 < stall <= rollout.sglang[key]:
            fail("train.stall_timeout_s", stall, f"must be above rollout.sglang.{key} = {rollout.sglang[key]:g}, or 0")
    for token in rollout.stop_ids:
        if type(token) is not int or token < 0:
            fail("rollout.stop_ids", tuple(rollout.stop_ids), "must hold token ids, whole numbers from 0")


def _check_sglang(config: Config) -> None:
    from brorl_jax.rollout.sglang import checks

    for path, value, problem in checks.problems(config):
        fail(path, value, problem)


def _check_algorithm(config: Config) -> None:
    algo = config.algo
    batch_normalised = algo.advantage == "reinforce_pp_baseline"
    if batch_normalised and algo.normalise == "none":
        problem = (
            "'reinforce_pp_baseline' normalises over the batch; use 'tokens' or 'sequences' (without, it is 'dr_grpo')"
        )
        fail("algo.normalise", "none", problem)
    if not batch_normalised and algo.normalise != "none":
        fail("algo.normalise", algo.normalise, f"advantage {algo.advantage!r} has no such step; use 'none'")
    if algo.dual_clip and not algo.dual_clip > 1:
        fail("algo.dual_clip", algo.dual_clip, "must be above 1 (it caps the ratio of bad samples), or 0 for off")
    if algo.dual_clip and algo.loss not in ("ppo_clip", "gspo"):
        fail("algo.dual_clip", algo.dual_clip, f"belongs to losses 'ppo_clip' and 'gspo', not {algo.loss!r}; set 0")
    if algo.kl.coef > 0 and algo.kl.estimator == "k1":
        fail("algo.kl.estimator", "k1", "its gradient is zero in expectation inside a loss; use 'k2' or 'k3'")
    kind, low, high = algo.mismatch.kind, algo.mismatch.low, algo.mismatch.high
    if not low < high:
        fail("algo.mismatch.low", low, f"must be below algo.mismatch.high = {high}")
    if kind in ("mask", "sequence_mask") and not low < 1 < high:
        fail("algo.mismatch.low", low, f"the kept interval [{low}, {high}] must contain 1 (no mismatch)")
    if kind == "none" and config.rollout.overlap:
        problem = "samples of older weights need a correction: set algo.mismatch.kind, to 'tis' say, or False"
        fail("rollout.overlap", True, problem)
    if kind == "tis" and high < 1:
        fail("algo.mismatch.high", high, "truncated importance sampling needs a cap of at least 1")


def _check_reference_and_shaping(config: Config) -> None:
    reference, shaping = config.algo.reference, config.shaping
    for key in ("every", "kl_spike", "stall"):
        if reference[key] and not config.algo.kl.coef:
            fail(
                f"algo.reference.{key}",
                reference[key],
                "there is no reference policy to reset while algo.kl.coef "
                "is 0; set algo.kl.coef or switch the reset off with 0",
            )
    for path, evaluations in (
        ("algo.reference.stall", reference.stall),
        ("train.stop_stalled", config.train.stop_stalled),
    ):
        if evaluations and not config.eval.every:
            fail(path, evaluations, "counts evaluations; set eval.every or 0")
    if shaping.overlong_buffer > config.rollout.max_tokens:
        fail(
            "shaping.overlong_buffer",
            shaping.overlong_buffer,
            f"must not exceed rollout.max_tokens = {config.rollout.max_tokens}",
        )
    if bool(shaping.overlong_buffer) != bool(shaping.overlong_penalty):
        key = "overlong_penalty" if shaping.overlong_buffer else "overlong_buffer"
        fail(f"shaping.{key}", shaping[key], "overlong_buffer and overlong_penalty go together; set both or neither")
    if shaping.cosine_coef:
        if shaping.cosine_on < 1 or shaping.cosine_off < 0:
            key = "cosine_on" if shaping.cosine_on < 1 else "cosine_off"
            fail(
                f"shaping.{key}",
                shaping[key],
                "the cosine reward is on for cosine_on >= 1 steps, then off for cosine_off >= 0",
            )
        if not shaping.cosine_min < shaping.cosine_max:
            fail("shaping.cosine_min", shaping.cosine_min, f"must be below cosine_max = {shaping.cosine_max}")


def _check_batch(config: Config) -> None:
    batch, mesh = config.batch, config.mesh
    if config.rollout.max_tokens > batch.row_tokens:
        fail(
            "batch.row_tokens",
            batch.row_tokens,
            f"a response of rollout.max_tokens = {config.rollout.max_tokens} must fit one row",
        )
    shards = mesh.data * mesh.fsdp
    if batch.slots % shards:
        fail(
            "batch.slots",
            batch.slots,
            f"slots are split over mesh.data * mesh.fsdp = {shards} devices; use a multiple of it",
        )
    if batch.row_tokens % mesh.context:
        fail(
            "batch.row_tokens",
            batch.row_tokens,
            f"a row is split over mesh.context = {mesh.context} devices; use a multiple of it",
        )
    if config.model.attention == "cudnn" and mesh.context > 1:
        fail("mesh.context", mesh.context, "attention 'cudnn' takes whole rows; use model.attention = 'blockwise'")
    if config.model.attention == "cudnn" and config.model.compute_dtype != "bfloat16":
        fail("model.attention", "cudnn", "needs model.compute_dtype = 'bfloat16'; else use 'blockwise'")
