"""Estimators of the divergence between the policy and a reference, one value per sampled token.

With ``d = logp - ref_logp``, tokens sampled from the policy pi, expectations over one token:

=====  ====================  ========================  =======================================
name   value                 its expectation           expected gradient when used as a loss
=====  ====================  ========================  =======================================
k1     ``d``                 KL(pi || ref), unbiased   0: refused as a loss
k2     ``d^2 / 2``           KL(pi || ref) + O(d^3)    grad KL(pi || ref), exactly
k3     ``exp(-d) - 1 + d``   KL(pi || ref), unbiased   grad KL(ref || pi): the forward divergence
=====  ====================  ========================  =======================================

The last column holds for tokens from the policy itself; after several updates on the same rollouts it is as off-policy
as they are (no importance weight is applied, as in [NR] and [OR]). k2 is the recipe's [V2][NR]. All three are
exactly 0 when policy and reference agree.

Shared contract, ``f(logp, ref_logp, mask, *, clamp, clamp_output) -> [T]``: float32 arrays of one shape; ``d`` is
clamped to +-``clamp`` before anything else (10 [V2], 20 [NR]), the value to +-``clamp_output`` (10 [NR]); 0 turns
``clamp_output`` off. Beyond a clamp the gradient is 0. Slots outside the mask may hold NaN and yield 0.
No gradient reaches ``ref_logp``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.learner.registry import lookup


def _log_ratio(logp: Array, ref_logp: Array, mask: Array, clamp: float) -> Array:
    if clamp <= 0:
        raise ValueError(f"the KL log-ratio clamp must be positive, got {clamp}")
    ref_logp = jax.lax.stop_gradient(jnp.where(mask, ref_logp, 0.0))
    return jnp.clip((jnp.where(mask, logp, 0.0) - ref_logp).astype(jnp.float32), -clamp, clamp)


def _bounded(value: Array, clamp_output: float) -> Array:
    if clamp_output < 0:
        raise ValueError(f"the KL output clamp must be >= 0 (0 turns it off), got {clamp_output}")
    return jnp.clip(value, -clamp_output, clamp_output) if clamp_output else value


def k1(
    logp: Float[Array, "*shape"],
    ref_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clamp: float = 10.0,
    clamp_output: float = 0.0,
) -> Float[Array, "*shape"]:
    """``d = logp - ref_logp``: unbiased value of KL(pi || ref), high variance, negative at times. A metric only."""
    return _bounded(_log_ratio(logp, ref_logp, mask, clamp), clamp_output)


def k2(
    logp: Float[Array, "*shape"],
    ref_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clamp: float = 10.0,
    clamp_output: float = 0.0,
) -> Float[Array, "*shape"]:
    """``d^2 / 2`` [V2][NR]: as a loss it descends KL(pi || ref) exactly; its value is right to second order."""
    d = _log_ratio(logp, ref_logp, mask, clamp)
    return _bounded(0.5 * d * d, clamp_output)


def k3(
    logp: Float[Array, "*shape"],
    ref_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clamp: float = 10.0,
    clamp_output: float = 0.0,
) -> Float[Array, "*shape"]:
    """``exp(-d) - 1 + d`` (Schulman; GRPO): unbiased and never negative; as a loss it descends KL(ref || pi)."""
    d = _log_ratio(logp, ref_logp, mask, clamp)
    return _bounded(jnp.expm1(-d) + d, clamp_output)


KL_ESTIMATORS: dict[str, Callable[..., Float[Array, "*shape"]]] = {"k1": k1, "k2": k2, "k3": k3}


def get(name: str) -> Callable[..., Float[Array, "*shape"]]:
    """The estimator registered as ``name``, for metrics."""
    return lookup(KL_ESTIMATORS, name, "KL estimator")


def get_loss(name: str) -> Callable[..., Float[Array, "*shape"]]:
    """The estimator ``name`` for use in the loss; refuses k1, whose expected gradient is 0."""
    if name == "k1":
        raise ValueError("KL estimator 'k1' has zero expected gradient in a loss: use 'k2', whose gradient is KL's own")
    return get(name)
