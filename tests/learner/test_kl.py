"""KL estimators, value and gradient, against exact KL on five tokens, every token enumerated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.learner import kl

LOGITS = np.array([0.3, -1.2, 0.8, 0.0, -0.4])
REF_LOGITS = np.array([-0.5, 0.1, 0.9, -0.2, 0.6])
ALL = jnp.ones(5, bool)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


PI, REF = softmax(LOGITS), softmax(REF_LOGITS)
D = np.log(PI / REF)
REVERSE = (PI * D).sum()  # KL(pi || ref)


def expectation(name, jit=False):
    """E over pi of the estimator, and the expected gradient of using it as a loss, with respect to the logits."""

    def loss(logits):
        values = kl.get(name)(jax.nn.log_softmax(logits), jnp.asarray(np.log(REF), jnp.float32), ALL)
        return jnp.sum(jnp.asarray(PI, jnp.float32) * values)  # the sampling weights carry no gradient

    function = jax.value_and_grad(loss)
    return (jax.jit(function) if jit else function)(jnp.asarray(LOGITS, jnp.float32))


@pytest.mark.parametrize("jit", [False, True])
def test_values(jit):
    np.testing.assert_allclose(expectation("k1", jit)[0], REVERSE, rtol=1e-5)
    np.testing.assert_allclose(expectation("k3", jit)[0], REVERSE, rtol=1e-5)
    np.testing.assert_allclose(expectation("k2", jit)[0], (PI * D**2 / 2).sum(), rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_descend_the_documented_divergence(jit):
    # d KL(pi || ref) / d logits_i = pi_i (d_i - KL);  d KL(ref || pi) / d logits_i = pi_i - ref_i.
    np.testing.assert_allclose(expectation("k1", jit)[1], np.zeros(5), atol=1e-7)
    np.testing.assert_allclose(expectation("k2", jit)[1], PI * (D - REVERSE), atol=1e-6)
    np.testing.assert_allclose(expectation("k3", jit)[1], PI - REF, atol=1e-6)


def test_k2_is_kl_to_second_order():
    step = np.array([1.0, -2.0, 0.5, 0.3, 0.2])
    errors = []
    for size in (0.1, 0.05):
        near = softmax(REF_LOGITS + size * step)
        d = np.log(near / REF)
        value = kl.k2(jnp.asarray(np.log(near), jnp.float32), jnp.asarray(np.log(REF), jnp.float32), ALL)
        errors.append(abs((near * np.asarray(value)).sum() - (near * d).sum()))
    assert errors[1] < errors[0] / 6  # third order: an eighth for half the distance


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_monte_carlo_mean_within_three_sigma(name):
    tokens = np.random.default_rng(0).choice(5, size=20_000, p=PI)
    logp, ref_logp = (jnp.asarray(np.log(p)[tokens], jnp.float32) for p in (PI, REF))
    values = np.asarray(kl.get(name)(logp, ref_logp, jnp.ones(tokens.shape, bool)), np.float64)
    assert abs(values.mean() - REVERSE) < 3 * values.std() / np.sqrt(values.size)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_identical_reference_is_exactly_zero(name):
    logp = jnp.asarray(np.random.default_rng(1).normal(-3, 2, 64), jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: kl.get(name)(x, logp, jnp.ones(64, bool)).sum())(logp)
    assert value == 0
    np.testing.assert_array_equal(gradient, 1.0 if name == "k1" else 0.0)


def test_clamps_by_hand():
    logp, ref_logp = jnp.array([0.0, -100.0, 0.0]), jnp.array([-100.0, 0.0, -0.5])
    three = jnp.ones(3, bool)
    np.testing.assert_allclose(kl.k1(logp, ref_logp, three), [10, -10, 0.5])
    np.testing.assert_allclose(kl.k2(logp, ref_logp, three), [50, 50, 0.125])
    np.testing.assert_allclose(
        kl.k3(logp, ref_logp, three), [9 + np.exp(-10), np.exp(10) - 11, np.exp(-0.5) - 0.5], rtol=1e-6
    )
    # [NR]: log-ratio 20, value 10.
    bounded = kl.k3(logp, ref_logp, three, clamp=20.0, clamp_output=10.0)
    np.testing.assert_allclose(bounded, [10, 10, np.exp(-0.5) - 0.5], rtol=1e-6)
    gradient = jax.grad(lambda x: kl.k2(x, ref_logp, three).sum())(logp)
    np.testing.assert_array_equal(gradient, [0, 0, 0.5])


def test_refusals():
    with pytest.raises(ValueError, match="'k1' has zero expected gradient"):
        kl.get_loss("k1")
    assert kl.get_loss("k2") is kl.k2
    with pytest.raises(ValueError, match="unknown KL estimator 'abs'; known: k1, k2, k3"):
        kl.get_loss("abs")
    with pytest.raises(ValueError, match="must be positive, got 0"):
        kl.k2(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool), clamp=0)
    with pytest.raises(ValueError, match=r"must be >= 0 .* got -1"):
        kl.k2(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool), clamp_output=-1)
