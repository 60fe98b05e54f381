"""Where activations live on a mesh, and how tokens are put in a line so that every device keeps its own."""

from __future__ import annotations

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array


class Placement:
    """Constraints that follow from the sharding of rows ``[S, rows, T, ...]``; none without one.

    Attributes:
        shards: Devices that the tokens of a row are split over.
    """

    def __init__(self, sharding: NamedSharding | None) -> None:
        self._sharding, self.shards, self._slots = sharding, 1, 1
        if sharding is not None:
            over = (*sharding.spec, None, None, None)
            self.shards, self._slots = size(sharding, over[2]), size(sharding, over[0])
            self._axes = over[0], over[2]

    def _constrain(self, x: Array, *spec: object) -> Array:
        assert self._sharding is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._sharding.mesh, PartitionSpec(*spec)))

    def rows(self, x: Array) -> Array:
        """Activations ``[S, rows, T, ...]``."""
        return x if self._sharding is None else jax.lax.with_sharding_constraint(x, self._sharding)

    def slots(self, x: Array) -> Array:
        """Activations ``[S, ...]`` of prompts: whole on every device that has their slot."""
        return x if self._sharding is None else self._constrain(x, self._axes[0])

    def gather(self, x: Array) -> Array:
        """Keys or values ``[S, rows, T, K, h]`` of whole rows, on every device that has some of a row's queries."""
        if self.shards == 1:
            return x
        return self._constrain(x, self._axes[0], None, None, PartitionSpec.UNCONSTRAINED, None)

    @property
    def line(self) -> NamedSharding | None:
        """Of tokens that ``in_line`` returns."""
        if self._sharding is None:
            return None
        names = _names(self._axes[0]) + _names(self._axes[1])
        return NamedSharding(self._sharding.mesh, PartitionSpec(names))

    def in_line(self, x: Array) -> Array:
        """``[S, rows, T, ...]`` as ``[S * rows * T, ...]``, each device's tokens in one stretch."""
        if self.shards == 1:
            return x.reshape(-1, *x.shape[3:])
        slots, rows, length = x.shape[:3]
        split = self._slots, slots // self._slots, rows, self.shards, length // self.shards
        x = x.reshape(*split, *x.shape[3:])
        x = x.transpose(0, 3, 1, 2, 4, *range(5, x.ndim)).reshape(slots * rows * length, *x.shape[5:])
        return jax.lax.with_sharding_constraint(x, self.line)

    def in_rows(self, x: Array, slots: int, rows: int, length: int) -> Array:
        """The other way round, for one number per token."""
        if self.shards == 1:
            return x.reshape(slots, rows, length)
        x = x.reshape(self._slots, self.shards, slots // self._slots, rows, length // self.shards)
        return self.rows(x.transpose(0, 2, 3, 1, 4).reshape(slots, rows, length))


def _names(axes: object) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)  # type: ignore[arg-type]


def size(sharding: NamedSharding, axes: object) -> int:
    """Devices along ``axes``, an entry of the sharding's spec."""
    return math.prod(sharding.mesh.shape[name] for name in _names(axes))
