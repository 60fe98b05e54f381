"""Configs: every field is checked, every mistake is one line that says what to do, the paper's arms are the paper's."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import pytest
from ml_collections import ConfigDict

from brorl_jax import config as config_lib
from brorl_jax.commandline import load
from brorl_jax.config import ConfigError, source
from brorl_jax.config_fields import check_override, leaves

REPO = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ("quickstart", "mixture", "smollm2_135m", "smollm2_gsm8k", "brorl_n512", "prorl_n16")
LEAVES = leaves(config_lib.default())


def valid() -> ConfigDict:
    """The smallest config that passes."""
    config = config_lib.default()
    config.data.train.sums = source("reasoning_gym", task="chain_sum", size=100, seed=10)
    config.data.eval.sums = source("reasoning_gym", task="chain_sum", size=10, seed=0)
    config_lib.validate(config)
    return config


def get(config: ConfigDict, path: str):
    for part in path.split("."):
        config = config[part]
    return config


def put(config: ConfigDict, path: str, value) -> None:
    *sections, leaf = path.split(".")
    for part in sections:
        config = config[part]
    with config.unlocked(), config.ignore_type():
        config[leaf] = value


def problem(*changes: tuple[str, object]) -> str:
    """The message for the smallest valid config with these changes; one line."""
    config = valid()
    for path, value in changes:
        put(config, path, value)
    with pytest.raises(ConfigError) as caught:
        config_lib.validate(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", LEAVES)
def test_a_value_of_the_wrong_type_is_refused(path):
    value = get(valid(), path)
    wrong = 1.5 if isinstance(value, str | bool | int | tuple) else "text"
    message = problem((path, wrong))
    assert message == f"config.{path} = {wrong!r}: has type {type(wrong).__name__}, must be {type(value).__name__}"


@pytest.mark.parametrize("path", [p for p in LEAVES if type(get(config_lib.default(), p)) in (int, float)])
def test_every_number_has_a_range(path):
    numbers = [-math.inf] if path in ("shaping.cosine_min", "shaping.cosine_max") else [-2, -1e9]
    for number in numbers:
        number = type(get(config_lib.default(), path))(number) if math.isfinite(number) else number
        changes = [(path, number)]
        if path.startswith("shaping.cosine_o"):
            changes.append(("shaping.cosine_coef", 0.1))
        assert f"config.{path} = " in problem(*changes)


def test_whole_numbers_serve_as_floats():
    config = valid()
    config.rollout.temperature = 1
    config.algo.kl.clamp = 20
    config_lib.validate(config)


@pytest.mark.parametrize("path", ["rollout.temprature", "algo.kl.coeff", "data.trian", "sed"])
def test_an_unknown_field_gets_a_suggestion(path):
    known = {"rollout.temprature": "temperature", "algo.kl.coeff": "coef", "data.trian": "train", "sed": "seed"}[path]
    assert problem((path, 1)) == f"config.{path}: unknown field; did you mean {known!r}?"


def test_a_missing_field_is_named():
    config = valid()
    with config.unlocked():
        del config.algo.loss
    with pytest.raises(ConfigError, match=r"^config\.algo\.loss: missing"):
        config_lib.validate(config)


def test_typing_mistakes_in_a_config_file_cannot_add_fields():
    config = config_lib.default()
    with pytest.raises(AttributeError):
        config.rollout.rows = 3


NAMES = """model.compute_dtype model.param_dtype model.remat model.attention model.new.family rollout.engine
    algo.advantage algo.normalise algo.loss algo.aggregation algo.kl.estimator algo.mismatch.kind
    optim.lr_rule optim.moment_dtype"""


@pytest.mark.parametrize("path", NAMES.split())
def test_an_unknown_name_is_refused_with_a_suggestion(path):
    right = get(valid(), path)
    assert problem((path, right + "x")) == f"config.{path} = '{right}x': unknown name; did you mean {right!r}?"


def test_an_unknown_name_far_from_all_lists_the_known():
    assert problem(("algo.loss", "?")).endswith("unknown name; known: ppo_clip, gspo, cispo, reinforce")


IMPOSSIBLE = [
    ([("rollout.n", 1)], "config.rollout.n = 1: advantage 'reinforce_pp_baseline' compares the samples of a prompt"),
    ([("rollout.n", 1), ("algo.advantage", "rloo"), ("algo.normalise", "none")], "advantage 'rloo' compares"),
    ([("algo.updates_per_step", 3)], "config.algo.updates_per_step = 3: must divide rollout.prompts_per_step = 128"),
    ([("rollout.top_p", 0.95)], "config.rollout.top_p = 0.95: training rollouts need the full distribution"),
    ([("rollout.top_k", 50)], "config.rollout.top_k = 50: training rollouts need the full distribution"),
    ([("rollout.min_p", 0.1)], "config.rollout.min_p = 0.1: training rollouts need the full distribution"),
    ([("rollout.temperature", 0.0)], "config.rollout.temperature = 0.0: training rollouts are sampled"),
    ([("rollout.max_tokens", 257)], "config.batch.row_tokens = 256: a response of rollout.max_tokens = 257 must fit"),
    ([("rollout.stop_ids", (3, -1))], "config.rollout.stop_ids = (3, -1): must hold token ids"),
    ([("algo.normalise", "none")], "'reinforce_pp_baseline' normalises over the batch"),
    ([("algo.advantage", "grpo")], "config.algo.normalise = 'tokens': advantage 'grpo' has no such step; use 'none'"),
    ([("algo.dual_clip", 1.0)], "config.algo.dual_clip = 1.0: must be above 1"),
    ([("algo.dual_clip", 3.0), ("algo.loss", "cispo")], "belongs to losses 'ppo_clip' and 'gspo', not 'cispo'"),
    ([("algo.eps_low", 1.1)], "config.algo.eps_low = 1.1: must lie in (0, 1]"),
    ([("algo.eps_high", 0.0)], "config.algo.eps_high = 0.0: must be above 0"),
    ([("algo.kl.estimator", "k1")], "config.algo.kl.estimator = 'k1': its gradient is zero in expectation"),
    ([("algo.mismatch.low", 2.0)], "config.algo.mismatch.low = 2.0: must be below algo.mismatch.high = 2.0"),
    ([("algo.mismatch.high", 0.9)], "config.algo.mismatch.high = 0.9: truncated importance sampling needs a cap"),
    ([("algo.mismatch.kind", "mask"), ("algo.mismatch.low", 1.5)], "the kept interval [1.5, 2.0] must contain 1"),
    ([("algo.kl.coef", 0.0), ("algo.reference.every", 5)], "config.algo.reference.every = 5: there is no reference"),
    ([("algo.kl.coef", 0.0), ("algo.reference.kl_spike", 0.1)], "there is no reference policy to reset"),
    ([("algo.reference.stall", 2)], "config.algo.reference.stall = 2: counts evaluations; set eval.every or 0"),
    (
        [("rollout.engine", "sglang"), ("rollout.sglang.urls", ("http://a:1",)), ("train.stall_timeout_s", 1800.0)],
        "config.train.stall_timeout_s = 1800.0: must be above rollout.sglang.timeout_s = 1800, or 0",
    ),
    (
        [
            ("rollout.engine", "sglang"),
            ("rollout.sglang.urls", ("http://a:1",)),
            ("rollout.sglang.start_timeout_s", 8e3),
        ],
        "config.train.stall_timeout_s = 7200.0: must be above rollout.sglang.start_timeout_s = 8000, or 0",
    ),
    ([("train.stop_stalled", 2)], "config.train.stop_stalled = 2: counts evaluations; set eval.every or 0"),
    ([("shaping.overlong_buffer", 10)], "config.shaping.overlong_penalty = 0.0: overlong_buffer and overlong_penalty"),
    ([("shaping.overlong_penalty", 1.0)], "config.shaping.overlong_buffer = 0: overlong_buffer and overlong_penalty"),
    ([("shaping.overlong_buffer", 300)], "must not exceed rollout.max_tokens = 256"),
    ([("shaping.stop_properly", 1.5)], "config.shaping.stop_properly = 1.5: must lie in [0, 1]"),
    ([("shaping.cosine_coef", 0.1), ("shaping.cosine_on", 0)], "config.shaping.cosine_on = 0: the cosine reward is on"),
    ([("shaping.cosine_coef", 0.1), ("shaping.cosine_min", 1.0)], "must be below cosine_max = 1.0"),
    ([("filter.min_valid", 0.0)], "config.filter.min_valid = 0.0: must lie in (0, 1]"),
    ([("mesh.data", 2), ("mesh.fsdp", 2)], "config.batch.slots = 1: slots are split over mesh.data * mesh.fsdp = 4"),
    ([("mesh.context", 3)], "config.batch.row_tokens = 256: a row is split over mesh.context = 3 devices"),
    ([("model.attention", "cudnn")], "config.model.attention = 'cudnn': needs model.compute_dtype = 'bfloat16'"),
    (
        [("model.attention", "cudnn"), ("mesh.context", 2)],
        "config.mesh.context = 2: attention 'cudnn' takes whole rows",
    ),
    ([("mesh.tensor", 0)], "config.mesh.tensor = 0: must be at least 1"),
    ([("model.new.kv_heads", 3)], "config.model.new.kv_heads = 3: must divide model.new.heads = 4"),
    ([("model.new.head_dim", 31)], "config.model.new.head_dim = 31: must be even"),
    ([("model.new.vocab_size", 200)], "config.model.new.vocab_size = 200: must be at least 259"),
    ([("model.revision", "v2")], "config.model.revision = 'v2': a revision needs model.path"),
    ([("data.train", ConfigDict())], "config.data.train = {}: no source of prompts"),
    ([("warmup.steps", 5)], "config.warmup.steps = 5: the warm start has no data"),
    ([("data.eval", ConfigDict()), ("eval.every", 5)], "config.eval.every = 5: nothing to evaluate"),
    ([("data.eval.sums.seed", 1)], "config.data.eval.sums.seed = 1: shares items 10 to 11 with data.train.sums"),
    ([("eval.top_p", 1.2)], "config.eval.top_p = 1.2: must lie in (0, 1]"),
    ([("optim.lr", 0.0)], "config.optim.lr = 0.0: must be above 0"),
    ([("optim.lr", math.nan)], "config.optim.lr = nan: must be a finite number"),
]


@pytest.mark.parametrize(("changes", "fragment"), IMPOSSIBLE, ids=[f"{c[0][0]}={c[0][1]}" for c, _ in IMPOSSIBLE])
def test_an_impossible_combination_is_refused(changes, fragment):
    assert fragment in problem(*changes)


SOURCES = [
    (("kind", "reasoning_gim"), "config.data.train.sums.kind = 'reasoning_gim': unknown kind of source; did you mean"),
    (("sise", 3), "config.data.train.sums.sise: unknown field of a reasoning_gym source; did you mean 'size'?"),
    (("path", "x"), "config.data.train.sums.path: unknown field of a reasoning_gym source"),
    (("size", 0), "config.data.train.sums.size = 0: a procedural source never ends"),
    (("size", "3"), "config.data.train.sums.size = '3': has type str, must be int"),
    (("seed", -1), "config.data.train.sums.seed = -1: must be at least 0"),
    (("task", ""), "config.data.train.sums.task = '': name a reasoning-gym task"),
    (("weight", 0.0), "config.data.train.sums.weight = 0.0: must be above 0"),
    (("verifier", "nummeric"), "unknown verifier; did you mean 'numeric'?"),
    (("verifier", "numeric:box"), "unknown answer format; did you mean 'boxed'?"),
    (("prompt", "solve it"), "config.data.train.sums.prompt = 'solve it': must contain {question} exactly once"),
]


@pytest.mark.parametrize(("change", "fragment"), SOURCES, ids=[f"{k}={v}" for (k, v), _ in SOURCES])
def test_sources_are_checked_by_their_kind(change, fragment):
    key, value = change
    assert fragment in problem((f"data.train.sums.{key}", value))


def test_files_and_hub_sources_need_a_path():
    for kind in ("jsonl", "huggingface"):
        message = problem(("data.train.more", source(kind, verifier="numeric")))
        assert message == "config.data.train.more.path = '': name the file or hub dataset to read"


def test_evaluating_on_training_rows_is_refused_and_other_rows_are_not():
    def hub(split):
        return source("huggingface", path="some/set", split=split, verifier="numeric")

    message = problem(("data.train.a", hub("train")), ("data.eval.b", hub("train")))
    assert "config.data.eval.b.start = 0: shares items 0 to inf with data.train.a" in message
    config = valid()
    config.data.train.a, config.data.eval.b = hub("train"), hub("test")
    config.data.train.c = source("jsonl", path="a.jsonl", start=100)
    config.data.eval.d = source("jsonl", path="a.jsonl", size=100)
    config_lib.validate(config)


def test_prompt_and_response_must_fit_the_context_of_a_local_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 511}))
    message = problem(("model.path", str(tmp_path)))
    assert "config.rollout.max_tokens = 256: with data.max_prompt_tokens = 256 makes 512 tokens" in message
    assert "context of 511" in message
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    config = valid()
    config.model.path = str(tmp_path)
    config_lib.validate(config)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rollot.n", "config.rollot.n: unknown field; did you mean 'config.rollout.n'?"),
        ("rollout.nn", "config.rollout.nn: unknown field; did you mean 'config.rollout.n'?"),
        ("updates_per_step", "config.updates_per_step: unknown field; did you mean 'config.algo.updates_per_step'?"),
        ("seed.x", "config.seed.x: unknown field; config.seed is a value"),
        ("algo.kl", "config.algo.kl: is a section; set one of its fields: clamp, clamp_output, coef, estimator"),
    ],
)
def test_an_override_of_an_unknown_field_gets_a_suggestion(path, message):
    with pytest.raises(ConfigError) as caught:
        check_override(path, valid())
    assert str(caught.value) == message


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_configs_are_valid(name):
    config = load(str(REPO / "configs" / f"{name}.py"))
    config_lib.validate(config)
    for text in ("Command:", "Hardware:", "Time and result"):
        assert text in (REPO / "configs" / f"{name}.py").read_text()


def test_the_papers_arms_have_the_papers_figures():
    arms = {name: config_lib.derived(load(str(REPO / "configs" / f"{name}.py"))) for name in CONFIGS[-2:]}
    broad, narrow = arms["brorl_n512"], arms["prorl_n16"]
    assert (broad["samples_per_step"], narrow["samples_per_step"]) == (65_536, 8_192)
    assert broad["updates_per_step"] == narrow["updates_per_step"]
    assert broad["samples_per_update"] == 8 * narrow["samples_per_update"]
    assert broad["learning_rate"] / narrow["learning_rate"] == pytest.approx(2 * math.sqrt(2), rel=1e-12)
    assert broad["max_sequence_tokens"] == narrow["max_sequence_tokens"] == 16_384
    assert broad["devices"] == narrow["devices"] == 64


def test_the_papers_arms_differ_only_where_the_papers_do():
    broad, narrow = (load(str(REPO / "configs" / f"{name}.py")) for name in CONFIGS[-2:])
    assert leaves(broad) == leaves(narrow)
    changed = {path for path in leaves(broad) if get(broad, path) != get(narrow, path)}
    assert changed == {"name", "rollout.prompts_per_step", "rollout.n", "train.steps"}


@pytest.mark.parametrize(("rule", "factor"), [("constant", 1.0), ("sqrt", 3.0), ("linear", 9.0)])
def test_the_learning_rate_follows_the_samples_per_step(rule, factor):
    config = valid()
    config.rollout.prompts_per_step, config.rollout.n = 12, 6  # 72 samples: 9 x the base
    config.optim.base_samples, config.optim.lr, config.optim.lr_rule = 8, 0.5, rule
    figures = config_lib.derived(config)
    assert figures["learning_rate"] == pytest.approx(0.5 * factor, rel=1e-12)
    assert figures["samples_per_update"] == 18
    assert figures["max_response_tokens_per_step"] == 72 * 256


def test_json_holds_every_field():
    config = valid()
    loaded = ConfigDict(json.loads(config_lib.to_json(config)))
    assert leaves(loaded) == leaves(config)
    assert loaded.rollout.n == 512


def test_a_frozen_config_cannot_change():
    frozen = config_lib.freeze(valid())
    with pytest.raises((AttributeError, TypeError)):
        frozen.rollout.n = 3
    assert hash(frozen) == hash(config_lib.freeze(valid()))


def test_names_are_those_of_the_rooms():
    from brorl_jax import rewards
    from brorl_jax.learner import advantages, kl, losses, mismatch, reduce
    from brorl_jax.models import transformer

    assert set(config_lib.ADVANTAGES) == set(advantages.ADVANTAGES)
    assert set(config_lib.NORMALISERS) == set(advantages.NORMALISERS)
    assert set(config_lib.LOSSES) == set(losses.LOSSES) - {"sft"}
    assert set(config_lib.KL_ESTIMATORS) == set(kl.KL_ESTIMATORS)
    assert set(config_lib.MISMATCH_KINDS) == set(mismatch.MISMATCH)
    assert set(config_lib.AGGREGATIONS) == set(reduce.AGGREGATIONS)
    assert set(config_lib.SANDBOXES) == set(rewards.sandbox.ISOLATIONS)
    assert set(config_lib.REMAT) == set(transformer.REMAT)
    assert set(config_lib.ANSWER_FORMATS) == set(rewards.FORMATS)
    scorers = rewards.registry._SCORERS.items()
    ours = {name for name, (scorer, _) in scorers if scorer.__module__.startswith("brorl_jax.")}  # tests add their own
    assert set(config_lib.VERIFIERS) == ours


def test_source_fields_are_those_of_the_data_room():
    from brorl_jax.data import sources

    assert set(config_lib.SOURCE_KINDS) == set(sources.KINDS)
    for kind, ours in config_lib.SOURCE_KINDS.items():
        theirs = {field.name: field for field in dataclasses.fields(sources.KINDS[kind]) if field.init}
        assert set(ours) == set(theirs)
        for name, field in theirs.items():
            if field.default is not dataclasses.MISSING:
                assert ours[name] == field.default, (kind, name)


def test_a_seed_that_jax_would_cut_is_refused():
    config = valid()
    put(config, "seed", 2**32 - 1)
    config_lib.validate(config)
    assert "config.seed = 4294967296: must be below 2**32" in problem(("seed", 2**32))
