"""Laws of the learner's functions, over arbitrary inputs."""

import functools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from brorl_jax.learner import advantages, kl, losses, mismatch, reduce

law = settings(max_examples=25, deadline=None)

T, V = 12, 5
SEGMENTS = np.array([1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 0, 0])
HYPER = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0, "low": 0.5, "high": 5.0}
ESTIMATORS = [("reinforce_pp_baseline", "tokens"), ("reinforce_pp_baseline", "sequences")]
ESTIMATORS += [(name, "none") for name in ("grpo", "dr_grpo", "rloo")]

any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
poison = st.sampled_from([np.nan, np.inf, -np.inf, 1e4, -1e4])
logps = arrays(np.float32, T, elements=st.floats(-20, 0, width=32))


@functools.cache
def estimator(name, normalise):
    return jax.jit(functools.partial(advantages.get(name), normalise=normalise))


@pytest.mark.parametrize("n", [2, 3, 16, 512, 1024])
@pytest.mark.parametrize(("name", "normalise"), ESTIMATORS)
@given(value=any_float32, k=st.integers(0, 1023))
@settings(max_examples=12, deadline=None)
def test_constant_group_is_exactly_zero(name, normalise, n, value, k):
    rewards = np.stack([np.full(n, value, np.float32), np.arange(n, dtype=np.float32) % 2])
    valid = np.ones((2, n), bool)
    valid[0, k % n] = False  # any one sample may abstain
    rewards[0, k % n] = np.nan
    lengths = np.arange(1, 2 * n + 1).reshape(2, n)
    out = np.asarray(estimator(name, normalise)(rewards, valid, lengths))
    np.testing.assert_array_equal(out[0], 0.0)
    assert np.isfinite(out[1]).all() and out[1].any()


@pytest.mark.parametrize(("name", "normalise"), ESTIMATORS)
@given(data=st.data())
@law
def test_what_an_abstaining_sample_holds_is_never_seen(name, normalise, data):
    rewards = data.draw(arrays(np.float32, (3, 8), elements=st.floats(0, 1, width=32)))
    valid = data.draw(arrays(bool, (3, 8)))
    lengths = data.draw(arrays(np.int32, (3, 8), elements=st.integers(0, 16384)))
    noise = data.draw(arrays(np.float32, (3, 8), elements=poison))
    clean = np.asarray(estimator(name, normalise)(rewards, valid, lengths))
    dirty = np.asarray(estimator(name, normalise)(np.where(valid, rewards, noise), valid, np.where(valid, lengths, 7)))
    np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean[~valid], 0.0)


@given(rewards=arrays(np.float32, (3, 8), elements=st.sampled_from([0.0, 0.1, 0.35, 1.0])), seed=st.integers(0, 99))
@law
def test_advantages_follow_their_samples(rewards, seed):
    order = np.random.default_rng(seed).permutation(8)
    valid, lengths = np.ones((3, 8), bool), np.arange(1, 25).reshape(3, 8)
    for name, normalise in ESTIMATORS:
        out = np.asarray(estimator(name, normalise)(rewards, valid, lengths))
        moved = np.asarray(estimator(name, normalise)(rewards[:, order], valid, lengths[:, order]))
        np.testing.assert_allclose(moved, out[:, order], rtol=1e-4, atol=1e-5)


@functools.cache
def objective(loss, aggregation, correction, divergence):
    """A whole loss as the compiled step puts it together: ``mask`` for its terms, ``kept`` for weights and counts."""

    def total(logp, old, rollout, ref, adv, mask, kept, segments):
        value, aux = losses.bind(loss, HYPER)(logp, old, adv, mask, segments)
        value = value * mismatch.bind(correction, HYPER)(old, rollout, mask, segments)
        value = value + 0.1 * kl.get(divergence)(logp, ref, mask)
        tokens, sequences = reduce.counts(kept, segments)
        weights = reduce.get(aggregation)(kept, segments, tokens=tokens, sequences=sequences, max_tokens=4)
        out = {"loss": value, "weights": weights, "aux": aux, "mismatch": mismatch.diagnostics(old, rollout, mask)}
        return reduce.masked_sum(value * weights, kept), out

    return jax.jit(jax.value_and_grad(total, has_aux=True))


