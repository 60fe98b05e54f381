"""The checks behind ``config.validate``: unknown keys, types, names, ranges, impossible combinations.

Each check raises ``ConfigError`` with one line: the field, its value, what is wrong and what to do. Nothing is loaded;
the one file looked at is ``<model.path>/config.json``, where it is a local directory, for the context length.
"""

from __future__ import annotations

import difflib
import json
import math
import pathlib
import re
from collections.abc import Collection, Iterable
from typing import Any

from ml_collections import ConfigDict

from brorl_jax import config as fields
from brorl_jax.config import Config, ConfigError

STAGES = ("train", "eval", "warmup")

# Names a field may hold.
CHOICES = {
    "model.compute_dtype": fields.DTYPES,
    "model.param_dtype": fields.DTYPES,
    "model.remat": fields.REMAT,
    "model.attention": fields.ATTENTIONS,
    "optim.moment_dtype": fields.DTYPES,
    "model.new.family": fields.NEW_FAMILIES,
    "rollout.engine": fields.ENGINES,
    "grading.sandbox": fields.SANDBOXES,
    "algo.advantage": fields.ADVANTAGES,
    "algo.normalise": fields.NORMALISERS,
    "algo.loss": fields.LOSSES,
    "algo.aggregation": fields.AGGREGATIONS,
    "algo.kl.estimator": fields.KL_ESTIMATORS,
    "algo.mismatch.kind": fields.MISMATCH_KINDS,
    "optim.lr_rule": fields.LR_RULES,
}


def _paths(text: str) -> list[str]:
    return text.split()


# Bounds of numbers.
AT_LEAST_ONE = _paths(
    """model.head_chunk model.attention_block model.new.hidden model.new.layers model.new.heads model.new.kv_heads
    model.new.ffn data.max_prompt_tokens grading.cache
    rollout.prompts_per_step rollout.max_tokens rollout.local.rows rollout.local.chunk filter.max_generation_batches
    rollout.sglang.in_flight rollout.sglang.attempts rollout.sglang.dead_after rollout.sglang.launch.port
    rollout.sglang.launch.tp rollout.sglang.launch.dp
    algo.updates_per_step optim.base_samples batch.slots batch.rows batch.row_tokens train.steps
    warmup.batch warmup.every
    diagnostics.min_visits diagnostics.max_depth
    eval.samples checkpoint.keep log.every mesh.data mesh.fsdp mesh.context mesh.tensor"""
)
AT_LEAST_ZERO = _paths(
    """seed grading.workers grading.memory_gib rollout.min_p algo.advantage_clip algo.dual_clip algo.kl.coef
    algo.mismatch.low algo.mismatch.stop_above algo.reference.every algo.reference.kl_spike algo.reference.stall
    shaping.overlong_buffer shaping.overlong_penalty shaping.cosine_coef optim.warmup_steps optim.weight_decay
    optim.clip_norm warmup.steps train.stop_stalled eval.every eval.temperature eval.max_prompts checkpoint.every
    diagnostics.mass_balance_every diagnostics.exact_nodes rollout.sglang.launch.servers"""
)
ABOVE_ZERO = _paths(
    """grading.deadline_factor optim.lr optim.eps warmup.lr algo.kl.clamp algo.mismatch.high algo.eps_low
    algo.eps_high rollout.sglang.timeout_s rollout.sglang.start_timeout_s rollout.sglang.update_timeout_s"""
)
# low, whether low itself is allowed, high, whether high itself is allowed
BETWEEN = {
    "eval.top_p": (0.0, False, 1.0, True),
    "filter.min_valid": (0.0, False, 1.0, True),
    "filter.oversample": (1.0, True, 2.0, True),  # beyond 2 a group could wait for more than one update
    "shaping.stop_properly": (0.0, True, 1.0, True),
    "rollout.sglang.launch.mem_fraction": (0.0, False, 1.0, False),
    "algo.eps_low": (0.0, False, 1.0, True),
    "warmup.until": (0.0, True, 1.0, True),
    "optim.b1": (0.0, True, 1.0, False),
    "optim.b2": (0.0, True, 1.0, False),
}


