"""Drawing tokens: one token per row from its logits, with a random stream that belongs to the sample alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 64  # tokens per block of the two-level search; about sqrt(V) for the vocabularies in use


def seed_words(seeds: np.ndarray) -> np.ndarray:
    """63-bit seeds ``[*b]`` as uint32 words ``[*b, 2]``."""
    seeds = np.asarray(seeds, np.uint64)
    return np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def uniforms(words: UInt32[Array, "*b 2"], t: Int[Array, "*b"]) -> Float[Array, "*b 2"]:
    """Two uniforms in [0, 1) for token ``t`` of each sample: a function of (seed, t), whatever the batch."""

    def one(word: Array, t: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(word), t), (2,))

    flat = jax.vmap(one)(words.reshape(-1, 2), t.reshape(-1))
    return flat.reshape(*t.shape, 2)


def restrict(
    logits: Float[Array, "B V"], top_p: Float[Array, ""], top_k: Int[Array, ""], min_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Sets tokens outside top-k, then outside the nucleus, then below min-p to -inf. The most likely always stays."""
    ordered = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    keep = (top_k < 1) | (rank < top_k)
    kept = jnp.where(keep, p, 0.0)
    kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
    before = jnp.cumsum(kept, axis=-1) - kept
    keep = keep & ((before < top_p) | (top_p >= 1)) & (kept >= min_p * kept[:, :1])
    keep = keep | (rank == 0)
    threshold = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def draw(logits: Float[Array, "B V"], u: Float[Array, "B 2"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Samples from ``softmax(logits)`` by inverting the distribution function in two levels.

    ``u[:, 0]`` picks a block of tokens by its mass, ``u[:, 1]`` a token within it. One pass over the logits and two
    uniforms per token; Gumbel noise would need V. Resolution: 2^-23 of the total for blocks, and again within.

    Returns:
        ``(tokens, logp)``; a token of probability 0 is never drawn.
    """
    rows, vocab = logits.shape
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.pad(jnp.exp(logits - peak), ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    masses = jnp.sum(weights, axis=-1)
    block = _invert(masses, u[:, 0])
    token = block * BLOCK + _invert(weights[jnp.arange(rows), block], u[:, 1])
    total = jnp.sum(masses, axis=-1)
    logp = jnp.take_along_axis(logits - peak, token[:, None], axis=-1)[:, 0] - jnp.log(total)
    return token, logp


def _invert(weights: Float[Array, "B n"], u: Float[Array, " B"]) -> Int[Array, " B"]:
    cumulative = jnp.cumsum(weights, axis=-1)
    # A parallel sum can rise by an ulp over a weight of 0, and the target can round up to the total.
    possible = weights > 0
    beyond = possible & (cumulative > u[:, None] * cumulative[:, -1:])
    last = weights.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), last)


def greedy(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The most likely token and its log-probability."""
    token = jnp.argmax(logits, axis=-1)
    return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
