"""Attention without a row's scores: keys in blocks, an online softmax, and a backward pass that computes scores again.

The algorithm of FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithms 1 and 2) in plain JAX, over two sets of keys:
those of the row, causal within segments, and those of a prefix that all rows of a slot share. Besides inputs and
outputs it holds one block of scores at a time, ``[block, block]`` for each head and row. Blocks of keys that come after
a block of queries are not visited.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Arrays are ordered "s k r c t g h": slots, key/value heads, rows, shards of a row, queries, heads of a group, head
# dimension; "u" counts keys. Products then need no transposed copies, over the row's keys (with rows) or a prefix's.
OWN, PREFIX = "skruh", "skuh"

Blocks = Any  # (q, q_segments), (k, v, k_segments), (prefix_k, prefix_v, visible), each with its blocks on axis 0


def product(spec: str, a: Array, b: Array) -> Array:
    """``einsum`` with a float32 result; with bfloat16 the preset keeps the backward pass, too, from mixed products."""
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if a.dtype == jnp.bfloat16 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def attend(
    q: Float[Array, "S rows T H h"],
    k: Float[Array, "S rows T K h"],
    v: Float[Array, "S rows T K h"],
    segment_ids: Int[Array, "S rows T"],
    prefix_k: Float[Array, "S P K h"],
    prefix_v: Float[Array, "S P K h"],
    prefix_len: Int[Array, " S"],
    *,
    block: int,
    shards: int = 1,
) -> Float[Array, "S rows T H h"]:
    """Each query attends to earlier keys of its segment and to the first ``prefix_len`` of its slot's prefix.

    Softmax and sums in float32. Outputs of padding (segment 0) are 0; whatever padding and the rest of the prefix hold,
    NaN included, reaches neither an output nor a gradient.

    Args:
        prefix_k: ``P`` may be 0.
        block: Most queries, and most keys, at a time.
        shards: Devices that a row's queries are split over; ``T`` must be a multiple. All of them see all keys, so
            that none can be left out: with more than one, every block of keys is visited.
    """
    slots, rows, length, heads, dim = q.shape
    kv_heads, prefix = k.shape[3], prefix_k.shape[1]
    valid, visible = segment_ids > 0, jnp.arange(prefix) < prefix_len[:, None]
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, k, v))
    prefix_k, prefix_v = (jnp.where(visible[..., None, None], x, 0) for x in (prefix_k, prefix_v))
    grouped = (q * dim**-0.5).reshape(slots, rows, shards, length // shards, kv_heads, heads // kv_heads, dim)
    shared = segment_ids.reshape(grouped.shape[:4])
    blocks: Blocks = (
        (_split(grouped.transpose(0, 4, 1, 2, 3, 5, 6), 4, block), _split(shared, 3, block)),
        (*(_split(x.transpose(0, 3, 1, 2, 4), 3, block) for x in (k, v)), _split(segment_ids, 2, block)),
        (*(_split(x.transpose(0, 2, 1, 3), 2, block) for x in (prefix_k, prefix_v)), _split(visible, 1, block)),
    )  # fmt: skip
    out: Any = _attend(blocks, length // shards)
    out = _join(out, 4, length // shards).transpose(0, 2, 3, 4, 1, 5, 6).reshape(q.shape)
    return jnp.where(valid[..., None, None], out, 0)


def _split(x: Array, axis: int, block: int) -> Array:
    """Blocks of one size, at most ``block``, along a new first axis; padded with zeros, as little as can be."""
    count = -(-x.shape[axis] // block)
    size = -(-x.shape[axis] // max(count, 1))
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: Array, axis: int, length: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _own_allowed(blocks: Blocks, length: int, i: Array, j: Array) -> Array:
    """Which keys of block ``j`` the queries of block ``i`` see: ``[s 1 r c t 1 u]``."""
    q_segments, k_segments = blocks[0][1][i], blocks[1][2][j]
    _, _, shards, size = q_segments.shape
    width = k_segments.shape[-1]
    query = jnp.arange(shards)[:, None] * length + i * size + jnp.arange(size)  # place in the row
    causal = j * width + jnp.arange(width) <= query[..., None]
    same = (q_segments[..., None] == k_segments[:, :, None, None]) & (k_segments > 0)[:, :, None, None]
    return (same & causal)[:, None, :, :, :, None]


def _prefix_allowed(blocks: Blocks, i: Array, j: Array) -> Array:
    seen = (blocks[0][1][i] > 0)[..., None] & blocks[2][2][j][:, None, None, None]
    return seen[:, None, :, :, :, None]


def _own_end(blocks: Blocks, i: Array) -> Array | int:
    """Blocks of keys from here on come after every query of block ``i``."""
    (q, _), (k, _, _), _ = blocks
    shards, size, width = q.shape[4], q.shape[5], k.shape[4]
    return jnp.minimum(-(-(i + 1) * size // width), len(k)) if shards == 1 else len(k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(blocks: Blocks, length: int) -> Array:
    return _forward(blocks, length)[0]


def _forward(blocks: Blocks, length: int) -> tuple[Array, Any]:
    (q, _), (k, v, _), (prefix_k, prefix_v, _) = blocks

    def fold(carry: Any, q: Array, k: Array, v: Array, allowed: Array, keys: str) -> Any:
        top, total, out = carry
        scores = jnp.where(allowed, product(f"skrctgh,{keys}->skrctgu", q, k), -jnp.inf)
        new = jnp.maximum(top, scores.max(-1))
        base = jnp.where(new == -jnp.inf, 0.0, new)  # nothing seen so far
        weights, shrink = jnp.exp(scores - base[..., None]), jnp.exp(top - base)
        out = out * shrink[..., None] + product(f"skrctgu,{keys}->skrctgh", weights.astype(v.dtype), v)
        return new, total * shrink + weights.sum(-1), out

    def one(i: Array, q: Array) -> tuple[Array, Array]:
        shape = q.shape[:-1]
        carry = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape)
        if len(prefix_k):
            carry = jax.lax.fori_loop(
                0,
                len(prefix_k),
                lambda j, c: fold(c, q, prefix_k[j], prefix_v[j], _prefix_allowed(blocks, i, j), PREFIX),
                carry,
            )
        top, total, out = jax.lax.fori_loop(
            0, _own_end(blocks, i), lambda j, c: fold(c, q, k[j], v[j], _own_allowed(blocks, length, i, j), OWN), carry
        )
        blind = total == 0
        total = jnp.where(blind, 1.0, total)
        return (out / total[..., None]).astype(q.dtype), jnp.where(blind, 0.0, top) + jnp.log(total)

    _, (out, lse) = jax.lax.scan(lambda _, x: (None, one(*x)), None, (jnp.arange(len(q)), q))
    return out, (blocks, out, lse)


def _backward(length: int, residuals: Any, d_out: Array) -> tuple[Any]:
    blocks, out, lse = residuals
    (q, _), (k, v, _), (prefix_k, prefix_v, _) = blocks
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)

    def unfold(carry: Any, j: Array, x: Any, k: Array, v: Array, allowed: Array, keys: str) -> Any:
        d_q, d_k, d_v = carry
        q, d_out, lse, delta = x
        scores = jnp.where(allowed, product(f"skrctgh,{keys}->skrctgu", q, k), -jnp.inf)
        weights = jnp.exp(scores - lse[..., None])
        d_weights = product(f"skrctgh,{keys}->skrctgu", d_out, v)
        d_scores = (weights * (d_weights - delta[..., None])).astype(q.dtype)
        # Each shard keeps its own sum over its queries: one exchange at the end instead of one per block.
        summed = keys.replace("u", "cu")
        d_v = d_v.at[j].add(product(f"skrctgu,skrctgh->{summed}", weights.astype(q.dtype), d_out))
        d_k = d_k.at[j].add(product(f"skrctgu,skrctgh->{summed}", d_scores, q))
        return d_q + product(f"skrctgu,{keys}->skrctgh", d_scores, k), d_k, d_v

    def one(carry: Any, xs: Any) -> tuple[Any, Array]:
        i, *x = xs
        own, prefix = carry
        d_q = jnp.zeros(x[0].shape)
        if len(prefix_k):
            d_q, *prefix = jax.lax.fori_loop(
                0,
                len(prefix_k),
                lambda j, c: unfold(c, j, x, prefix_k[j], prefix_v[j], _prefix_allowed(blocks, i, j), PREFIX),
                (d_q, *prefix),
            )
        d_q, *own = jax.lax.fori_loop(
            0,
            _own_end(blocks, i),
            lambda j, c: unfold(c, j, x, k[j], v[j], _own_allowed(blocks, length, i, j), OWN),
            (d_q, *own),
        )
        return (own, prefix), d_q.astype(q.dtype)

    def zeros(x: Array) -> Array:
        return jnp.zeros((*x.shape[:-2], q.shape[4], *x.shape[-2:]))

    start = [zeros(k), zeros(v)], [zeros(prefix_k), zeros(prefix_v)]
    (own, prefix), d_q = jax.lax.scan(one, start, (jnp.arange(len(q)), q, d_out, lse, delta))
    d_own, d_prefix = ([d.sum(-3).astype(q.dtype) for d in pair] for pair in (own, prefix))
    return (((d_q, None), (*d_own, None), (*d_prefix, None)),)


_attend.defvjp(_forward, _backward)
