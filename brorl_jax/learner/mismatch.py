"""Correction for an engine that samples from a slightly different function than the trainer differentiates.

Shared contract of every function in ``MISMATCH``, ``f(old_logp, rollout_logp, mask, segment_ids, **hyper) -> [T]``:
weights for the per-token policy loss, made from ``w = exp(old_logp - rollout_logp)`` (trainer over engine, both at the
weights that sampled; log-ratio clamped to +-20). Arrays are flat ``[T]``; weights are float32 without gradient and 0
where not ``mask``, whatever is stored there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.learner.reduce import masked_mean, masked_sum, segment_mean
from brorl_jax.learner.registry import bind as _bind
from brorl_jax.learner.registry import hyperparameters as _hyperparameters
from brorl_jax.learner.registry import lookup

LOG_RATIO_CLAMP = 20.0


def _log_weight(old_logp: Array, rollout_logp: Array, mask: Array) -> Array:
    log_weight = (jnp.where(mask, old_logp, 0.0) - jnp.where(mask, rollout_logp, 0.0)).astype(jnp.float32)
    return jax.lax.stop_gradient(log_weight)


def _weight(log_weight: Array) -> Array:
    return jnp.exp(jnp.clip(log_weight, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def none(
    old_logp: Float[Array, " T"],
    rollout_logp: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
) -> Float[Array, " T"]:
    """Weight 1: right when engine and trainer are the same function."""
    return mask.astype(jnp.float32)


def tis(
    old_logp: Float[Array, " T"],
    rollout_logp: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    high: float,
) -> Float[Array, " T"]:
    """Truncated importance sampling, ``min(w, high)`` [P] (Yao et al. 2025); the paper's cap is not published."""
    return jnp.where(mask, jnp.minimum(_weight(_log_weight(old_logp, rollout_logp, mask)), high), 0.0)


def mask_outside(
    old_logp: Float[Array, " T"],
    rollout_logp: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    low: float,
    high: float,
) -> Float[Array, " T"]:
    """ICE-POP: ``w`` where ``low <= w <= high``, else 0. Bounds 0.5 and 5.0 [NR]."""
    weight = _weight(_log_weight(old_logp, rollout_logp, mask))
    return jnp.where(mask & (weight >= low) & (weight <= high), weight, 0.0)


def sequence_mask(
    old_logp: Float[Array, " T"],
    rollout_logp: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    low: float,
    high: float,
) -> Float[Array, " T"]:
    """seq-mask-tis: token weights ``w``, untruncated, but 0 for a response whose geometric mean of ``w`` lies outside.

    Bounds 0.999 and 1.002 on ``exp(mean over the response of log w)`` [NR].
    """
    log_weight = _log_weight(old_logp, rollout_logp, mask)
    mean = _weight(segment_mean(log_weight, mask, segment_ids))
    return jnp.where(mask & (mean >= low) & (mean <= high), _weight(log_weight), 0.0)


MISMATCH: dict[str, Callable[..., Float[Array, " T"]]] = {
    "none": none,
    "tis": tis,
    "mask": mask_outside,
    "sequence_mask": sequence_mask,
}


def get(name: str) -> Callable[..., Float[Array, " T"]]:
    """The correction registered as ``name``."""
    return lookup(MISMATCH, name, "mismatch correction")


def hyperparameters(name: str) -> tuple[str, ...]:
    """Which of ``low`` and ``high`` the correction ``name`` reads."""
    return _hyperparameters(get(name))


def bind(name: str, hyper: Mapping[str, Any]) -> Callable[..., Float[Array, " T"]]:
    """The correction ``name`` with its own bounds from ``hyper``: ``f(old_logp, rollout_logp, mask, segment_ids)``."""
    return _bind(get(name), hyper)


def diagnostics(
    old_logp: Float[Array, "*shape"], rollout_logp: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> dict[str, Float[Array, ""]]:
    """How far engine and trainer are apart, over the masked-in tokens of arrays of any one shape.

    With ``delta = old_logp - rollout_logp`` and ``w = exp(delta)``:

    * ``mean``, ``max``, ``p99`` of ``|delta|`` (p99: the smallest value that 99 % of tokens do not exceed);
    * ``kl``: KL(engine || trainer) per token, as the mean of ``w - 1 - delta``, unbiased and never negative;
    * ``ess``: effective sample size of the weights as a fraction, ``(sum w)^2 / (n sum w^2)``, 1 without mismatch.

    No token in the mask: ``ess`` 1, the others 0.
    """
    delta = _log_weight(old_logp, rollout_logp, mask)
    gap = jnp.abs(delta)
    n = jnp.sum(mask)
    clamped = jnp.clip(delta, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    weight = jnp.exp(clamped)
    ordered = jnp.sort(jnp.where(mask, gap, jnp.inf).reshape(-1))
    # ceil(0.99 n) - 1 in integers: float32 cannot hold 0.99 * n exactly for many n.
    rank = jnp.clip(n - n // 100 - 1, 0, ordered.size - 1)
    square = masked_sum(weight, mask) ** 2
    ess = square / jnp.maximum(n * masked_sum(weight**2, mask), jnp.finfo(jnp.float32).tiny)
    return {
        "mean": masked_mean(gap, mask),
        "max": jnp.max(gap, where=mask, initial=0.0),
        "p99": jnp.where(n > 0, ordered[rank], 0.0),
        "kl": masked_mean(jnp.expm1(clamped) - clamped, mask),
        "ess": jnp.where(n > 0, jnp.minimum(ess, 1.0), 1.0),
    }
