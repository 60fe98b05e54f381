"""From groups to mini-batches on the mesh: advantages, dealing, scores, and the figures of a step."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_cases as tiny
from hypothesis import given, settings

from brorl_jax import batches
from brorl_jax.data.packing import Layout
from brorl_jax.learner import advantages, shaping
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.optim import make_optimizer
from brorl_jax.models import sharding
from brorl_jax.types import Finish, Group, Status

LAYOUT = Layout(2, 2, 8)
MESH = sharding.make_mesh(data=2)
NO_SHAPING = {
    "max_tokens": 8, "stop_properly": 1.0, "overlong_buffer": 0, "overlong_penalty": 0.0,
    "cosine_coef": 0.0, "cosine_min": 0.0, "cosine_max": 1.0, "cosine_on": 100, "cosine_off": 500,
}  # fmt: skip


def set_advantages(groups, step=0, name="dr_grpo", normalise="none", clip=0.0, **shape):
    batches.set_advantages(
        groups,
        step,
        estimate=functools.partial(advantages.get(name), normalise=normalise),
        shape=functools.partial(shaping.shape_rewards, **NO_SHAPING | shape),
        clip=clip,
    )


def graded(rewards, lengths=None, statuses=None):
    """One group per row of rewards."""
    groups = []
    for g, row in enumerate(rewards):
        samples = []
        for i, reward in enumerate(row):
            status = statuses[g][i] if statuses else Status.OK
            length = lengths[g][i] if lengths else 2
            samples.append(tiny.sample(range(length), index=i, reward=reward, status=status, advantage=float("nan")))
        groups.append(Group(tiny.prompt(f"p{g}", [1, 2]), samples))
    return groups


def got(groups, field="advantage"):
    return [[getattr(s, field) for s in g.samples] for g in groups]


# --- advantages ---


def test_advantages_of_a_step_by_hand():
    """REINFORCE++-baseline over tokens: r - 1/2 and r - 1/4, then minus 0 over the token-weighted deviation."""
    groups = graded([[1, 0], [1, 0, 0, 0]], lengths=[[1, 3], [2, 2, 2, 2]])
    groups[0].samples += [tiny.sample([1], index=i, reward=0, status=Status.ABORTED) for i in (2, 3)]
    set_advantages(groups, name="reinforce_pp_baseline", normalise="tokens")
    centred = np.array([0.5, -0.5, 0.75, -0.25, -0.25, -0.25])
    weight = np.array([1, 3, 2, 2, 2, 2])
    mean = np.average(centred, weights=weight)
    wanted = (centred - mean) / np.sqrt(np.average((centred - mean) ** 2, weights=weight))
    np.testing.assert_allclose(got(groups)[0], [*wanted[:2], 0, 0], rtol=1e-5)
    np.testing.assert_allclose(got(groups)[1], wanted[2:], rtol=1e-5)


def test_samples_without_a_score_abstain():
    """They enter no mean, have advantage 0 and no shaped reward; the others are as if they had never been asked for."""
    ok, cut, gone, bad = Status.OK, Status.TRUNCATED, Status.ABORTED, Status.GRADER_ERROR
    groups = graded([[1, 0, 0, 1], [0, 1, 0.5, 1]], statuses=[[ok, gone, cut, bad], [gone, bad, gone, bad]])
    set_advantages(groups)
    assert got(groups) == [[0.5, 0.0, -0.5, 0.0], [0.0] * 4]
    np.testing.assert_array_equal(got(groups, "shaped_reward"), [[1, np.nan, 0, np.nan], [np.nan] * 4])
    alone = graded([[1, 0]])
    set_advantages(alone)
    assert got(alone) == [[0.5, -0.5]]


def test_groups_of_different_sizes_are_each_their_own():
    groups = graded([[1, 0], [1, 0, 0, 0], [1]])
    set_advantages(groups)
    assert got(groups) == [[0.5, -0.5], [0.75, -0.25, -0.25, -0.25], [0.0]]
    assert got(groups, "shaped_reward") == [[1, 0], [1, 0, 0, 0], [1]]


def test_shaping_sees_length_truncation_and_the_step():
    groups = graded(
        [[1, 1, 1, 0]], lengths=[[2, 8, 8, 4]], statuses=[[Status.OK, Status.TRUNCATED, Status.OK, Status.OK]]
    )
    assert [s.finish for s in groups[0].samples][:2] == [Finish.STOP, Finish.LENGTH]
    set_advantages(groups, stop_properly=0.25, overlong_buffer=4, overlong_penalty=0.5)
    assert got(groups, "shaped_reward") == [[1.0, 0.25 - 0.5, 0.5, 0.0]]
    np.testing.assert_allclose(got(groups)[0], np.array([1.0, -0.25, 0.5, 0.0]) - 0.3125)
    assert got(groups, "reward") == [[1, 1, 1, 0]]  # the raw one stays
    cosine = {"cosine_coef": 1.0, "cosine_on": 3, "cosine_off": 2}
    set_advantages(groups, step=2, **cosine)
    assert got(groups, "shaped_reward")[0][3] == pytest.approx(0.5)  # halfway to the limit
    set_advantages(groups, step=3, **cosine)
    assert got(groups, "shaped_reward") == [[1, 1, 1, 0]]


def test_clip_comes_last_and_nothing_is_no_error():
    groups = graded([[1, 0, 0, 0]])
    set_advantages(groups, clip=0.5)
    assert got(groups) == [[0.5, -0.25, -0.25, -0.25]]
    set_advantages([])


# --- the first update ---


def update(ratio=1.0, kl=0.0, tokens=9.0):
    return {"policy/ratio_mean": np.float32(ratio), "policy/kl_ref": np.float32(kl), "batch/tokens": np.float32(tokens)}


@pytest.mark.parametrize(
    "figures", [{"ratio": 1.002}, {"ratio": 0.998}, {"kl": 2e-6}, {"ratio": np.nan}, {"kl": np.nan}]
)
def test_first_update_that_disagrees_with_itself_stops_the_run(figures):
    with pytest.raises(RuntimeError, match="should see ratio 1 and KL 0 but saw a mean ratio of"):
        batches.check_first_update(update(**figures), jnp.dtype("float32"))


def test_first_update_passes_within_rounding():
    batches.check_first_update(update(1.0000005, 1e-9), jnp.dtype("float32"))
    batches.check_first_update(update(1.005, 1e-4), jnp.dtype("bfloat16"))
    batches.check_first_update(update(0.0, tokens=0.0), jnp.dtype("float32"))  # nothing to compare
    without = update()
    del without["policy/kl_ref"]  # no reference, no divergence
    batches.check_first_update(without, jnp.dtype("float32"))
    for figures in ({"ratio": 1.1}, {"kl": 0.01}, {"ratio": np.nan}):
        with pytest.raises(RuntimeError):
            batches.check_first_update(update(**figures), jnp.dtype("bfloat16"))


# --- dealing ---


def prompts_of(batch):
    """The distinct prompts of a mini-batch, by the token that marks them (their last)."""
    batch = jax.device_get(batch)
    return sorted({int(batch.inputs[m, s, 0, 0]) for m, s in np.argwhere(batch.mask.any(axis=(2, 3)))})


def marked(sizes):
    """Groups whose last prompt token is their number; prompts grow, so that widths would differ."""
    made = tiny.random_groups(sizes, seed=1, response=(8, 8))
    for g, group in enumerate(made):
        group.prompt = tiny.prompt(f"p{g}", [40] * (3 * g) + [g])
    return made


@given(sizes=st.lists(st.integers(1, 7), max_size=9), updates=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_groups_are_dealt_whole_in_order_and_evenly_in_one_shape(sizes, updates):
    groups = marked(sizes)
    packed = batches.pack_updates(groups, LAYOUT, updates, MESH)
    assert len(packed) == min(updates, len(groups))
    dealt = [prompts_of(batch) for batch in packed]
    assert [g for part in dealt for g in part] == list(range(len(groups)))
    assert not dealt or max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert len({jax.tree.map(np.shape, batch) for batch in packed}) <= 1
    assert sum(int(batch.mask.sum()) for batch in packed) == 8 * sum(sizes)


def test_unequal_mini_batches_share_the_widest_prompt_and_the_most_micro_batches():
    packed = batches.pack_updates(marked([1, 1, 9, 1]), LAYOUT, 2, MESH)
    assert [batch.mask.shape for batch in packed] == [(3, 2, 2, 8)] * 2
    assert [batch.prefix.shape[-1] for batch in packed] == [10, 10]  # nine places, on the grid
    assert [int(batch.n_micro) for batch in packed] == [1, 3]  # the padding is not executed


def test_a_group_left_without_scores_is_an_empty_mini_batch_of_the_same_shape():
    groups = marked([2, 2])
    for s in groups[0].samples:
        s.status = Status.ABORTED
    first, second = batches.pack_updates(groups, LAYOUT, 2, MESH)
    assert first.n_micro == 0 and second.n_micro == 1
    assert jax.tree.map(np.shape, first) == jax.tree.map(np.shape, second)


def test_starved_steps_have_fewer_updates_and_none_without_groups():
    assert len(batches.pack_updates(marked([2]), LAYOUT, 4, MESH)) == 1
    assert batches.pack_updates([], LAYOUT, 4, MESH) == []


def test_mini_batches_are_on_the_mesh():
    (batch,) = batches.pack_updates(marked([4, 4]), LAYOUT, 1, MESH)
    assert batch.tokens.sharding == sharding.batch_sharding(MESH, 4)
    assert {shard.data.shape[1] for shard in batch.tokens.addressable_shards} == {1}


# --- scores ---


def test_scores_are_those_of_policy_and_reference():
    """Old from the present policy, the other from the reference; a starved step of one mini-batch is no exception."""
    optimizer = make_optimizer(1e-3, warmup_steps=0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=0.0)
    state = state_lib.create(tiny.weights(seed=1), optimizer, reference=True)._replace(reference=tiny.weights())
    (batch,) = batches.pack_updates(tiny.random_groups([3]), LAYOUT, 4, sharding.make_mesh())
    [scored] = batches.add_scores([batch], tiny.score(), state, old=True)
    np.testing.assert_array_equal(scored.old_logp, tiny.score()(state.params, batch))
    np.testing.assert_array_equal(scored.ref_logp, tiny.score()(tiny.weights(), batch))
    assert (np.asarray(scored.old_logp)[batch.mask] < 0).all() and (scored.old_logp != scored.ref_logp).any()
    [half] = batches.add_scores([batch], tiny.score(), state, old=False)
    assert not half.old_logp.any()
    np.testing.assert_array_equal(half.ref_logp, scored.ref_logp)
    [none] = batches.add_scores([batch], tiny.score(), state._replace(reference=None), old=True)
    assert not none.ref_logp.any()


def test_the_reference_visits_the_device_once_for_all_mini_batches(monkeypatch):
    optimizer = make_optimizer(1e-3, warmup_steps=0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=0.0)
    state = state_lib.create(tiny.weights(), optimizer, reference=True)
    packed = batches.pack_updates(tiny.random_groups([3, 2]), LAYOUT, 2, sharding.make_mesh())
    visits, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *where: visits.append(x) or put(x, *where))
    scored = batches.add_scores(packed, tiny.score(), state, old=True)
    assert len(scored) == 2 and sum(x is state.reference for x in visits) == 1
    for batch in scored:
        np.testing.assert_array_equal(batch.ref_logp, batch.old_logp)
        assert (np.asarray(batch.ref_logp)[batch.mask] < 0).all()


# --- figures ---


def test_figures_of_a_step_are_sums_maxima_or_means():
    updates = [
        {"batch/tokens": 10.0, "optim/skipped": 1.0, "policy/ratio_max": 1.5, "loss/total": 1.0},
        {"batch/tokens": 30.0, "optim/skipped": 1.0, "policy/ratio_max": 1.2, "loss/total": 2.0},
    ]
    groups = graded([[1, 0], [0.5, 0]], statuses=[[Status.OK, Status.ABORTED], [Status.OK, Status.OK]])
    set_advantages(groups)
    assert batches.metrics(groups, updates) == {
        "batch/tokens": 40.0,
        "optim/skipped": 2.0,
        "policy/ratio_max": 1.5,
        "loss/total": 1.5,
        "reward/shaped": 0.5,
    }
    assert batches.metrics([], []) == {}


def test_mismatch_is_over_the_trained_tokens_of_all_mini_batches():
    packed = batches.pack_updates(tiny.random_groups([3, 2, 4]), LAYOUT, 2, MESH)
    logps = [
        np.where(batch.mask, batch.rollout_logp + np.float32(gap), np.nan)
        for batch, gap in zip(packed, (0.0, 0.5), strict=True)
    ]
    out = batches.mismatch_metrics(packed, logps)
    counts = [int(batch.mask.sum()) for batch in packed]
    assert out["mismatch/max"] == pytest.approx(0.5) and out["mismatch/p99"] == pytest.approx(0.5)
    assert out["mismatch/mean"] == pytest.approx(0.5 * counts[1] / sum(counts))
    assert out["mismatch/kl"] == pytest.approx((np.exp(0.5) - 1.5) * counts[1] / sum(counts), rel=1e-5)
    assert batches.mismatch_metrics([], []) == {}


def test_the_samples_that_differ_most_are_named_worst_first():
    groups = tiny.random_groups([3, 2, 4])
    packed = batches.pack_updates(groups, LAYOUT, 2, MESH)
    bad = {(groups[0].prompt.id, 1): 0.25, (groups[2].prompt.id, 0): 0.5}  # added to its log-probabilities
    shift = {s.tokens.tobytes(): bad.get((g.prompt.id, s.index), 0.0) for g in groups for s in g.samples}
    logps = []
    for batch in packed:
        logp = np.where(batch.mask, batch.rollout_logp, np.nan)
        for at in np.ndindex(batch.mask.shape[:2]):
            for segment in np.unique(batch.segment_ids[at][batch.mask[at]]):
                place = batch.segment_ids[at] == segment
                logp[at][place] += np.float32(shift[np.asarray(batch.tokens[at])[place].tobytes()])
        logps.append(logp)
    found = batches.worst_samples(groups, packed, logps, most=3)
    assert [(r["prompt_id"], r["sample"]) for r in found[:2]] == [(groups[2].prompt.id, 0), (groups[0].prompt.id, 1)]
    assert [r["mean"] for r in found] == pytest.approx([0.5, 0.25, 0.0])
    worst, sample = found[0], groups[2].samples[0]
    assert worst["tokens"] == sample.tokens.tolist() and worst["seed"] == sample.seed
    assert worst["engine_logp"] == pytest.approx(sample.logp.tolist())
    assert worst["trainer_logp"] == pytest.approx((sample.logp + 0.5).tolist())
    every = batches.worst_samples(groups, packed, logps, most=99)
    assert len({(r["prompt_id"], r["sample"]) for r in every}) == 9
    stale = [b._replace(fresh=np.zeros(b.mask.shape[:2], bool)) for b in packed]
    assert batches.worst_samples(groups, stale, logps) == []