WHOLE = [
    ("ppo_clip", "token", "tis", "k2"),
    ("gspo", "sequence", "sequence_mask", "k3"),
    ("cispo", "constant", "mask", "k1"),
    ("reinforce", "token", "none", "k3"),
    ("sft", "sequence", "none", "k2"),
]
ADVANTAGES = np.asarray([0, 1, -1, 0.5, -2], np.float32)[SEGMENTS]


@pytest.mark.parametrize("parts", WHOLE)
@given(inputs=arrays(np.float32, (4, T), elements=st.floats(-20, 0, width=32)), mask=arrays(bool, T), data=st.data())
@law
def test_masked_slots_change_nothing(parts, inputs, mask, data):
    mask = mask & (SEGMENTS > 0)
    noise = data.draw(arrays(np.float32, (5, T), elements=poison))
    clean = objective(*parts)(*inputs, ADVANTAGES, mask, mask, SEGMENTS)
    dirty = np.where(mask, np.stack([*inputs, ADVANTAGES]), noise)
    dirty = objective(*parts)(*dirty, mask, mask, SEGMENTS)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
    np.testing.assert_array_equal(np.asarray(clean[1])[~mask], 0.0)


@pytest.mark.parametrize("parts", WHOLE)
def test_fully_masked_batch_has_zero_loss_and_gradient(parts):
    nothing, mask = np.full((5, T), np.nan, np.float32), np.zeros(T, bool)
    (loss, _), gradient = objective(*parts)(*nothing, mask, mask, SEGMENTS)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("parts", WHOLE)
@given(
    inputs=arrays(np.float32, (4, T), elements=st.floats(-3, 0, width=32)),
    dropped=st.sets(st.sampled_from([1, 2, 3, 4])),
)
@law
def test_dropping_samples_is_giving_them_zero_weight(parts, inputs, dropped):
    everything, kept = SEGMENTS > 0, (SEGMENTS > 0) & ~np.isin(SEGMENTS, list(dropped))
    (_, masked), gradient = objective(*parts)(*inputs, ADVANTAGES, kept, kept, SEGMENTS)
    # Their losses are computed and weigh nothing: bit for bit the same.
    (_, weightless), same = objective(*parts)(*inputs, ADVANTAGES, everything, kept, SEGMENTS)
    np.testing.assert_array_equal(gradient, same)
    np.testing.assert_array_equal(masked["weights"], weightless["weights"])
    # They were never in the batch: the kept ones move to its front, the rest is padding.
    order = np.argsort(~kept, kind="stable")
    moved = np.where(kept, SEGMENTS, 0)[order]
    (_, compact), packed = objective(*parts)(*inputs[:, order], ADVANTAGES[order], moved > 0, moved > 0, moved)
    np.testing.assert_array_equal(compact["weights"], np.asarray(masked["weights"])[order])
    np.testing.assert_allclose(packed, np.asarray(gradient)[order], rtol=1e-5, atol=1e-7)


@given(logp=logps, ref=logps)
@law
def test_k2_and_k3_are_never_negative(logp, ref):
    for name in ("k2", "k3"):
        assert (np.asarray(kl.get(name)(logp, ref, np.ones(T, bool))) >= 0).all()


@pytest.mark.parametrize("parts", WHOLE)
@given(logp=logps, rollout=logps)
@law
def test_equal_policies_have_ratio_one_and_no_divergence(parts, logp, rollout):
    mask = SEGMENTS > 0
    nothing = np.zeros(T, np.float32)
    (_, out), _ = objective(*parts)(logp, logp, rollout, logp, nothing, mask, mask, SEGMENTS)
    np.testing.assert_array_equal(out["aux"]["ratio"], mask)
    if parts[0] != "sft":  # with no advantage, what is left of the loss is the divergence
        np.testing.assert_array_equal(out["loss"], 0.0)
