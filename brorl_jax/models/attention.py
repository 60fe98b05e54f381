"""Attention with grouped queries, over packed segments and over a shared prefix.

Everything goes through ``jax.nn.dot_product_attention``, which is fused flash attention on GPUs. A response that
attends to a shared prefix and to itself is two attentions merged by their log-sum-exp: exact, and the prefix's
keys and values are never repeated per response.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_mask(segment_ids: Int[Array, "*b T"]) -> Bool[Array, "*b T T"]:
    """Causal mask within segments; padding (segment 0) attends to nothing and nothing attends to it."""
    length = segment_ids.shape[-1]
    same = segment_ids[..., :, None] == segment_ids[..., None, :]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return same & causal & (segment_ids != 0)[..., None, :]


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    mask: Bool[
        Array,
        (
            B  # T S
        ),
    ],
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T H"]]:
    """Softmax attention and its log-sum-exp (float32).

    A query with no visible key gets an arbitrary finite output and a log-sum-exp so low that ``merge`` ignores it.
    """
    out, lse = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], return_residual=True)
    return out, lse.astype(jnp.float32)


def merge(
    a: tuple[Float[Array, "*b h"], Float[Array, "*b"]], b: tuple[Float[Array, "*b h"], Float[Array, "*b"]]
) -> Float[Array, "*b h"]:
    """The attention over the union of two disjoint key sets, from each set's output and log-sum-exp.

    ``softmax([s_a, s_b]) [v_a; v_b] = w out_a + (1 - w) out_b`` with ``w = sigmoid(lse_a - lse_b)``.
    """
    weight = jax.nn.sigmoid(a[1] - b[1])[..., None]
    return (weight * a[0] + (1.0 - weight) * b[0]).astype(a[0].dtype)
