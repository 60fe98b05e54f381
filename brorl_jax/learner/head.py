"""Log-probabilities and entropies from hidden states, without ever holding tokens x vocabulary.

The head runs over chunks of tokens; the backward pass computes each chunk's logits again, so that the largest array in
either direction is ``[chunk, V]`` on every device, whatever the number of tokens. On a mesh a device goes through its
own tokens and sums its own gradient of the weights; the sum over devices is taken once, after the last chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from brorl_jax.models.placement import size


def _logits(
    hidden: Float[Array, "*c D"], weight: Float[Array, "D V"], temperature: Float[Array, ""], real_vocab: int
) -> Float[Array, "*c V"]:
    logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32) / temperature
    if real_vocab < weight.shape[1]:
        logits = jnp.where(jnp.arange(weight.shape[1]) < real_vocab, logits, -jnp.inf)
    return logits


def _statistics(
    logits: Float[Array, "*c V"], tokens: Int[Array, "*c"]
) -> tuple[Float[Array, "*c"], Float[Array, "*c"], Float[Array, "*c"]]:
    lse = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - lse
    logps = logits - lse[..., None]  # not lse - sum(p * logits), which loses what is left of a small entropy
    p = jnp.exp(logps)
    entropy = -jnp.sum(jnp.where(p > 0, p * logps, 0.0), axis=-1)
    return logp, entropy, lse


# hidden [chunks, shards, chunk, D], tokens [chunks, shards, chunk]: scanned over chunks, shards stay where they are.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden, weight, tokens, temperature, real_vocab, over):
    return _forward(hidden, weight, tokens, temperature, real_vocab, over)[0]


@functools.partial(jax.named_call, name="head")
def _forward(hidden, weight, tokens, temperature, real_vocab, over):
    w = _whole(weight.astype(hidden.dtype), over)

    def one(_, xs):
        h, t = xs
        return None, _statistics(_logits(h, w, temperature, real_vocab), t)

    _, (logp, entropy, lse) = jax.lax.scan(one, None, (hidden, tokens))
    return (logp, entropy), (hidden, weight, tokens, temperature, lse)


@functools.partial(jax.named_call, name="head")
def _backward(real_vocab, over, residuals, cotangents):
    hidden, weight, tokens, temperature, lse = residuals
    w = _whole(weight.astype(hidden.dtype), over)

    def one(d_weight, xs):
        h, t, log_total, g = xs
        p = jnp.exp(_logits(h, w, temperature, real_vocab) - log_total[..., None])
        hit = jnp.arange(w.shape[1]) == t[..., None]
        d_logits = (g[..., None] * (hit - p) / temperature).astype(h.dtype)
        more = jnp.einsum("scd,scv->sdv", h, d_logits, preferred_element_type=jnp.float32)
        return _apart(d_weight + more, over), jnp.matmul(d_logits, w.T)

    start = _apart(jnp.zeros((hidden.shape[1], *weight.shape), jnp.float32), over)
    d_weight, d_hidden = jax.lax.scan(one, start, (hidden, tokens, lse, cotangents[0]))
    return d_hidden, d_weight.sum(0).astype(weight.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _whole(weight: Float[Array, "D V"], over: NamedSharding | None) -> Float[Array, "D V"]:
    """Gathered once, not chunk by chunk; its vocabulary may stay split."""
    return _place(weight, over, None)


def _apart(x: Float[Array, "shards D V"], over: NamedSharding | None) -> Float[Array, "shards D V"]:
    """Each device's own."""
    return _place(x, over, over.spec[0] if over else None)


def _place(x: Array, over: NamedSharding | None, first: object) -> Array:
    if over is None:
        return x
    spec = PartitionSpec(first, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(over.mesh, spec))


def logp_and_entropy(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "D V"],
    tokens: Int[Array, " T"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    real_vocab: int | None = None,
    chunk: int = 1024,
    over: NamedSharding | None = None,
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
        chunk: Most tokens at a time on each device; the largest intermediate array is ``[chunk, V]`` there.
        over: Sharding of ``tokens``, one stretch of them per device. Each device then holds a float32 gradient of its
            part of the vocabulary as long as the backward pass runs.

    Returns:
        ``(logp, entropy)``, float32, entropy in nats.
    """
    shards = 1 if over is None else size(over, over.spec[0])
    count = tokens.shape[0] // shards
    chunks = -(-count // chunk)
    chunk = -(-count // chunks)  # chunks of one size, with as little padding as there can be

    def split(x: Array) -> Array:
        x = x.reshape(shards, count, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, chunks * chunk - count), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(shards, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    def join(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(shards, -1)[:, :count].reshape(-1)

    real = weight.shape[1] if real_vocab is None else real_vocab
    results: Any = _chunked(split(hidden), weight, split(tokens), jnp.float32(temperature), real, over)
    logp, entropy = results
    return join(logp), jax.lax.stop_gradient(join(entropy))


def distributions(
    hidden: Float[Array, "C D"],
    weight: Float[Array, "D V"],
    *,
    temperature: float = 1.0,
    real_vocab: int | None = None,
) -> Float[Array, "C V"]:
    """The whole next-token distribution of a few chosen states; all of them are held, so never of a batch's tokens."""
    real = weight.shape[1] if real_vocab is None else real_vocab
    weight = weight.astype(hidden.dtype)
    return jax.nn.softmax(_logits(hidden, weight, jnp.float32(temperature), real), axis=-1)
