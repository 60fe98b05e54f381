"""Per-token policy losses, to be minimised.

Shared contract of every function in ``LOSSES``,
``f(logp, old_logp, advantages, mask, segment_ids, **hyper) -> (loss, aux)``:

* all arrays have one flat shape ``[T]``: ``logp`` from the policy being trained, ``old_logp`` from the trainer at
  the weights that sampled (no gradient), ``advantages`` constant over a response, ``mask`` the trained tokens,
  ``segment_ids`` the response a token belongs to (0 = padding, values <= T, a response lies within the array);
* ``loss``: float32 ``[T]``, 0 where not ``mask``. Not averaged: ``reduce`` holds the weights;
* ``aux``: per-token float32 arrays without gradient, 0 where not ``mask``: ``ratio`` (policy / old, as the loss uses
  it), ``clipped_low`` and ``clipped_high`` (1 where the ratio was too low or too high and the bound took over);
* hyper-parameters are Python numbers;
* masked slots may hold NaN or any number in every input: neither values nor gradients see them. Log-ratios are
  clamped to +-20 before ``exp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.learner.reduce import segment_mean
from brorl_jax.learner.registry import bind as _bind
from brorl_jax.learner.registry import hyperparameters as _hyperparameters
from brorl_jax.learner.registry import lookup

LOG_RATIO_CLAMP = 20.0  # exp(20) = 5e8 is finite in float32 and far beyond every clip

Aux = dict[str, Float[Array, " T"]]


def _clean(mask: Array, logp: Array, old_logp: Array, advantages: Array) -> tuple[Array, Array, Array]:
    """The inputs with 0 in masked slots. Selecting before any arithmetic keeps NaN out of the gradient as well."""
    logp, old_logp, advantages = (jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (logp, old_logp, advantages))
    return logp, jax.lax.stop_gradient(old_logp), jax.lax.stop_gradient(advantages)


def _ratio(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def _aux(mask: Array, ratio: Array, low: Array, high: Array) -> Aux:
    values = {"ratio": ratio, "clipped_low": low, "clipped_high": high}
    return {k: jax.lax.stop_gradient(jnp.where(mask, v, 0.0).astype(jnp.float32)) for k, v in values.items()}


def _clipped_surrogate(
    ratio: Array, advantages: Array, mask: Array, eps_low: float, eps_high: float, dual_clip: float
) -> tuple[Array, Aux]:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``; if c = dual_clip > 0 and A < 0, ``-max(the min, cA)``."""
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1 (0 turns it off), got {dual_clip}")
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    used = jnp.where(too_low, 1 - eps_low, jnp.where(too_high, 1 + eps_high, ratio))
    if dual_clip:
        beyond = (advantages < 0) & (ratio > dual_clip)
        used = jnp.where(beyond, dual_clip, used)
        too_high |= beyond
    return jnp.where(mask, -used * advantages, 0.0), _aux(mask, ratio, too_low, too_high)


def ppo_clip(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    advantages: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float,
) -> tuple[Float[Array, " T"], Aux]:
    """PPO's clipped surrogate with clip-higher, per token [P][V2]; eps_low 0.2, eps_high 0.27 [NR] or 0.28 [V2].

    ``r = exp(logp - old_logp)``, ``loss = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``. With ``dual_clip`` = c > 1
    (1912.09729; 0 = off) the objective of a negative advantage is at least ``c A``; ``clipped_high`` counts it.
    """
    logp, old_logp, advantages = _clean(mask, logp, old_logp, advantages)
    return _clipped_surrogate(_ratio(logp - old_logp), advantages, mask, eps_low, eps_high, dual_clip)


def gspo(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    advantages: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float,
) -> tuple[Float[Array, " T"], Aux]:
    """GSPO (2507.18071): the clipped surrogate with one ratio per response.

    ``log s = mean over the response's tokens of (logp - old_logp)``; token ``t`` uses
    ``exp(sg[log s] + logp_t - sg[logp_t])``: its value is ``s`` everywhere, and the mean over the response has
    the gradient of ``s A``. So the paper's objective is this with the ``sequence`` aggregation. Its clip
    ranges are far narrower than PPO's: 3e-4 and 4e-4 in the paper.
    """
    logp, old_logp, advantages = _clean(mask, logp, old_logp, advantages)
    sequence = segment_mean(logp - old_logp, mask, segment_ids)
    ratio = _ratio(jax.lax.stop_gradient(sequence) + (logp - jax.lax.stop_gradient(logp)))
    return _clipped_surrogate(ratio, advantages, mask, eps_low, eps_high, dual_clip)


def cispo(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    advantages: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Float[Array, " T"], Aux]:
    """CISPO (2506.13585): ``-sg[clip(r, 1 - eps_low, 1 + eps_high)] * A * logp``; no token loses its gradient.

    ``eps_low = 1`` leaves the weight unbounded from below, as in the paper's experiments. Here ``clipped_*`` count
    every ratio outside the range, whatever the sign of A.
    """
    logp, old_logp, advantages = _clean(mask, logp, old_logp, advantages)
    ratio = jax.lax.stop_gradient(_ratio(logp - old_logp))
    weight = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    aux = _aux(mask, ratio, ratio < 1 - eps_low, ratio > 1 + eps_high)
    return jnp.where(mask, -weight * advantages * logp, 0.0), aux


def reinforce(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    advantages: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
) -> tuple[Float[Array, " T"], Aux]:
    """Plain policy gradient, ``-A * logp``. Right for one update per step; later ones are off-policy uncorrected."""
    logp, old_logp, advantages = _clean(mask, logp, old_logp, advantages)
    nothing = jnp.zeros_like(mask)
    return jnp.where(mask, -advantages * logp, 0.0), _aux(mask, _ratio(logp - old_logp), nothing, nothing)


def sft(
    logp: Float[Array, " T"],
    old_logp: Float[Array, " T"],
    advantages: Float[Array, " T"],
    mask: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
) -> tuple[Float[Array, " T"], Aux]:
    """Negative log-likelihood, ``-logp``: the warm-up stage. ``old_logp`` and ``advantages`` do not enter; ratio 1."""
    nothing = jnp.zeros_like(mask)
    return jnp.where(mask, -jnp.where(mask, logp, 0.0), 0.0), _aux(mask, jnp.ones(mask.shape), nothing, nothing)


LOSSES: dict[str, Callable[..., tuple[Array, Aux]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sft": sft,
}


def get(name: str) -> Callable[..., tuple[Array, Aux]]:
    """The loss registered as ``name``."""
    return lookup(LOSSES, name, "loss")


def hyperparameters(name: str) -> tuple[str, ...]:
    """Which of the clip settings the loss ``name`` reads; ``()`` for ``reinforce`` and ``sft``."""
    return _hyperparameters(get(name))


def bind(name: str, hyper: Mapping[str, Any]) -> Callable[..., tuple[Array, Aux]]:
    """The loss ``name`` with its own settings from ``hyper``: ``f(logp, old_logp, advantages, mask, segment_ids)``."""
    return _bind(get(name), hyper)
