"""Attention with grouped queries, over packed segments and over a shared prefix, in three forms of one function.

A response that attends to a shared prefix and to itself has one softmax over both sets of keys: exact, and the
prefix's keys and values are never repeated per response. (Two attentions merged by their log-sum-exp give the same
values, but the log-sum-exp of ``jax.nn.dot_product_attention`` carries no gradient, so the merged one would be wrong.)

``ATTENTION`` has the forms by name:

- ``xla`` holds all scores, ``[rows, T, P + T]`` in float32: the fastest for short rows, and what the others are
  compared with.
- ``blockwise`` holds one block of scores at a time, see ``models.blockwise``.
- ``cudnn`` is cuDNN's flash attention over the prefix and the row joined together: NVIDIA GPUs, bfloat16. It has no
  scores either, but an additive mask ``[rows, P + T, P + T]`` in bfloat16 for all heads together, and its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.models import blockwise
from brorl_jax.models.blockwise import product

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


def attend_joined(
    q: Float[Array, "S rows T H h"],
    k: Float[Array, "S rows T K h"],
    v: Float[Array, "S rows T K h"],
    segment_ids: Int[Array, "S rows T"],
    prefix_k: Float[Array, "S P K h"],
    prefix_v: Float[Array, "S P K h"],
    prefix_len: Int[Array, " S"],
    *,
    implementation: str,
) -> Float[Array, "S rows T H h"]:
    """``jax.nn.dot_product_attention`` over prefix and row in one sequence, the prefix repeated for every row.

    Blind queries stand in for the prefix's, so that the whole is causal and cuDNN leaves out what comes later; they
    cost ``P / (P + T)``, little for the long rows that this is for. Outputs of padding are 0, and what padding holds
    reaches nothing, as in ``blockwise``.

    Args:
        implementation: Of ``dot_product_attention``: ``cudnn``, or ``xla`` to check the same masks without a GPU.
    """
    slots, rows, length = segment_ids.shape
    prefix = prefix_k.shape[1]
    before = prefix + (prefix + length) % 2  # cuDNN wants an even length with a mask
    valid = segment_ids > 0
    visible = jnp.pad(jnp.arange(prefix) < prefix_len[:, None], [(0, 0), (before - prefix, 0)])

    def join(own: Array, shared: Array | None) -> Array:
        head = jnp.zeros((slots, before, *own.shape[3:]), own.dtype)
        if shared is not None:
            padded = jnp.pad(shared, [(0, 0), (before - prefix, 0), (0, 0), (0, 0)])
            head = jnp.where(visible[..., None, None], padded, 0)
        head = jnp.broadcast_to(head[:, None], (slots, rows, *head.shape[1:]))
        own = jnp.where(valid[..., None, None], own, 0)
        return jnp.concatenate([head, own], axis=2).reshape(slots * rows, before + length, *own.shape[3:])

    def repeated(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], (slots, rows, before))

    queries = jnp.concatenate([repeated(jnp.zeros_like(visible, jnp.int32)), segment_ids], axis=2)
    keys = jnp.concatenate([repeated(jnp.where(visible, -1, -2)), segment_ids], axis=2)
    mask = (keys[:, :, None] == queries[..., None]) | (keys[:, :, None] == -1)
    mask &= (queries > 0)[..., None]
    out = jax.nn.dot_product_attention(
        join(q, None), join(k, prefix_k), join(v, prefix_v),
        mask=mask.reshape(slots * rows, 1, before + length, before + length),
        is_causal=True, implementation=implementation,  # type: ignore[arg-type]
    )  # fmt: skip
    out = out.reshape(slots, rows, before + length, *q.shape[3:])[:, :, before:]
    return jnp.where(valid[..., None, None], out, 0)


Alone = Callable[[Array, Array, Array], Array]  # (q, k, v), [S P ...]
WithPrefix = Callable[[Array, Array, Array, Array, Array], Array]  # (q, k, v, prefix_k, prefix_v)


class Bound(NamedTuple):
    """One form of attention for the segments and prefixes of a batch; what is computed from them, once for all layers.

    Attributes:
        prompts: Causal attention of every slot's prefix to itself.
        rows: Attention of rows to themselves and to their slot's prefix.
    """

    prompts: Alone
    rows: WithPrefix


def _xla(segment_ids: Array, prefix_len: Array, prefix: int, *, block: int, shards: int) -> Bound:
    visible = jnp.arange(prefix) < prefix_len[:, None]
    prefix_mask, own_mask = segment_mask(visible.astype(jnp.int32)), segment_mask(segment_ids)
    return Bound(
        lambda q, k, v: attend(q, k, v, prefix_mask),
        lambda q, k, v, prefix_k, prefix_v: attend_with_prefix(q, k, v, own_mask, prefix_k, prefix_v, visible),
    )


def _streamed(
    attention: Callable[..., Array], segment_ids: Array, prefix_len: Array, prefix: int, **of_rows: int
) -> Bound:
    """A form that takes segments and lengths instead of masks; the prompts are rows without a prefix."""

    def prompts(q: Array, k: Array, v: Array) -> Array:
        own = (jnp.arange(prefix) < prefix_len[:, None]).astype(jnp.int32)
        nothing = k[:, :0]
        q, k, v, own = (x[:, None] for x in (q, k, v, own))
        return attention(q, k, v, own, nothing, nothing, jnp.zeros_like(prefix_len))[:, 0]

    def rows(q: Array, k: Array, v: Array, prefix_k: Array, prefix_v: Array) -> Array:
        return attention(q, k, v, segment_ids, prefix_k, prefix_v, prefix_len, **of_rows)

    return Bound(prompts, rows)


def _blockwise(segment_ids: Array, prefix_len: Array, prefix: int, *, block: int, shards: int) -> Bound:
    attention = functools.partial(blockwise.attend, block=block)
    return _streamed(attention, segment_ids, prefix_len, prefix, shards=shards)


def _cudnn(segment_ids: Array, prefix_len: Array, prefix: int, *, block: int, shards: int) -> Bound:
    if shards > 1:
        raise ValueError(f"attention 'cudnn' takes whole rows, but they are split over {shards} devices")
    return _streamed(functools.partial(attend_joined, implementation="cudnn"), segment_ids, prefix_len, prefix)


# name -> (segment_ids [S rows T], prefix_len [S], P, block=most keys at a time, shards=devices of a row) -> Bound
ATTENTION: dict[str, Callable[..., Bound]] = {"xla": _xla, "blockwise": _blockwise, "cudnn": _cudnn}