def check(config: Config, purpose: str = "train") -> None:
    """Runs every check in order, cheapest first; raises ``ConfigError`` at the first problem."""
    _check_keys(config, fields.default(), "")
    verifiers = _verifiers(config)
    for stage in STAGES:
        _check_sources(config, stage, verifiers)
    _check_values(config)
    _check_model(config)
    if purpose == "evaluate":
        _check_evaluation(config)
        return
    _check_data(config)
    _check_rollout(config)
    _check_sglang(config)
    _check_algorithm(config)
    _check_reference_and_shaping(config)
    _check_batch(config)


def suggest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known word, or the known words where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def check_override(path: str, config: Config) -> None:
    """Raises ``ConfigError`` with a suggestion where ``--config.<path>`` names no value of this config."""
    node: Any = config
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, ConfigDict):
            raise ConfigError(f"config.{path}: unknown field; config.{'.'.join(parts[:depth])} is a value")
        if part not in node:
            raise ConfigError(f"config.{path}: unknown field{_suggest_path(parts, depth, node, config)}")
        node = node[part]
    if isinstance(node, ConfigDict) and parts[-1] != "params":
        raise ConfigError(f"config.{path}: is a section; set one of its fields: {', '.join(node)}")


def _suggest_path(parts: list[str], depth: int, node: Config, config: Config) -> str:
    near = difflib.get_close_matches(parts[depth], list(node), n=1)
    same_name = [path for path in leaves(config) if path.split(".")[-1] == parts[-1]]
    if near:
        return f"; did you mean 'config.{'.'.join([*parts[:depth], near[0], *parts[depth + 1 :]])}'?"
    if same_name:
        return f"; did you mean 'config.{same_name[0]}'?"
    return suggest(parts[depth], node)


def leaves(config: Config, prefix: str = "") -> list[str]:
    """Dotted paths of all values; named data sources and their parameters included."""
    paths = []
    for key, value in config.items():
        path = f"{prefix}{key}"
        paths += leaves(value, f"{path}.") if isinstance(value, ConfigDict) else [path]
    return paths


def _fail(path: str, value: Any, problem: str) -> None:
    raise ConfigError(f"config.{path} = {value!r}: {problem}")


