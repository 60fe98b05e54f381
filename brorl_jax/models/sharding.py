"""Where weights and batches live on a mesh: rules as data, from a weight's axes to the mesh's.

Mesh axes: ``data`` (replicas), ``fsdp`` (parameters and optimiser split, gathered layer by layer), ``context`` (tokens
of a row split, keys and values gathered), ``tensor`` (matrix products split). Batches are split over ``data`` and
``fsdp`` along their slots.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from brorl_jax.models.config import ModelConfig
from brorl_jax.models.transformer import shapes

MESH_AXES = ("data", "fsdp", "context", "tensor")  # the last one's devices are neighbours: it talks most
BATCH_AXES = ("data", "fsdp")
ROW_SPEC = PartitionSpec(BATCH_AXES, None, "context")  # of anything [S, rows, T, ...]

RULES: dict[str, str | None] = {"layer": None, "model": "fsdp", "vocab": "tensor", "heads": "tensor", "ffn": "tensor"}

WEIGHT_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "model"),
    "head": ("model", "vocab"),
    "final_norm": (None,),
    "attn_norm": ("layer", None),
    "mlp_norm": ("layer", None),
    "q_norm": ("layer", None),
    "k_norm": ("layer", None),
    "q": ("layer", "model", "heads"),
    "k": ("layer", "model", "heads"),
    "v": ("layer", "model", "heads"),
    "o": ("layer", "heads", "model"),
    "q_bias": ("layer", "heads"),
    "k_bias": ("layer", "heads"),
    "v_bias": ("layer", "heads"),
    "gate": ("layer", "model", "ffn"),
    "up": ("layer", "model", "ffn"),
    "down": ("layer", "ffn", "model"),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1) -> Mesh:
    """A mesh over the first ``data * fsdp * context * tensor`` devices; over all devices of several processes.

    Raises:
        ValueError: There are fewer devices than that, or several processes have more.
    """
    wanted, devices = data * fsdp * context * tensor, jax.devices()
    if wanted > len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x context={context} x tensor={tensor} needs {wanted} devices, "
            f"jax sees {len(devices)}"
        )
    if jax.process_count() > 1 and wanted < len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x context={context} x tensor={tensor} takes {wanted} of the "
            f"{len(devices)} devices of {jax.process_count()} processes; let it take all, or let each process see fewer"
        )
    return Mesh(np.asarray(devices[:wanted]).reshape(data, fsdp, context, tensor), MESH_AXES)


def weight_shardings(mesh: Mesh, cfg: ModelConfig) -> Any:
    """The weight tree with a sharding in place of each array; an axis that does not divide is not split."""

    def leaf(path: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
        axes = (RULES.get(axis) if axis else None for axis in WEIGHT_AXES[path[-1].key])
        spec = (a if a and size % mesh.shape[a] == 0 else None for a, size in zip(axes, shape, strict=True))
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(leaf, shapes(cfg), is_leaf=lambda x: isinstance(x, tuple))


def like_weights(mesh: Mesh, cfg: ModelConfig, tree: Any) -> Any:
    """Shardings for any tree that holds copies of the weight tree, such as optimiser moments; the rest is replicated.

    A leaf is recognised as a weight by the last key of its path and its rank.
    """
    weights = jax.tree_util.tree_leaves_with_path(weight_shardings(mesh, cfg))
    known = {path[-1].key: sharding for path, sharding in weights}

    def leaf(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None) if path else None
        if name in known and len(known[name].spec) == np.ndim(x):
            return known[name]
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(leaf, tree)


def slot_sharding(mesh: Mesh) -> NamedSharding:
    """For activations ``[S, rows, T, ...]``: slots over ``data`` and ``fsdp``, tokens over ``context``."""
    return NamedSharding(mesh, ROW_SPEC)


def batch_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """For arrays ``[M, S]``, ``[M, S, P]`` or ``[M, S, rows, T]``, as ``slot_sharding``; scalars are replicated."""
    spec = PartitionSpec(None, *ROW_SPEC) if ndim == 4 else PartitionSpec(None, BATCH_AXES)
    return NamedSharding(mesh, spec if ndim >= 2 else PartitionSpec())


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """A batch of host arrays on the mesh; of several processes, which all hold the batch, each puts its own part."""

    def put(x: Any) -> jax.Array:
        return jax.make_array_from_process_local_data(batch_sharding(mesh, np.ndim(x)), np.asarray(x), np.shape(x))

    return jax.tree.map(put, batch)


def local_copy(tree: Any) -> Any:
    """Arrays that this process can use alone: itself what it holds, else a whole copy on its first device.

    Processes that share the arrays must all call this.
    """

    def copy(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.is_fully_replicated:
            assert isinstance(x.sharding, NamedSharding)
            x = jax.jit(_identity, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
        return x.addressable_data(0)

    return jax.tree.map(copy, tree)


def _identity(x: jax.Array) -> jax.Array:  # one function for all calls, so that each shape is compiled once
    return x


def fetch(tree: Any) -> Any:
    """Host copies of whole arrays; processes that share them must all call this."""
    return jax.device_get(local_copy(tree))
