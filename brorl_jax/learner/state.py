"""All that an update reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int


class TrainState(NamedTuple):
    """What a resume needs of the learner.

    Attributes:
        params: The policy's weights.
        opt_state: The optimiser's moments and counters.
        reference: Weights of the reference policy, or None where the objective has no KL term.
        updates: int32 ``[]``, updates tried; the version of the weights.
        skipped: int32 ``[]``, those skipped because the gradient was not finite.
    """

    params: Any
    opt_state: Any
    reference: Any
    updates: Int[Array, ""]
    skipped: Int[Array, ""]


def create(params: Any, optimizer: optax.GradientTransformation, *, reference: bool) -> TrainState:
    """A fresh state; the reference, if any, starts as a copy of ``params``."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        reference=jax.tree.map(jnp.copy, params) if reference else None,
        updates=jnp.int32(0),
        skipped=jnp.int32(0),
    )


def reset_reference(state: TrainState, optimizer: optax.GradientTransformation, *, reset_optimiser: bool) -> TrainState:
    """The reference becomes the present policy; [V1] forgets the optimiser's moments as well, [V2] keeps them."""
    copies = jax.tree.map(jnp.copy, state.params)
    state = state._replace(reference=jax.device_put(copies, jax.tree.map(lambda old: old.sharding, state.reference)))
    if not reset_optimiser:
        return state
    # Where the old one was, scalars included: otherwise the next update would be compiled again.
    where = jax.tree.map(lambda old: old.sharding, state.opt_state)
    return state._replace(opt_state=jax.jit(optimizer.init, out_shardings=where)(state.params))
