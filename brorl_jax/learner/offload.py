"""What of the state waits in the host's memory: shardings with another memory kind, nothing else changes."""

from __future__ import annotations

from typing import Any

import jax

from brorl_jax.learner.state import TrainState

HOST, DEVICE = "pinned_host", "device"


def place(where: TrainState, shapes: TrainState, *, reference: bool, optimizer: bool) -> TrainState:
    """The shardings ``where`` of a state, with the reference, or the optimiser's moments, in the host's memory.

    Counters stay on the device.
    """
    if reference:
        where = where._replace(reference=jax.tree.map(lambda s: s.with_memory_kind(HOST), where.reference))
    if optimizer:

        def moved(sharding: Any, x: Any) -> Any:
            return sharding.with_memory_kind(HOST) if x.ndim else sharding

        where = where._replace(opt_state=jax.tree.map(moved, where.opt_state, shapes.opt_state))
    return where


def any_on_host(shardings: Any) -> bool:
    """Whether any of them is a place in the host's memory."""
    return any(s.memory_kind == HOST for s in jax.tree.leaves(shardings))


def on_device(shardings: Any) -> Any:
    """The same shardings in device memory."""
    return jax.tree.map(lambda s: s.with_memory_kind(DEVICE), shardings)
