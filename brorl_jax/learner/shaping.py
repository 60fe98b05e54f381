"""Length-dependent rewards: raw task rewards ``[G, N]`` in, shaped rewards ``[G, N]`` out.

Dynamic sampling looks at the raw rewards, never at these: shaping cannot change which groups are kept. A NaN reward
(a sample that abstains) stays NaN. ``lengths`` are response tokens, at most ``max_tokens``; ``truncated`` marks the
samples that ended by the token limit.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int


def stop_properly_reward(
    rewards: Float[ArrayLike, "G N"], truncated: Bool[ArrayLike, "G N"], *, factor: float
) -> Float[Array, "G N"]:
    """Truncated rewards times ``factor``: 0.0 is [NR]'s setting, 1.0 leaves them alone."""
    rewards = jnp.asarray(rewards, jnp.float32)
    return jnp.where(truncated, rewards * factor, rewards)


def overlong_reward(
    lengths: Int[ArrayLike, "G N"], *, max_tokens: int, buffer: int, penalty: float
) -> Float[Array, "G N"]:
    """DAPO's soft overlong punishment, added to the reward: 0 down to ``-penalty`` over the last ``buffer`` tokens.

    ``-penalty * clip((length - (max_tokens - buffer)) / buffer, 0, 1)``. [OR]: buffer 6144. ``buffer = 0`` is off.

    Raises:
        ValueError: ``buffer`` outside ``[0, max_tokens]`` or a negative ``penalty``.
    """
    if not 0 <= buffer <= max_tokens:
        raise ValueError(f"overlong buffer must lie in [0, max_tokens = {max_tokens}], got {buffer}")
    if penalty < 0:
        raise ValueError(f"overlong penalty is subtracted and must be >= 0, got {penalty}")
    lengths = jnp.asarray(lengths, jnp.float32)
    if buffer == 0:
        return jnp.zeros_like(lengths)
    return -penalty * jnp.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def cosine_reward(
    lengths: Int[ArrayLike, "G N"], *, max_tokens: int, eta_min: float, eta_max: float
) -> Float[Array, "G N"]:
    """``eta_min + 0.5 (eta_max - eta_min) (1 + cos(pi t / T))`` [V2]: ``eta_max`` at length 0, ``eta_min`` at the
    limit.

    ``t`` is the response length and ``T = max_tokens``. It depends on the length alone: as written, right and wrong
    answers receive it alike. Its weight and the two bounds are unpublished.
    """
    t = jnp.minimum(jnp.asarray(lengths, jnp.float32) / max_tokens, 1.0)
    return eta_min + 0.5 * (eta_max - eta_min) * (1.0 + jnp.cos(math.pi * t))


def cosine_active(update: int, *, on: int, off: int) -> bool:
    """Whether the cosine reward is on at this update (counted from 0): ``on`` updates with it, ``off`` without, again.

    [V2]: on ~100, off ~500; that a cycle begins with the on part is ours. ``off = 0``: always; ``on = 0``: never.
    """
    if on < 0 or off < 0:
        raise ValueError(f"the cosine schedule needs on >= 0 and off >= 0, got on = {on}, off = {off}")
    return on > 0 and update % (on + off) < on


def shape_rewards(
    rewards: Float[ArrayLike, "G N"],
    lengths: Int[ArrayLike, "G N"],
    truncated: Bool[ArrayLike, "G N"],
    *,
    update: int,
    max_tokens: int,
    stop_properly: float,
    overlong_buffer: int,
    overlong_penalty: float,
    cosine_coef: float,
    cosine_min: float,
    cosine_max: float,
    cosine_on: int,
    cosine_off: int,
) -> Float[Array, "G N"]:
    """All of the above: ``R' = stop_properly_reward(R) + cosine_coef * cosine_reward + overlong_reward``.

    Only the task reward is multiplied by ``stop_properly``: or 0.0 would wipe out a truncated sample's penalty.
    ``cosine_coef`` is lambda of [V2], 0 = off; ``cosine_min`` and ``cosine_max`` are the etas, ``cosine_on`` and
    ``cosine_off`` the schedule at ``update``. ``stop_properly = 1`` and ``overlong_buffer = 0`` are off.
    """
    shaped = stop_properly_reward(rewards, truncated, factor=stop_properly)
    if cosine_coef and cosine_active(update, on=cosine_on, off=cosine_off):
        shaped += cosine_coef * cosine_reward(lengths, max_tokens=max_tokens, eta_min=cosine_min, eta_max=cosine_max)
    return shaped + overlong_reward(lengths, max_tokens=max_tokens, buffer=overlong_buffer, penalty=overlong_penalty)
