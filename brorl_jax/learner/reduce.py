"""From tokens to a scalar: the only place where a loss is reduced.

The total loss of a mini-batch is ``sum over all its tokens of loss * weight``, where the weights carry the **global**
denominators, counted once over the whole mini-batch. Micro-batches and shards are then plain sums of the same terms,
however the tokens are distributed; nothing is ever averaged twice.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from brorl_jax.learner.registry import lookup


def masked_sum(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """``sum(x where mask)`` in float32; what lies outside it, NaN included, changes nothing."""
    return jnp.sum(jnp.where(mask, x, 0.0).astype(jnp.float32))


def masked_mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean over the mask, 0 where it is empty. For metrics of one array; losses use the weights below."""
    return masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1)


def _segment_sum(x: Array, segment_ids: Array) -> Array:
    # T tokens hold at most T responses, and id 0 is padding.
    return jax.ops.segment_sum(x, segment_ids, num_segments=segment_ids.shape[0] + 1)


def segment_lengths(mask: Bool[Array, " T"], segment_ids: Int[Array, " T"]) -> Float[Array, " T"]:
    """For each token the number of masked-in tokens of its response, float32 ``[T]``."""
    return _segment_sum(mask.astype(jnp.float32), segment_ids)[segment_ids]


def segment_mean(x: Float[Array, " T"], mask: Bool[Array, " T"], segment_ids: Int[Array, " T"]) -> Float[Array, " T"]:
    """For each token the mean of ``x`` over the masked-in tokens of its response, 0 where there are none."""
    total = _segment_sum(jnp.where(mask, x, 0.0), segment_ids)[segment_ids]
    return total / jnp.maximum(segment_lengths(mask, segment_ids), 1.0)


def counts(mask: Bool[Array, " T"], segment_ids: Int[Array, " T"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Trained tokens, and responses with at least one trained token, float32 scalars.

    Add them over micro-batches and shards to get the global denominators.
    """
    lengths = _segment_sum(mask.astype(jnp.float32), segment_ids)
    return jnp.sum(mask.astype(jnp.float32)), jnp.sum((lengths > 0).astype(jnp.float32))


def _per(mask: Array, denominator: ArrayLike) -> Array:
    """``1 / denominator`` where masked in, else 0; an empty batch has weight 0, not a division by 0."""
    return jnp.where(mask, 1.0 / jnp.maximum(jnp.asarray(denominator, jnp.float32), 1.0), 0.0)


def token_weights(
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    tokens: ArrayLike,
    sequences: ArrayLike,
    max_tokens: int,
) -> Float[Array, " T"]:
    """Every trained token of the mini-batch counts the same: ``1 / tokens`` [NR] (DAPO's token-level loss)."""
    return _per(mask, tokens)


def sequence_weights(
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    tokens: ArrayLike,
    sequences: ArrayLike,
    max_tokens: int,
) -> Float[Array, " T"]:
    """Every response counts the same: ``1 / (its trained tokens * sequences)``, as in GRPO's and GSPO's papers."""
    return _per(mask, segment_lengths(mask, segment_ids) * sequences)


def constant_weights(
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    tokens: ArrayLike,
    sequences: ArrayLike,
    max_tokens: int,
) -> Float[Array, " T"]:
    """Dr. GRPO (2503.20783): ``1 / (sequences * max_tokens)``, so that length does not change a token's weight."""
    return _per(mask, jnp.asarray(sequences, jnp.float32) * max_tokens)


# f(mask [T], segment_ids [T], *, tokens, sequences, max_tokens) -> weights float32 [T], 0 where not mask.
# tokens and sequences are the global counts (see ``counts``) of the mini-batch; max_tokens is rollout.max_tokens.
# Dropping a response means removing it from the mask before counting: all other weights are then bit-identical to
# those of a batch that never held it.
AGGREGATIONS: dict[str, Callable[..., Float[Array, " T"]]] = {
    "token": token_weights,
    "sequence": sequence_weights,
    "constant": constant_weights,
}


def get(name: str) -> Callable[..., Float[Array, " T"]]:
    """The aggregation registered as ``name``."""
    return lookup(AGGREGATIONS, name, "aggregation")
