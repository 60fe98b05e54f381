"""The supervised warm start."""

import functools

import jax
import numpy as np
import pytest
import tiny_runs

from brorl_jax import assemble, checkpoint, train, warmup
from brorl_jax import config as config_lib
from brorl_jax.data.stream import warmup_pair
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Stop
from brorl_jax.metrics import read_jsonl
from brorl_jax.models import transformer
from brorl_jax.types import Finish, Status


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    tiny_runs.keep_programs(monkeypatch)


def config(folder, **changes):
    return tiny_runs.config(folder, **{"warmup.steps": 3, "warmup.batch": 9, "warmup.lr": 1e-2, **changes})


def run(c, workdir):
    """The warm start alone: model, weights after."""
    c = config_lib.freeze(c)
    workdir.mkdir(exist_ok=True)
    model = assemble.build_model(c, workdir)
    return model, warmup.run(c, workdir, model, model.weights(), {}, Stop())


def rows(workdir):
    return read_jsonl(workdir / "warmup.jsonl")[0]


def nll(model, params, groups):
    """Mean negative log-likelihood per response token, from whole sequences; NumPy float64."""
    rows = np.zeros((len(groups), 24), np.int32)
    for row, g in zip(rows, groups, strict=True):
        whole = np.concatenate([g.prompt.tokens, g.samples[0].tokens])
        row[: len(whole)] = whole
    forward = jax.jit(functools.partial(transformer.forward, cfg=model.cfg))
    places = np.broadcast_to(np.arange(24), rows.shape)
    hidden = forward(params, tokens=rows, segment_ids=np.ones_like(rows), positions=places)
    logits = np.array(hidden @ transformer.unembed(params), np.float64)[..., : model.tokenizer.vocab_size]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = []
    for row, g in zip(logp, groups, strict=True):
        start, response = len(g.prompt.tokens) - 1, g.samples[0].tokens
        chosen.append(row[start + np.arange(len(response)), response])
    return -np.concatenate(chosen).mean()


def test_loss_is_the_mean_over_all_tokens_of_the_gold_answers(tmp_path):
    c = config(tmp_path)
    model, _ = run(c, tmp_path / "run")
    stream = assemble.prompt_stream(config_lib.freeze(c), c.data.warmup, model.tokenizer, {})
    groups = [warmup.as_group(warmup_pair(p, model.tokenizer)) for p in stream.take(9)]
    assert len({len(g.samples[0].tokens) for g in groups}) > 1  # so that a mean over sequences would differ
    assert rows(tmp_path / "run")[0]["warmup/loss"] == pytest.approx(nll(model, model.weights(), groups), rel=1e-5)


def test_every_row_has_its_figures_and_the_loss_falls(tmp_path):
    run(config(tmp_path, **{"warmup.steps": 25, "warmup.batch": 12}), tmp_path / "run")
    log = rows(tmp_path / "run")
    assert [r["step"] for r in log] == list(range(1, 26))
    for key in ("warmup/loss", "optim/grad_norm", "throughput/tokens_per_s", "time/step_s", "time/data_s"):
        assert all(np.isfinite(r[key]) for r in log)
    assert log[-1]["warmup/loss"] < 0.8 * log[0]["warmup/loss"]


def test_the_run_starts_from_the_warm_weights_and_keeps_none_of_its_moments(tmp_path):
    c = config(tmp_path, **{"train.steps": 1, "algo.kl.coef": 0.1})
    _, weights = run(c, tmp_path / "alone")
    train.run(c, tmp_path / "run")
    start = tiny_runs.checkpoint(tmp_path / "run", 0)
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(start[f"['params']{name}"], x)
        np.testing.assert_array_equal(start[f"['reference']{name}"], x)
        np.testing.assert_array_equal(start[f"['opt_state'][1][0]['mu']{name}"], 0)
    assert start["['updates']"] == 0
    first = rows(tmp_path / "run")
    train.run(config(tmp_path, **{"train.steps": 2, "algo.kl.coef": 0.1}), tmp_path / "run")
    assert rows(tmp_path / "run") == first  # a resumed run is warm already


