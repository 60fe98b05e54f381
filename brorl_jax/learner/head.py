"""Log-probabilities and entropies from hidden states, without ever holding tokens x vocabulary.

The head runs over chunks of tokens; the backward pass computes each chunk's logits again, so that the largest array in
either direction is ``[chunk, V]`` whatever the number of tokens. A chunk is every n-th token, so that on a mesh it is
spread over all devices that hold tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _logits(
    hidden: Float[Array, "C D"], weight: Float[Array, "D V"], temperature: Float[Array, ""], real_vocab: int
) -> Float[Array, "C V"]:
    logits = jnp.matmul(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32) / temperature
    if real_vocab < weight.shape[1]:
        logits = jnp.where(jnp.arange(weight.shape[1]) < real_vocab, logits, -jnp.inf)
    return logits


def _statistics(
    logits: Float[Array, "C V"], tokens: Int[Array, " C"]
) -> tuple[Float[Array, " C"], Float[Array, " C"], Float[Array, " C"]]:
    lse = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - lse
    logps = logits - lse[:, None]  # not lse - sum(p * logits), which loses what is left of a small entropy
    p = jnp.exp(logps)
    entropy = -jnp.sum(jnp.where(p > 0, p * logps, 0.0), axis=-1)
    return logp, entropy, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden, weight, tokens, temperature, real_vocab, chunk):
    return _forward(hidden, weight, tokens, temperature, real_vocab, chunk)[0]


@functools.partial(jax.named_call, name="head")
def _forward(hidden, weight, tokens, temperature, real_vocab, chunk):
    def one(_, xs):
        h, t = xs
        return None, _statistics(_logits(h, weight, temperature, real_vocab), t)

    _, (logp, entropy, lse) = jax.lax.scan(one, None, (_split(hidden, chunk), _split(tokens, chunk)))
    return (_join(logp), _join(entropy)), (hidden, weight, tokens, temperature, lse)


@functools.partial(jax.named_call, name="head")
def _backward(real_vocab, chunk, residuals, cotangents):
    hidden, weight, tokens, temperature, lse = residuals
    dtype = hidden.dtype

    def one(d_weight, xs):
        h, t, log_total, g = xs
        p = jnp.exp(_logits(h, weight, temperature, real_vocab) - log_total[:, None])
        hit = jnp.arange(weight.shape[1])[None, :] == t[:, None]
        d_logits = (g[:, None] * (hit - p) / temperature).astype(dtype)
        d_weight = d_weight + jnp.matmul(h.T, d_logits, preferred_element_type=jnp.float32)
        return d_weight, jnp.matmul(d_logits, weight.astype(dtype).T)

    xs = (_split(hidden, chunk), _split(tokens, chunk), lse, _split(cotangents[0], chunk))
    d_weight, d_hidden = jax.lax.scan(one, jnp.zeros(weight.shape, jnp.float32), xs)
    return _join(d_hidden), d_weight.astype(weight.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _split(x: Float[Array, "T ..."], chunk: int) -> Float[Array, "chunks chunk ..."]:
    return x.reshape(chunk, -1, *x.shape[1:]).swapaxes(0, 1)


def _join(x: Float[Array, "chunks chunk ..."]) -> Float[Array, "T ..."]:
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def logp_and_entropy(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "D V"],
    tokens: Int[Array, " T"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    real_vocab: int | None = None,
    chunk: int = 1024,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Log-probability of each token and entropy of its distribution, ``softmax(hidden @ weight / temperature)``.

    Differentiable in ``hidden`` and ``weight`` through the log-probability; the entropy is a metric and carries no
    gradient. Products run in ``hidden``'s dtype, the softmax in float32.

    Args:
        hidden: State that predicts ``tokens`` at the same place.
        weight: Output projection.
        tokens: Token ids in ``[0, V)``.
        temperature: Sampling temperature of the rollouts, so that ratios compare equals with equals.
        real_vocab: Ids from here on are padding of the embedding and get probability 0. Default: none are.
        chunk: Most tokens at a time; the largest intermediate array is ``[chunk, V]``.

    Returns:
        ``(logp, entropy)``, float32, entropy in nats.
    """
    count = tokens.shape[0]
    chunks = -(-count // chunk)
    chunk = -(-count // chunks)  # chunks of one size, with as little padding as there can be
    padding = chunks * chunk - count
    if padding:
        hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
        tokens = jnp.pad(tokens, (0, padding))
    real = weight.shape[1] if real_vocab is None else real_vocab
    results: Any = _chunked(hidden, weight, tokens, jnp.float32(temperature), real, chunk)
    logp, entropy = results
    return logp[:count], jax.lax.stop_gradient(entropy[:count])


def distributions(
    hidden: Float[Array, "C D"],
    weight: Float[Array, "D V"],
    *,
    temperature: float = 1.0,
    real_vocab: int | None = None,
) -> Float[Array, "C V"]:
    """The whole next-token distribution of a few chosen states; all of them are held, so never of a batch's tokens."""
    real = weight.shape[1] if real_vocab is None else real_vocab
    return jax.nn.softmax(_logits(hidden, weight, jnp.float32(temperature), real), axis=-1)