def _get(config: Config, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = node[part]
    return node


def _check_type(path: str, value: Any, like: Any) -> None:
    wanted = type(like)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return
    if wanted is tuple and isinstance(value, (tuple, list)):
        return
    if type(value) is not wanted:
        _fail(path, value, f"has type {type(value).__name__}, must be {wanted.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        _fail(path, value, "must be a finite number")


def _check_keys(config: Config, reference: Config, prefix: str) -> None:
    """Same sections, same keys, same types as ``reference``; named sources are checked by their kind."""
    for key in config:
        path = f"{prefix}{key}"
        if key not in reference:
            raise ConfigError(f"config.{path}: unknown field{suggest(key, reference.keys())}")
    for key, like in reference.items():
        path = f"{prefix}{key}"
        if key not in config:
            raise ConfigError(f"config.{path}: missing; start from brorl_jax.config.default()")
        value = config[key]
        if isinstance(like, ConfigDict):
            if not isinstance(value, ConfigDict):
                _fail(path, value, "must be a section (a ConfigDict)")
            if prefix != "data." or key not in STAGES:
                _check_keys(value, like, f"{path}.")
        else:
            _check_type(path, value, like)


def _verifiers(config: Config) -> Collection[str]:
    """The names that a source's verifier may have; plugins are imported, jax is not."""
    if not config.grading.plugins:
        return fields.VERIFIERS
    from brorl_jax.rewards import registry

    registry.load_plugins(config.grading.plugins)
    return registry.names()


def _check_sources(config: Config, stage: str, verifiers: Collection[str]) -> None:
    for name, entry in config.data[stage].items():
        path = f"data.{stage}.{name}"
        if not re.fullmatch(r"\w+", name):
            _fail(path, name, "a source's name goes into metric names: letters, digits and _ only")
        if not isinstance(entry, ConfigDict):
            _fail(path, entry, "must be a source; use brorl_jax.config.source(kind, ...)")
        kind = str(entry.get("kind", ""))
        if kind not in fields.SOURCE_KINDS:
            _fail(f"{path}.kind", kind, f"unknown kind of source{suggest(kind, fields.SOURCE_KINDS)}")
        known = {**fields.SOURCE_FIELDS, **fields.SOURCE_KINDS[kind]}
        for key in entry:
            if key not in known:
                raise ConfigError(f"config.{path}.{key}: unknown field of a {kind} source{suggest(key, known)}")
        for key, like in known.items():
            if key not in entry:
                raise ConfigError(f"config.{path}.{key}: missing; use brorl_jax.config.source({kind!r}, ...)")
            if key != "params":
                _check_type(f"{path}.{key}", entry[key], like)
        _check_source_values(path, entry, verifiers)


def _check_source_values(path: str, entry: Config, verifiers: Collection[str]) -> None:
    scorer, colon, place = entry.verifier.partition(":")
    if entry.verifier and scorer not in verifiers:
        _fail(f"{path}.verifier", entry.verifier, f"unknown verifier{suggest(scorer, verifiers)}")
    if colon and place not in fields.ANSWER_FORMATS:
        _fail(f"{path}.verifier", entry.verifier, f"unknown answer format{suggest(place, fields.ANSWER_FORMATS)}")
    if not entry.weight > 0:
        _fail(f"{path}.weight", entry.weight, "must be above 0; remove the source to leave it out")
    for key in ("seed", "start", "size", "tolerance", "relative"):
        if entry.get(key, 0) < 0:
            _fail(f"{path}.{key}", entry[key], "must be at least 0")
    if entry.heading and not re.fullmatch(r"\w+(/\w+)?", entry.heading):
        _fail(f"{path}.heading", entry.heading, "goes into metric names: one word, or two with a slash between")
    if entry.prompt.count("{question}") != 1:
        _fail(f"{path}.prompt", entry.prompt, "must contain {question} exactly once")
    if entry.kind in fields.PROCEDURAL:
        for key, example in (("task", "chain_sum"), ("category", "algebra")):
            if entry.get(key) == "":
                _fail(f"{path}.{key}", "", f"name a reasoning-gym {key}, such as {example!r}")
        if entry.kind == "reasoning_gym_category" and entry.category not in (known := _categories()):
            _fail(f"{path}.category", entry.category, f"unknown category{suggest(entry.category, known)}")
        if entry.size == 0:
            _fail(f"{path}.size", 0, "a procedural source never ends; say how many prompts make an epoch")
        if entry.get("most") == 0:
            _fail(f"{path}.most", 0, "must be at least 1 instruction")
    elif not entry.path:
        _fail(f"{path}.path", entry.path, "name the file or hub dataset to read")


def _check_values(config: Config) -> None:
    for path, names in CHOICES.items():
        value = _get(config, path)
        if value not in names:
            _fail(path, value, f"unknown name{suggest(value, names)}")
    for paths, least, holds in (
        (AT_LEAST_ONE, "at least 1", lambda v: v >= 1),
        (AT_LEAST_ZERO, "at least 0", lambda v: v >= 0),
        (ABOVE_ZERO, "above 0", lambda v: v > 0),
    ):
        for path in paths:
            value = _get(config, path)
            if not holds(value):
                _fail(path, value, f"must be {least}")
    for path, (low, low_in, high, high_in) in BETWEEN.items():
        value = _get(config, path)
        if value < low or value > high or (value == low and not low_in) or (value == high and not high_in):
            interval = f"{'[' if low_in else '('}{low:g}, {high:g}{']' if high_in else ')'}"
            _fail(path, value, f"must lie in {interval}")


def _context(path: str) -> int | None:
    """The context of a local model directory (``max_position_embeddings``); None where it cannot be known here."""
    file = pathlib.Path(path) / "config.json"
    if not path or not file.is_file():
        return None
    try:
        return json.loads(file.read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return None  # loading the model reports a broken file properly


def _check_model(config: Config) -> None:
    new = config.model.new
    if not config.model.path:
        if new.heads % new.kv_heads:
            _fail("model.new.kv_heads", new.kv_heads, f"must divide model.new.heads = {new.heads}")
        if new.head_dim < 2 or new.head_dim % 2:
            _fail("model.new.head_dim", new.head_dim, "must be even: rotary embeddings turn pairs")
        if new.vocab_size < 259:
            _fail("model.new.vocab_size", new.vocab_size, "must be at least 259: 256 bytes and 3 special tokens")
        if config.model.revision:
            _fail("model.revision", config.model.revision, "a revision needs model.path; a new model has none")
    context, length = _context(config.model.path), config.data.max_prompt_tokens + config.rollout.max_tokens
    if context is not None and length > context:
        _fail(
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
        tasks = _categories()[entry.category]
        items = -(-entry.size // len(tasks))  # of each task
        return {_task(task, entry.params.get(task, {})): (entry.seed, entry.seed + items) for task in tasks}
    if entry.kind == "instructions":
        return {(entry.kind,): (entry.seed, entry.seed + entry.size)}
    read = (entry.kind, entry.path, *(entry.get(key, "") for key in ("name", "split", "revision")))
    return {read: (entry.start, entry.start + entry.size if entry.size else math.inf)}


def _categories() -> dict[str, tuple[str, ...]]:
    from brorl_jax.rewards.reasoning_gym.categories import CATEGORIES  # what it imports takes a second

    return CATEGORIES


def _task(name: str, params: Any) -> tuple[str, ...]:
    return "reasoning_gym", name, json.dumps(dict(params), sort_keys=True, default=dict)


def _check_evaluation(config: Config) -> None:
    if not config.data.eval:
        _fail("data.eval", {}, "nothing to evaluate; add a source with brorl_jax.config.source(kind, ...)")


def _check_data(config: Config) -> None:
    data = config.data
    if not data.train:
        _fail("data.train", {}, "no source of prompts; add one with brorl_jax.config.source(kind, ...)")
    if config.warmup.steps and not data.warmup:
        _fail("warmup.steps", config.warmup.steps, "the warm start has no data; add a source to data.warmup or set 0")
    if config.warmup.until and not data.eval:
        _fail("warmup.until", config.warmup.until, "nothing to measure it on; add a source to data.eval or set 0")
    if config.eval.every and not data.eval:
        _fail("eval.every", config.eval.every, "nothing to evaluate; add a source to data.eval or set 0")
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
                _fail(f"data.eval.{name}.{key}", entry[key], problem)


def _check_rollout(config: Config) -> None:
    rollout, updates = config.rollout, config.algo.updates_per_step
    if rollout.n < 2:
        _fail(
            "rollout.n",
            rollout.n,
            f"advantage {config.algo.advantage!r} compares the samples of a prompt; use 2 or more",
        )
    if rollout.prompts_per_step % updates:
        _fail(
            "algo.updates_per_step",
            updates,
            f"must divide rollout.prompts_per_step = {rollout.prompts_per_step}: mini-batches are made of whole groups",
        )
    if not rollout.temperature > 0:
        _fail("rollout.temperature", rollout.temperature, "training rollouts are sampled; use a temperature above 0")
    for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if rollout[key] != neutral:
            _fail(
                f"rollout.{key}",
                rollout[key],
                f"training rollouts need the full distribution, otherwise engine and "
                f"trainer disagree on every token; use {neutral} (evaluation may truncate)",
            )
    for token in rollout.stop_ids:
        if type(token) is not int or token < 0:
            _fail("rollout.stop_ids", tuple(rollout.stop_ids), "must hold token ids, whole numbers from 0")


def _check_sglang(config: Config) -> None:
    from brorl_jax.rollout.sglang import checks

    for path, value, problem in checks.problems(config):
        _fail(path, value, problem)


def _check_algorithm(config: Config) -> None:
    algo = config.algo
    batch_normalised = algo.advantage == "reinforce_pp_baseline"
    if batch_normalised and algo.normalise == "none":
        problem = (
            "'reinforce_pp_baseline' normalises over the batch; use 'tokens' or 'sequences' (without, it is 'dr_grpo')"
        )
        _fail("algo.normalise", "none", problem)
    if not batch_normalised and algo.normalise != "none":
        _fail("algo.normalise", algo.normalise, f"advantage {algo.advantage!r} has no such step; use 'none'")
    if algo.dual_clip and not algo.dual_clip > 1:
        _fail("algo.dual_clip", algo.dual_clip, "must be above 1 (it caps the ratio of bad samples), or 0 for off")
    if algo.dual_clip and algo.loss not in ("ppo_clip", "gspo"):
        _fail("algo.dual_clip", algo.dual_clip, f"belongs to losses 'ppo_clip' and 'gspo', not {algo.loss!r}; set 0")
    if algo.kl.coef > 0 and algo.kl.estimator == "k1":
        _fail("algo.kl.estimator", "k1", "its gradient is zero in expectation inside a loss; use 'k2' or 'k3'")
    kind, low, high = algo.mismatch.kind, algo.mismatch.low, algo.mismatch.high
    if not low < high:
        _fail("algo.mismatch.low", low, f"must be below algo.mismatch.high = {high}")
    if kind in ("mask", "sequence_mask") and not low < 1 < high:
        _fail("algo.mismatch.low", low, f"the kept interval [{low}, {high}] must contain 1 (no mismatch)")
    if kind == "none" and config.rollout.overlap:
        problem = "samples of older weights need a correction: set algo.mismatch.kind, to 'tis' say, or False"
        _fail("rollout.overlap", True, problem)
    if kind == "tis" and high < 1:
        _fail("algo.mismatch.high", high, "truncated importance sampling needs a cap of at least 1")


def _check_reference_and_shaping(config: Config) -> None:
    reference, shaping = config.algo.reference, config.shaping
    for key in ("every", "kl_spike", "stall"):
        if reference[key] and not config.algo.kl.coef:
            _fail(
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
            _fail(path, evaluations, "counts evaluations; set eval.every or 0")
    if shaping.overlong_buffer > config.rollout.max_tokens:
        _fail(
            "shaping.overlong_buffer",
            shaping.overlong_buffer,
            f"must not exceed rollout.max_tokens = {config.rollout.max_tokens}",
        )
    if bool(shaping.overlong_buffer) != bool(shaping.overlong_penalty):
        key = "overlong_penalty" if shaping.overlong_buffer else "overlong_buffer"
        _fail(f"shaping.{key}", shaping[key], "overlong_buffer and overlong_penalty go together; set both or neither")
    if shaping.cosine_coef:
        if shaping.cosine_on < 1 or shaping.cosine_off < 0:
            key = "cosine_on" if shaping.cosine_on < 1 else "cosine_off"
            _fail(
                f"shaping.{key}",
                shaping[key],
                "the cosine reward is on for cosine_on >= 1 steps, then off for cosine_off >= 0",
            )
        if not shaping.cosine_min < shaping.cosine_max:
            _fail("shaping.cosine_min", shaping.cosine_min, f"must be below cosine_max = {shaping.cosine_max}")


def _check_batch(config: Config) -> None:
    batch, mesh = config.batch, config.mesh
    if config.rollout.max_tokens > batch.row_tokens:
        _fail(
            "batch.row_tokens",
            batch.row_tokens,
            f"a response of rollout.max_tokens = {config.rollout.max_tokens} must fit one row",
        )
    shards = mesh.data * mesh.fsdp
    if batch.slots % shards:
        _fail(
            "batch.slots",
            batch.slots,
            f"slots are split over mesh.data * mesh.fsdp = {shards} devices; use a multiple of it",
        )
    if batch.row_tokens % mesh.context:
        _fail(
            "batch.row_tokens",
            batch.row_tokens,
            f"a row is split over mesh.context = {mesh.context} devices; use a multiple of it",
        )
    if config.model.attention == "cudnn" and mesh.context > 1:
        _fail("mesh.context", mesh.context, "attention 'cudnn' takes whole rows; use model.attention = 'blockwise'")
    if config.model.attention == "cudnn" and config.model.compute_dtype != "bfloat16":
        _fail("model.attention", "cudnn", "needs model.compute_dtype = 'bfloat16'; else use 'blockwise'")
