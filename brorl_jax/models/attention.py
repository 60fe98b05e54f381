"""Attention with grouped queries, over packed segments and over a shared prefix.

A response that attends to a shared prefix and to itself has one softmax over both sets of keys: exact, and the
prefix's keys and values are never repeated per response. (Two attentions merged by their log-sum-exp give the same
values, but the log-sum-exp of ``jax.nn.dot_product_attention`` carries no gradient, so the merged one would be wrong.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a query that sees nothing has no NaN, nor its gradient


def segment_mask(segment_ids: Int[Array, "*b T"]) -> Bool[Array, "*b T T"]:
    """Causal mask within segments; padding (segment 0) attends to nothing and nothing attends to it."""
    length = segment_ids.shape[-1]
    same = segment_ids[..., :, None] == segment_ids[..., None, :]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return same & causal & (segment_ids != 0)[..., None, :]


def attend(
    q: Float[Array, "B T H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"], mask: Bool[Array, "B T T"]
) -> Float[Array, "B T H h"]:
    """Softmax attention; a query with no visible key gets an arbitrary finite output."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def attend_with_prefix(
    q: Float[Array, "S rows T H h"],
    k: Float[Array, "S rows T K h"],
    v: Float[Array, "S rows T K h"],
    mask: Bool[Array, "S rows T T"],
    prefix_k: Float[Array, "S P K h"],
    prefix_v: Float[Array, "S P K h"],
    visible: Bool[Array, "S P"],
) -> Float[Array, "S rows T H h"]:
    """Each query attends to the keys of its row that ``mask`` allows and to its slot's ``visible`` prefix.

    One softmax over both, in float32. A query with no visible key gets an arbitrary finite output.
    """
    heads, dim = q.shape[-2:]
    kv_heads = k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, dim) * dim**-0.5
    # With bfloat16 the preset keeps the backward pass, too, from multiplying float32 by bfloat16.
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if q.dtype == jnp.bfloat16 else None

    def product(spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    # Both kinds of scores stay in the order their products come in (prefix: kv head before row; own: row before kv
    # head), which spares transposed copies; only what is summed over keys changes sides.
    on_prefix = product("srtkgh,spkh->skrtgp", grouped, prefix_k)
    on_prefix = jnp.where(visible[:, None, None, None, None], on_prefix, MASKED)
    on_own = jnp.where(mask[:, :, None, :, None], product("srtkgh,srukh->srktgu", grouped, k), MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(on_prefix.max(-1).swapaxes(1, 2), on_own.max(-1)))
    on_prefix = jnp.exp(on_prefix - top.swapaxes(1, 2)[..., None])
    on_own = jnp.exp(on_own - top[..., None])
    total = on_prefix.sum(-1).swapaxes(1, 2) + on_own.sum(-1)
    out = product("skrtgp,spkh->skrtgh", on_prefix.astype(v.dtype), prefix_v).swapaxes(1, 2)
    out = out + product("srktgu,srukh->srktgh", on_own.astype(v.dtype), v)
    return (out / total[..., None]).swapaxes(2, 3).reshape(q.shape).astype(q.dtype)