def test_a_batch_larger_than_a_micro_batch_counts_every_answer(tmp_path):
    c = config(tmp_path, **{"warmup.steps": 1, "warmup.batch": 11, "batch.slots": 2, "batch.rows": 2})
    model, _ = run(c, tmp_path / "run")
    stream = assemble.prompt_stream(config_lib.freeze(c), c.data.warmup, model.tokenizer, {})
    groups = [warmup.as_group(warmup_pair(p, model.tokenizer)) for p in stream.take(11)]
    assert rows(tmp_path / "run")[0]["warmup/loss"] == pytest.approx(nll(model, model.weights(), groups), rel=1e-5)


def test_a_pair_is_a_whole_response(tmp_path):
    c = config(tmp_path)
    model = assemble.build_model(config_lib.freeze(c), tmp_path)
    (prompt,) = assemble.prompt_stream(config_lib.freeze(c), c.data.warmup, model.tokenizer, {}).take(1)
    (sample,) = warmup.as_group(warmup_pair(prompt, model.tokenizer)).samples
    assert sample.tokens[-1] == model.tokenizer.eos_id and (sample.tokens[:-1] != model.tokenizer.eos_id).all()
    assert model.tokenizer.decode(sample.tokens[:-1]) == prompt.gold
    assert (sample.finish, sample.status) == (Finish.STOP, Status.OK)
    assert sample.logp.dtype == np.float32 and len(sample.logp) == len(sample.tokens)


def test_answers_that_no_rollout_could_give_are_refused_in_one_line(tmp_path):
    c = config(tmp_path)
    table = tmp_path / "train.jsonl"
    table.write_text(table.read_text().replace('"answer": "5"', '"answer": "123456789"'))
    with pytest.raises(UserError, match=r"data\.warmup.*10 tokens.*rollout\.max_tokens = 6"):
        train.run(c, tmp_path / "run")
    assert checkpoint.Checkpointer(tmp_path / "run", keep=1).latest is None


def test_sources_without_a_gold_answer_are_refused_in_one_line(tmp_path):
    task = config_lib.source("reasoning_gym", task="graph_color", size=10, seed=100, verifier="reasoning_gym:whole")
    c = config(tmp_path, **{"data.max_prompt_tokens": 4096})
    c.data.warmup = {"colours": task}
    with pytest.raises(UserError, match="has no single gold answer to warm up on"):
        train.run(c, tmp_path / "run")


def test_it_ends_once_enough_held_out_answers_are_right(tmp_path):
    """``measure`` is asked every 2 updates, and the weights that reached the goal are those returned."""
    c = config_lib.freeze(config(tmp_path, **{"warmup.steps": 9, "warmup.every": 2, "warmup.until": 0.5}))
    scores, seen = iter([0.1, 0.5, 0.9]), []

    def measure(params):
        seen.append(jax.device_get(params))
        return next(scores)

    workdir = tmp_path / "run"
    workdir.mkdir()
    model = assemble.build_model(c, workdir)
    weights = warmup.run(c, workdir, model, model.weights(), {}, Stop(), measure)
    assert [row["step"] for row in rows(workdir)] == [1, 2, 3, 4]
    assert [row.get("eval/pass@1") for row in rows(workdir)] == [None, 0.1, None, 0.5]
    jax.tree.map(np.testing.assert_array_equal, weights, seen[1])


def test_a_run_measures_its_warm_start_with_the_held_out_set(tmp_path):
    """An eval answer is right with probability 1/2 (tiny_runs), so a goal of 0.1 is met at the first look."""
    c = config(tmp_path, **{"warmup.steps": 6, "warmup.every": 1, "warmup.until": 0.1, "train.steps": 1})
    train.run(c, tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 1
    first = tiny_runs.metrics(tmp_path / "run")[0]
    assert first["step"] == 0 and first["eval/pass@1"] == rows(tmp_path / "run")[0]["eval/pass@1"] >= 0.1
