"""The checks of ``config.validate`` that look at one field: unknown keys, types, names, ranges, data sources.

Each raises ``ConfigError`` with one line: the field, its value, what is wrong and what to do. How fields
must agree is in ``config_checks.py``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

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
    algo.kl.clamp_output algo.mismatch.low algo.mismatch.stop_above
    algo.reference.every algo.reference.kl_spike algo.reference.stall
    shaping.overlong_buffer shaping.overlong_penalty shaping.cosine_coef optim.warmup_steps optim.weight_decay
    optim.clip_norm warmup.steps train.stop_stalled train.stall_timeout_s eval.every eval.temperature
    eval.max_prompts checkpoint.every diagnostics.mass_balance_every diagnostics.exact_nodes
    rollout.sglang.launch.servers"""
)
ABOVE_ZERO = _paths(
    """grading.deadline_factor optim.lr optim.eps warmup.lr algo.kl.clamp algo.mismatch.high algo.eps_low
    algo.eps_high rollout.sglang.timeout_s rollout.sglang.start_timeout_s rollout.sglang.update_timeout_s
    processes.start_timeout_s processes.lost_after_s processes.wait_s"""
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


def check(config: Config) -> None:
    """Every field by itself; raises ``ConfigError`` at the first problem."""
    _check_keys(config, fields.default(), "")
    verifiers = _verifiers(config)
    for stage in STAGES:
        _check_sources(config, stage, verifiers)
    _check_values(config)


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


def fail(path: str, value: Any, problem: str) -> NoReturn:
    """Raises ``ConfigError``: the field, its value, what is wrong and what to do."""
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
        fail(path, value, f"has type {type(value).__name__}, must be {wanted.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        fail(path, value, "must be a finite number")


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
                fail(path, value, "must be a section (a ConfigDict)")
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
            fail(path, name, "a source's name goes into metric names: letters, digits and _ only")
        if not isinstance(entry, ConfigDict):
            fail(path, entry, "must be a source; use brorl_jax.config.source(kind, ...)")
        kind = str(entry.get("kind", ""))
        if kind not in fields.SOURCE_KINDS:
            fail(f"{path}.kind", kind, f"unknown kind of source{suggest(kind, fields.SOURCE_KINDS)}")
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
        fail(f"{path}.verifier", entry.verifier, f"unknown verifier{suggest(scorer, verifiers)}")
    if colon and place not in fields.ANSWER_FORMATS:
        fail(f"{path}.verifier", entry.verifier, f"unknown answer format{suggest(place, fields.ANSWER_FORMATS)}")
    if not entry.weight > 0:
        fail(f"{path}.weight", entry.weight, "must be above 0; remove the source to leave it out")
    for key in ("seed", "start", "size", "tolerance", "relative"):
        if entry.get(key, 0) < 0:
            fail(f"{path}.{key}", entry[key], "must be at least 0")
    if entry.heading and not re.fullmatch(r"\w+(/\w+)?", entry.heading):
        fail(f"{path}.heading", entry.heading, "goes into metric names: one word, or two with a slash between")
    if entry.prompt.count("{question}") != 1:
        fail(f"{path}.prompt", entry.prompt, "must contain {question} exactly once")
    if entry.kind in fields.PROCEDURAL:
        for key, example in (("task", "chain_sum"), ("category", "algebra")):
            if entry.get(key) == "":
                fail(f"{path}.{key}", "", f"name a reasoning-gym {key}, such as {example!r}")
        if entry.kind == "reasoning_gym_category" and entry.category not in (known := categories()):
            fail(f"{path}.category", entry.category, f"unknown category{suggest(entry.category, known)}")
        if entry.size == 0:
            fail(f"{path}.size", 0, "a procedural source never ends; say how many prompts make an epoch")
        if entry.get("most") == 0:
            fail(f"{path}.most", 0, "must be at least 1 instruction")
    elif not entry.path:
        fail(f"{path}.path", entry.path, "name the file or hub dataset to read")


def _check_values(config: Config) -> None:
    for path, names in CHOICES.items():
        value = _get(config, path)
        if value not in names:
            fail(path, value, f"unknown name{suggest(value, names)}")
    for paths, least, holds in (
        (AT_LEAST_ONE, "at least 1", lambda v: v >= 1),
        (AT_LEAST_ZERO, "at least 0", lambda v: v >= 0),
        (ABOVE_ZERO, "above 0", lambda v: v > 0),
    ):
        for path in paths:
            value = _get(config, path)
            if not holds(value):
                fail(path, value, f"must be {least}")
    if config.seed >= 2**32:
        fail("seed", config.seed, "must be below 2**32: of a larger one jax takes the low 32 bits only")
    for path, (low, low_in, high, high_in) in BETWEEN.items():
        value = _get(config, path)
        if value < low or value > high or (value == low and not low_in) or (value == high and not high_in):
            interval = f"{'[' if low_in else '('}{low:g}, {high:g}{']' if high_in else ')'}"
            fail(path, value, f"must lie in {interval}")


def categories() -> dict[str, tuple[str, ...]]:
    """Reasoning Gym's categories -> tasks."""
    from brorl_jax.rewards.reasoning_gym.categories import CATEGORIES  # what it imports takes a second

    return CATEGORIES
