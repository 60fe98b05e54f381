"""Engine/trainer correction weights and their diagnostics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.learner import mismatch

W = np.array([1.0, 0.4, 6.0, 0.5, 5.0, 1.001, 1.001, 0.9, 1.1, 3.0])
SEGMENTS = jnp.array([1, 1, 1, 2, 2, 3, 3, 4, 4, 0])
MASK = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0], bool)
ROLLOUT = jnp.full(10, -1.0)

diagnostics = jax.jit(mismatch.diagnostics)


def weights(kind, low=0.0, high=2.0, w=W, jit=False):
    function = mismatch.bind(kind, {"low": low, "high": high})
    old = jnp.asarray(-1.0 + np.log(w), jnp.float32)
    return np.asarray((jax.jit(function) if jit else function)(old, ROLLOUT, jnp.asarray(MASK), SEGMENTS))


@pytest.mark.parametrize("jit", [False, True])
def test_weights_by_hand(jit):
    np.testing.assert_array_equal(weights("none", jit=jit), MASK)
    np.testing.assert_allclose(weights("tis", jit=jit), np.where(MASK, np.minimum(W, 2), 0), rtol=1e-6)
    icepop = [1, 0, 0, 0.6, 4.9, 1.001, 1.001, 0.9, 1.1, 0]
    w = np.where(W == 0.5, 0.6, np.where(W == 5.0, 4.9, W))
    np.testing.assert_allclose(weights("mask", 0.5, 5.0, w, jit), icepop, rtol=1e-6)
    # Geometric means: cbrt(2.4), sqrt(2.5), 1.001, sqrt(0.99) = 0.995: only the third is inside [0.999, 1.002].
    np.testing.assert_allclose(
        weights("sequence_mask", 0.999, 1.002, jit=jit), np.where(SEGMENTS == 3, W, 0), rtol=1e-6
    )


def test_sequence_mask_keeps_untruncated_token_weights():
    w = np.array([1.0, 4.0, 0.25, 2.0, 0.5, 1, 1, 1, 1, 1])  # both geometric means are 1
    np.testing.assert_allclose(weights("sequence_mask", 0.999, 1.002, w), np.where(MASK, w, 0), rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(mismatch.MISMATCH))
def test_no_gradient_and_no_overflow(kind):
    function = mismatch.bind(kind, {"low": 0.5, "high": 1e9})

    def total(old):
        return function(old, ROLLOUT, jnp.asarray(MASK), SEGMENTS).sum()

    value, gradient = jax.value_and_grad(total)(jnp.full(10, 1e4))
    assert np.isfinite(value)
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("n", [1, 7, 100, 150, 1000])
def test_diagnostics_match_numpy(n):
    rng = np.random.default_rng(n)
    old, rollout = rng.normal(-2, 1, (2, n)).astype(np.float32), rng.normal(-2, 1, (2, n)).astype(np.float32)
    mask = np.zeros((2, n), bool)
    mask[0] = True
    out = diagnostics(old, np.where(mask, rollout, np.nan), mask)
    delta = (old[0].astype(np.float64) - rollout[0])[:n]
    gap, w = np.abs(delta), np.exp(delta)
    np.testing.assert_allclose(out["mean"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(out["max"], gap.max(), rtol=1e-6)
    np.testing.assert_allclose(out["p99"], np.sort(gap)[-(-99 * n // 100) - 1], rtol=1e-6)
    np.testing.assert_allclose(out["kl"], (w - 1 - delta).mean(), rtol=1e-4)
    np.testing.assert_allclose(out["ess"], w.sum() ** 2 / (n * (w**2).sum()), rtol=1e-5)


def test_diagnostic_kl_points_from_engine_to_trainer():
    # Engine (1/2, 1/2), trainer (1/4, 3/4), each token seen once: the mean is the exact expectation under the engine.
    engine, trainer = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    out = diagnostics(jnp.log(trainer), jnp.log(engine), jnp.ones(2, bool))
    np.testing.assert_allclose(out["kl"], (engine * np.log(engine / trainer)).sum(), rtol=1e-5)


def test_diagnostics_without_mismatch_or_tokens():
    logp = jnp.array([-0.3, -7.0])
    for mask in (jnp.ones(2, bool), jnp.zeros(2, bool)):
        out = diagnostics(logp, logp, mask)
        assert {k: float(v) for k, v in out.items()} == {"mean": 0, "max": 0, "p99": 0, "kl": 0, "ess": 1}


def test_settings_and_names():
    assert mismatch.hyperparameters("none") == ()
    assert mismatch.hyperparameters("tis") == ("high",)
    assert mismatch.hyperparameters("mask") == mismatch.hyperparameters("sequence_mask") == ("low", "high")
    with pytest.raises(
        ValueError, match=r"unknown mismatch correction 'icepop'; known: mask, none, sequence_mask, tis"
    ):
        mismatch.get("icepop")
