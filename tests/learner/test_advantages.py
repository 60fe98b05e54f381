"""Advantages against numbers worked by hand and plain float64 loops."""

import jax
import numpy as np
import pytest

from brorl_jax.learner import advantages

NORMALISE = [("reinforce_pp_baseline", "tokens"), ("reinforce_pp_baseline", "sequences")]
NORMALISE += [(name, "none") for name in ("grpo", "dr_grpo", "rloo")]


def reference(name, normalise, rewards, valid, lengths):
    """The definitions, one sample at a time, in float64."""
    out = np.zeros(rewards.shape)
    used = np.zeros(rewards.shape, bool)
    for g in range(len(rewards)):
        r = [float(x) for x, v in zip(rewards[g], valid[g], strict=True) if v]
        if not r or max(r) == min(r):
            continue
        for i in np.flatnonzero(valid[g]):
            used[g, i] = True
            others = sum(r) - float(rewards[g, i])
            out[g, i] = rewards[g, i] - (others / (len(r) - 1) if name == "rloo" else np.mean(r))
            if name == "grpo":
                out[g, i] /= np.std(r, ddof=1) + 1e-6
    if name == "reinforce_pp_baseline" and used.any():
        x = out[used]
        w = lengths[used].astype(float) if normalise == "tokens" else np.ones(x.shape)
        mean = (w * x).sum() / w.sum()
        var = (w * (x - mean) ** 2).sum() / w.sum()
        out[used] = (x - mean) / np.sqrt(max(var, 1e-8))
    return out


COMPILED = {name: jax.jit(advantages.get(name), static_argnames="normalise") for name in advantages.ADVANTAGES}


def compute(name, normalise, rewards, valid, lengths, jit):
    function = COMPILED[name] if jit else advantages.get(name)
    return np.asarray(function(rewards, valid, lengths, normalise=normalise))


@pytest.mark.parametrize("jit", [False, True])
def test_reinforce_pp_over_tokens_by_hand(jit):
    # x = -1/2, 1/2 with 1 and 3 tokens: mean 1/4, variance (9/16 + 3/16) / 4 = 3/16. The second group teaches nothing.
    out = compute(*NORMALISE[0], np.array([[0, 1], [1, 1]]), np.ones((2, 2), bool), np.array([[1, 3], [9, 9]]), jit)
    np.testing.assert_allclose(out, [[-np.sqrt(3), 1 / np.sqrt(3)], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_reinforce_pp_over_sequences_by_hand(jit):
    # Centred: 3/4, -1/4 x 3 and +-1/2 x 4: mean 0, variance (9 + 3 + 16) / 16 / 8 = 7/32.
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0]])
    out = compute(*NORMALISE[1], rewards, np.ones((2, 4), bool), np.arange(1, 9).reshape(2, 4), jit)
    expected = np.array([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]) / np.sqrt(7 / 32)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_group_estimators_by_hand(jit):
    rewards, valid = np.array([[1.0, 0.0, 0.5, np.nan]]), np.array([[True, True, True, False]])
    lengths = np.ones((1, 4), int)
    np.testing.assert_allclose(compute("dr_grpo", "none", rewards, valid, lengths, jit), [[0.5, -0.5, 0, 0]], atol=1e-7)
    # The others' means are 1/4, 3/4, 1/2; the sample deviation is 1/2.
    np.testing.assert_allclose(compute("rloo", "none", rewards, valid, lengths, jit), [[0.75, -0.75, 0, 0]], atol=1e-7)
    np.testing.assert_allclose(compute("grpo", "none", rewards, valid, lengths, jit), [[1, -1, 0, 0]], atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 512])
@pytest.mark.parametrize(("name", "normalise"), NORMALISE)
def test_ragged_groups_match_the_loop(name, normalise, n):
    rng = np.random.default_rng(n)
    rewards = rng.choice([0.0, 0.1, 0.35, 1.0], size=(5, n)).astype(np.float32)
    valid = rng.random((5, n)) < 0.8
    rewards[0], valid[1], valid[2] = 0.35, False, True
    rewards[3, 0], valid[3, :2] = 1 - rewards[3, 1], True
    rewards[~valid] = np.nan
    lengths = rng.integers(1, 4096, size=(5, n))
    out = compute(name, normalise, rewards, valid, lengths, jit=True)
    np.testing.assert_allclose(out, reference(name, normalise, rewards, valid, lengths), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(out[:2], 0.0)


@pytest.mark.parametrize(("name", "normalise"), NORMALISE)
def test_nothing_to_learn_from_gives_zeros(name, normalise):
    rewards, lengths = np.full((3, 4), np.nan, np.float32), np.zeros((3, 4), int)
    np.testing.assert_array_equal(compute(name, normalise, rewards, np.zeros((3, 4), bool), lengths, True), 0.0)
    # A reward that is not finite abstains even where the caller calls it valid.
    np.testing.assert_array_equal(compute(name, normalise, rewards, np.ones((3, 4), bool), lengths, True), 0.0)


@pytest.mark.parametrize(("name", "normalise"), NORMALISE)
def test_a_dropped_group_changes_nothing_for_the_others(name, normalise):
    rewards = np.array([[0, 1, 1], [1, 1, 1], [0, 0, 1]], np.float32)
    valid, lengths = np.ones((3, 3), bool), np.array([[5, 1, 2], [100, 3, 4], [7, 7, 1]])
    kept = [0, 2]
    everything = compute(name, normalise, rewards, valid, lengths, jit=True)
    np.testing.assert_allclose(
        everything[kept], compute(name, normalise, rewards[kept], valid[kept], lengths[kept], jit=True), rtol=1e-6
    )


def test_nearly_constant_rewards_meet_the_variance_floor():
    one_ulp = np.array([[0.35, np.nextafter(np.float32(0.35), np.float32(1))]], np.float32)
    out = compute(*NORMALISE[1], one_ulp, np.ones((1, 2), bool), np.ones((1, 2), int), jit=True)
    assert 0 < np.abs(out).max() < 1e-3  # half an ulp of 3e-8 over sqrt(1e-8), not +-1


def test_informative_looks_at_valid_rewards_only():
    rewards = np.array([[0, 1, 0], [1, 1, 0], [np.nan, 1, 0], [0.35, 0.35, 0.35], [0, 1, 1]], np.float32)
    valid = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(advantages.informative(rewards, valid), [True, False, True, False, False])


def test_clip_advantages():
    np.testing.assert_array_equal(advantages.clip_advantages(np.array([[-7.0, 2.0, 5.5]]), 5.0), [[-5.0, 2.0, 5.0]])
    np.testing.assert_array_equal(advantages.clip_advantages(np.array([[-7.0, 2.0]]), 0.0), [[-7.0, 2.0]])
    with pytest.raises(ValueError, match=r"got -1\.0"):
        advantages.clip_advantages(np.zeros((1, 1)), -1.0)


def test_meaningless_combinations_are_refused():
    advantages.check("reinforce_pp_baseline", "tokens")
    with pytest.raises(ValueError, match=r"'gae'; known: dr_grpo, grpo, reinforce_pp_baseline, rloo"):
        advantages.get("gae")
    with pytest.raises(ValueError, match=r"'batch'; known: none, tokens, sequences"):
        advantages.check("grpo", "batch")
    with pytest.raises(ValueError, match="it is dr_grpo"):
        advantages.check("reinforce_pp_baseline", "none")
    with pytest.raises(ValueError, match="set normalise to 'none', got 'tokens'"):
        advantages.get("grpo")(np.zeros((1, 2)), np.ones((1, 2), bool), np.ones((1, 2), int), normalise="tokens")
