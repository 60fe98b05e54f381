"""Advantages of whole groups: rewards ``[G, N]`` in, advantages ``[G, N]`` out.

Shared contract of every function in ``ADVANTAGES``,
``f(rewards, valid, lengths, *, normalise) -> advantages``:

* ``rewards``: float ``[G, N]``, possibly shaped. Slots that are not valid may hold anything, NaN included.
* ``valid``: bool ``[G, N]``. A sample that is not valid (aborted, grader error) or whose reward is not finite
  abstains: advantage 0, and it enters no mean and no standard deviation.
* ``lengths``: int ``[G, N]``, response tokens; only weights of the global normalisation.
* ``normalise``: what the global statistics are taken over, ``"tokens"``, ``"sequences"`` or ``"none"``.
* returns float32 ``[G, N]``, never NaN. A group whose valid rewards are all equal (``max == min``, never
  ``std > 0``) gets exactly 0 and enters no global statistic, so dropping it changes nothing for the others.

Variances are two-pass in float32. A group estimator needs N >= 2; a config with N = 1 is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from brorl_jax.learner.registry import lookup

VAR_FLOOR = 1e-8  # [NR]
GRPO_EPS = 1e-6  # added to the group's standard deviation, as in verl

NORMALISERS = ("none", "tokens", "sequences")


def informative(rewards: Float[ArrayLike, "G N"], valid: Bool[ArrayLike, "G N"]) -> Bool[Array, " G"]:
    """Which groups can teach anything: ``max != min`` over the valid rewards. All-invalid groups cannot.

    Dynamic sampling filters with it, on the **raw** task rewards.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.asarray(valid, bool) & jnp.isfinite(rewards)
    highest = jnp.max(rewards, axis=1, where=valid, initial=-jnp.inf)
    lowest = jnp.min(rewards, axis=1, where=valid, initial=jnp.inf)
    return valid.any(axis=1) & (highest != lowest)


def _centre(rewards: ArrayLike, valid: ArrayLike) -> tuple[Array, Array, Array]:
    """Rewards minus their group's mean, the samples in use (valid, informative group), valid per group ``[G, 1]``."""
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.asarray(valid, bool) & jnp.isfinite(rewards)
    used = valid & informative(rewards, valid)[:, None]
    # Shifted by the group's minimum first: the mean of many equal float32 values may differ from them.
    lowest = jnp.min(rewards, axis=1, keepdims=True, where=used, initial=jnp.inf)
    shifted = jnp.where(used, rewards - lowest, 0.0)
    count = used.sum(axis=1, keepdims=True)
    mean = shifted.sum(axis=1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(used, shifted - mean, 0.0), used, count


def _total(x: Array) -> Array:
    """Sum of ``[G, N]``, by groups first: rounding grows with G + N instead of G * N."""
    return x.sum(axis=1).sum()


def _normalise_globally(x: Array, used: Array, lengths: ArrayLike, over: str) -> Array:
    weight = used.astype(jnp.float32)
    if over == "tokens":
        weight = jnp.where(used, jnp.asarray(lengths, jnp.float32), 0.0)
    total = jnp.maximum(_total(weight), 1.0)
    mean = _total(weight * x) / total
    variance = _total(weight * (x - mean) ** 2) / total
    return jnp.where(used, (x - mean) / jnp.sqrt(jnp.maximum(variance, VAR_FLOOR)), 0.0)


def reinforce_pp_baseline(
    rewards: Float[ArrayLike, "G N"],
    valid: Bool[ArrayLike, "G N"],
    lengths: Int[ArrayLike, "G N"],
    *,
    normalise: str,
) -> Float[Array, "G N"]:
    """REINFORCE++-baseline: ``x = r - mean_group(r)``, then ``(x - mean_batch(x)) / std_batch(x)`` [P][V2].

    Batch statistics are weighted by response tokens (``normalise="tokens"``, [NR]) or count every sample once
    (``"sequences"``); ``std = sqrt(max(population variance, 1e-8))`` [NR]. The batch is all of ``rewards``.
    """
    check("reinforce_pp_baseline", normalise)
    centred, used, _ = _centre(rewards, valid)
    return _normalise_globally(centred, used, lengths, normalise)


def grpo(
    rewards: Float[ArrayLike, "G N"],
    valid: Bool[ArrayLike, "G N"],
    lengths: Int[ArrayLike, "G N"],
    *,
    normalise: str,
) -> Float[Array, "G N"]:
    """GRPO: ``(r - mean_group) / (std_group + 1e-6)``, the sample (n - 1) deviation as in TRL and verl."""
    check("grpo", normalise)
    centred, used, count = _centre(rewards, valid)
    variance = (centred**2).sum(axis=1, keepdims=True) / jnp.maximum(count - 1, 1)
    return jnp.where(used, centred / (jnp.sqrt(variance) + GRPO_EPS), 0.0)


def dr_grpo(
    rewards: Float[ArrayLike, "G N"],
    valid: Bool[ArrayLike, "G N"],
    lengths: Int[ArrayLike, "G N"],
    *,
    normalise: str,
) -> Float[Array, "G N"]:
    """Dr. GRPO (2503.20783): ``r - mean_group``, no division; pairs with the ``constant`` aggregation."""
    check("dr_grpo", normalise)
    return _centre(rewards, valid)[0]


def rloo(
    rewards: Float[ArrayLike, "G N"],
    valid: Bool[ArrayLike, "G N"],
    lengths: Int[ArrayLike, "G N"],
    *,
    normalise: str,
) -> Float[Array, "G N"]:
    """RLOO (2402.14740): ``r_i - mean of the other valid r_j``, that is ``(r - mean_group) * n / (n - 1)``."""
    check("rloo", normalise)
    centred, _, count = _centre(rewards, valid)
    return centred * (count / jnp.maximum(count - 1, 1))


ADVANTAGES: dict[str, Callable[..., Float[Array, "G N"]]] = {
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}


def get(name: str) -> Callable[..., Float[Array, "G N"]]:
    """The advantage estimator registered as ``name``."""
    return lookup(ADVANTAGES, name, "advantage")


def check(name: str, normalise: str) -> None:
    """Reject combinations that mean nothing.

    Raises:
        ValueError: unknown names; REINFORCE++-baseline without its global normalisation, or another estimator with
            one.
    """
    get(name)
    if normalise not in NORMALISERS:
        raise ValueError(f"unknown normalise {normalise!r}; known: {', '.join(NORMALISERS)}")
    if name == "reinforce_pp_baseline" and normalise == "none":
        raise ValueError(
            "reinforce_pp_baseline normalises over the batch: normalise must be 'tokens' or 'sequences'"
            " (without it, it is dr_grpo)"
        )
    if name != "reinforce_pp_baseline" and normalise != "none":
        raise ValueError(f"advantage {name!r} has no global normalisation: set normalise to 'none', got {normalise!r}")


def clip_advantages(advantages: Float[ArrayLike, "G N"], limit: float) -> Float[Array, "G N"]:
    """``clip(A, -limit, limit)``; ``limit = 0`` leaves them alone. Applied last, after normalisation."""
    if limit < 0:
        raise ValueError(f"advantage clip must be >= 0 (0 turns it off), got {limit}")
    advantages = jnp.asarray(advantages, jnp.float32)
    return jnp.clip(advantages, -limit, limit) if limit else advantages
