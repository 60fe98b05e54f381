"""The largest update before the first step: its shape, that it changes nothing, what it says when it does not fit."""

import jax
import numpy as np
import pytest
import tiny_runs

from brorl_jax import assemble, rehearsal, session, train
from brorl_jax import config as config_lib
from brorl_jax.data.packing import pack
from brorl_jax.errors import UserError
from brorl_jax.types import Finish, Group, Prompt, Sample, Status


def everything(folder, **changes):
    """Several updates and a reference, so that all passes are rehearsed; prompts of the longest that is allowed."""
    always = {"algo.updates_per_step": 2, "algo.kl.coef": 1e-2, "train.steps": 2, "eval.every": 2, "eval.samples": 2}
    c = tiny_runs.config(folder, **{**always, **changes})
    (folder / "eval.jsonl").write_text('{"question": "say 77", "answer": "5"}\n')  # as long as those of the training
    model = assemble.build_model(config_lib.freeze(c), folder / "lengths")
    c.data.max_prompt_tokens = max(
        len(p.tokens) for p in assemble.prompt_stream(c, c.data.train, model.tokenizer, {}).take(tiny_runs.PROMPTS)
    )
    return c


def test_it_leaves_no_trace_in_the_run_and_compiles_what_the_run_needs(tmp_path, monkeypatch):
    tiny_runs.keep_programs(monkeypatch)
    programs = []

    def make(*args, original=session.make_train_step):
        programs.append(original(*args))
        return programs[-1]

    monkeypatch.setattr(session, "make_train_step", make)
    sizes = []

    def step(s, original=train.step):
        sizes.append(s.train_step._cache_size())
        return original(s)

    monkeypatch.setattr(train, "step", step)
    c = everything(tmp_path)
    c.train.rehearse = True
    train.run(c, tmp_path / "rehearsed")
    after = programs[0]._cache_size()
    c.train.rehearse = False
    train.run(c, tmp_path / "plain")
    tiny_runs.same_run(tmp_path / "rehearsed", tmp_path / "plain", 2)
    assert programs[1] is programs[0] and sizes == [1] * 4 and after == 1
    assert tiny_runs.checkpoint(tmp_path / "rehearsed", 2)["['updates']"] == 4
    assert np.all(tiny_runs.checkpoint(tmp_path / "rehearsed", 2)["['skipped']"] == 0)


@pytest.mark.parametrize(("n", "row_tokens", "slots"), [(4, 6, 4), (5, 13, 1), (7, 20, 2)])
def test_no_step_has_a_larger_batch(tmp_path, n, row_tokens, slots):
    c = tiny_runs.config(tmp_path, **{"rollout.n": n, "batch.row_tokens": row_tokens, "batch.slots": slots})
    c.batch.rows = 2
    largest = rehearsal.largest_batch(c)
    rng = np.random.default_rng(0)

    def group(i, lengths):
        prompt = Prompt(f"p{i}", np.zeros(c.data.max_prompt_tokens, np.int32), "", "", "", "")
        return Group(prompt, [sample(j, int(length)) for j, length in enumerate(lengths)])

    def sample(j, length):
        return Sample(
            j, j, np.ones(length, np.int32), np.zeros(length, np.float32), Finish.STOP, 0, "", Status.OK, 1.0, 1.0
        )

    longest = [np.full(n, c.rollout.max_tokens) for _ in range(c.rollout.prompts_per_step)]
    for lengths in [longest, *(rng.integers(1, c.rollout.max_tokens + 1, (4, n)) for _ in range(50))]:
        batch = pack([group(i, row) for i, row in enumerate(lengths)], assemble.layout(c))
        assert all(np.shape(b) <= np.shape(x) for b, x in zip(batch, largest, strict=True))
        if lengths is longest:
            assert [np.shape(b) for b in batch] == [np.shape(x) for x in largest]
    assert largest.n_micro == 1 and np.isnan(largest.advantages[largest.mask]).all()


@pytest.mark.parametrize("where", ["make_score", "make_train_step"])
def test_too_little_memory_is_one_line_before_anything_is_measured(tmp_path, monkeypatch, where):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore")

    monkeypatch.setattr(session, where, lambda *_: full)
    with pytest.raises(UserError) as refused:
        train.run(everything(tmp_path, **{"train.rehearse": True}), tmp_path / "run")
    message = str(refused.value)
    assert "\n" not in message and "trying to allocate 99 bytes" in message
    for words in ("batch.slots = 4", "batch.rows = 4", "batch.row_tokens = 6", "data.max_prompt_tokens", "config.mesh"):
        assert words in message
    assert not (tmp_path / "run" / "eval").exists()


def test_other_errors_of_the_runtime_keep_their_words(tmp_path):
    c = tiny_runs.config(tmp_path)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        rehearsal.memory_errors(c, rehearsal.largest_batch(c)),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: cuBLAS")


def test_an_update_that_is_not_skipped_stops_the_run(tmp_path, monkeypatch):
    """As if a loss hid the NaN: then the weights are no longer the model's."""

    def finite(config, original=rehearsal.largest_batch):
        batch = original(config)
        return batch._replace(advantages=np.ones_like(batch.advantages))

    monkeypatch.setattr(rehearsal, "largest_batch", finite)
    with pytest.raises(RuntimeError, match="of 2 updates by NaN 0 were skipped"):
        train.run(everything(tmp_path, **{"train.rehearse": True}), tmp_path / "run")
