"""The chunked head against a softmax in NumPy float64 that holds everything at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.learner.head import logp_and_entropy

T, D, V = 29, 12, 41
rng = np.random.default_rng(0)
HIDDEN = rng.standard_normal((T, D)).astype(np.float32)
WEIGHT = rng.standard_normal((D, V)).astype(np.float32)
TOKENS = rng.integers(0, 37, T)
COTANGENT = rng.standard_normal(T).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("real_vocab", "chunk"))
def run(hidden, weight, tokens, cotangent, temperature=1.0, real_vocab=None, chunk=8):
    """Log-probabilities, entropies, and gradients of ``sum(cotangent * logp + entropy)``."""

    def total(hidden, weight):
        logp, entropy = logp_and_entropy(
            hidden, weight, tokens, temperature=temperature, real_vocab=real_vocab, chunk=chunk
        )
        return jnp.sum(cotangent * logp + entropy), (logp, entropy)

    (_, values), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, weight)
    return *values, *gradients


def exact(temperature=1.0, real_vocab=V, hidden=HIDDEN, weight=WEIGHT):
    """The same in float64; the entropy is a metric, so its gradient is not in there."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits = hidden @ weight[:, :real_vocab] / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    logp = np.log(p[np.arange(T), TOKENS])
    entropy = -(p * np.log(p)).sum(-1)
    d_logits = np.zeros((T, V))
    d_logits[:, :real_vocab] = -p * COTANGENT[:, None] / temperature
    d_logits[np.arange(T), TOKENS] += COTANGENT / temperature
    return logp, entropy, d_logits @ weight.T, hidden.T @ d_logits


@pytest.mark.parametrize("chunk", [1, 2, 8, 28, 29, 30, 1000])
def test_values_and_gradients_in_chunks_of_any_size(chunk):
    for ours, theirs in zip(run(HIDDEN, WEIGHT, TOKENS, COTANGENT, chunk=chunk), exact(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3, 5.0])
def test_temperature_divides_the_logits(temperature):
    ours = run(HIDDEN, WEIGHT, TOKENS, COTANGENT, temperature)
    for a, b in zip(ours, exact(temperature), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_a_small_entropy_keeps_its_digits():
    """Entropy 1.2e-3 under logits of 1,000 and 991: the difference of two large numbers would leave noise."""
    hidden, weight = np.float32([[1.0, 0.0]]), np.float32([[1000.0, 991.0, -1000.0], [0.0, 0.0, 0.0]])
    q = 1 / (1 + np.exp(9.0))
    entropy = run(hidden, weight, np.array([0]), np.ones(1, np.float32))[1]
    np.testing.assert_allclose(entropy, -q * np.log(q) - (1 - q) * np.log1p(-q), rtol=0.01)


def test_padded_ids_get_no_probability_and_no_gradient():
    logp, entropy, d_hidden, d_weight = run(HIDDEN, WEIGHT, TOKENS, COTANGENT, real_vocab=37)
    for a, b in zip((logp, entropy, d_hidden, d_weight), exact(real_vocab=37), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(d_weight)[:, 37:], 0.0)
    # However large their logits are: nothing of them is seen.
    loud = WEIGHT.copy()
    loud[:, 37:] = 1e6
    for a, b in zip(run(HIDDEN, loud, TOKENS, COTANGENT, real_vocab=37), (logp, entropy), strict=False):
        np.testing.assert_array_equal(a, b)


def test_probabilities_sum_to_one():
    tokens = np.arange(V)
    logp = run(np.repeat(HIDDEN[:1], V, 0), WEIGHT, tokens, np.zeros(V, np.float32), 0.7)[0]
    np.testing.assert_allclose(np.exp(np.asarray(logp, np.float64)).sum(), 1.0, rtol=1e-6)


def test_extreme_logits_stay_finite():
    """Logits of +-30,000: the softmax is one-hot, the entropy 0, and nothing overflows in either direction."""
    hidden, weight = 1e4 * HIDDEN, 3.0 * WEIGHT
    logp, entropy, d_hidden, d_weight = run(hidden, weight, TOKENS, COTANGENT)
    best = (hidden @ weight).argmax(-1)
    assert (best != TOKENS).any()
    for x in (logp, entropy, d_hidden, d_weight):
        assert np.isfinite(x).all()
    top = run(hidden, weight, best, COTANGENT)
    np.testing.assert_allclose(top[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(top[1], 0.0, atol=1e-4)


def test_bfloat16_states_and_float32_softmax():
    """Products see rounded inputs; everything after them is float32: equal to float64 on the rounded inputs."""
    hidden, weight = (jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, WEIGHT))
    logp, entropy, d_hidden, d_weight = run(hidden, jnp.asarray(WEIGHT), TOKENS, COTANGENT)
    assert logp.dtype == entropy.dtype == jnp.float32
    assert d_hidden.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32
    rounded = [np.asarray(x, np.float32) for x in (hidden, weight)]
    for a, b in zip((logp, entropy), exact(1.0, V, *rounded), strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
    for a, b in zip((d_hidden, d_weight), exact(1.0, V, *rounded)[2:], strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= 2**-8 * np.linalg.norm(b)


def test_gradient_is_that_of_automatic_differentiation():
    def plain(hidden, weight):
        logp = jax.nn.log_softmax(hidden @ weight / 0.6)
        return jnp.sum(COTANGENT * logp[jnp.arange(T), TOKENS])

    theirs = jax.grad(plain, argnums=(0, 1))(HIDDEN, WEIGHT)
    for a, b in zip(run(HIDDEN, WEIGHT, TOKENS, COTANGENT, 0.6)[2:], theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "chunk", "size"), [(29, 8, 8), (33, 32, 17), (64, 32, 32), (5, 100, 5)])
def test_chunks_are_of_one_size_and_none_is_mostly_padding(count, chunk, size):
    hidden, tokens = jnp.zeros((count, D)), jnp.zeros(count, jnp.int32)
    jaxpr = str(jax.make_jaxpr(lambda h: logp_and_entropy(h, WEIGHT, tokens, chunk=chunk))(hidden))
    assert f"f32[1,{size},{V}]" in jaxpr and f"{count},{V}]" not in jaxpr.replace(f"{size},{V}]", "")
