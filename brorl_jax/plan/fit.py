"""Whether a config fits a device's memory, and the smallest change of it that does; which mesh to use."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.models.config import ModelConfig

Changes = dict[str, object]  # field -> value


def choose_mesh(config: Config, devices: int, node: int) -> Changes:
    """What to change for the mesh to have ``devices`` devices; nothing if it has.

    ``fsdp`` gets as much of a node as divides the devices, since it talks most, ``data`` the rest; axes that split a
    sequence or a product keep their sizes.

    Raises:
        UserError: Those axes do not divide the devices.
    """
    mesh = dict(config.mesh)
    if math.prod(mesh.values()) == devices:
        return {}
    split = math.prod(size for axis, size in mesh.items() if axis not in ("data", "fsdp"))
    if devices % split:
        raise UserError(
            f"--devices={devices} is not a multiple of {split}, the devices that config.mesh splits a sequence or a "
            f"product over ({', '.join(f'{a}={n}' for a, n in mesh.items() if a not in ('data', 'fsdp'))})"
        )
    shards = devices // split
    most = max(1, node // split)
    fsdp = max(n for n in range(1, shards + 1) if shards % n == 0 and n <= most)
    changes: Changes = {"mesh.data": shards // fsdp, "mesh.fsdp": fsdp}
    if config.batch.slots % shards:
        changes["batch.slots"] = -(-config.batch.slots // shards) * shards
    return changes


def apply(config: Config, changes: Changes) -> Config:
    """A copy of ``config`` with ``changes``."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *sections, field = path.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[field] = value
    return config


def candidates(config: Config, cfg: ModelConfig, node: int) -> list[Changes]:
    """Changes that save memory, cheapest first; each leaves the result of training as it is but the moments' rounding.

    Recompute, attention without stored scores, smaller micro-batches, weights over more devices, bfloat16 moments,
    moments in the host's memory, and products split over a node.
    """
    mesh, shards = config.mesh, config.mesh.data * config.mesh.fsdp
    found: list[Changes] = []
    if config.model.remat != "full":
        found.append({"model.remat": "full"})
    if config.model.attention == "xla":
        found.append({"model.attention": "blockwise"})
    if config.batch.rows > 1:
        found.append({"batch.rows": 1})
    if config.batch.slots > shards:
        found.append({"batch.slots": shards})
    if mesh.data > 1:
        found.append({"mesh.data": 1, "mesh.fsdp": shards})
    if config.optim.moment_dtype != "bfloat16":
        found.append({"optim.moment_dtype": "bfloat16"})
    if not config.optim.offload:
        found.append({"optim.offload": True})
    for tensor in (2, 4, 8):
        if tensor <= node and shards % tensor == 0 and cfg.kv_heads % tensor == 0 and mesh.tensor == 1:
            split = shards // tensor
            found.append({"mesh.data": 1, "mesh.fsdp": split, "mesh.tensor": tensor, "batch.slots": split})
    return found


def cut_heads(cfg: ModelConfig, tensor: int) -> list[str]:
    """The kinds of heads, with their number, that ``tensor`` devices cannot share out as whole ones."""
    kinds = {"query heads": cfg.heads, "key/value heads": cfg.kv_heads}
    return [f"the {count} {kind}" for kind, count in kinds.items() if count % tensor]


def smallest_change(options: list[Changes], needed: Callable[[Changes], int], limit: int) -> tuple[Changes, int] | None:
    """The first option that needs at most ``limit`` bytes, else the fewest first ones together, with what they need."""
    for change in options:
        if (size := needed(change)) <= limit:
            return change, size
    together: Changes = {}
    for change in options:
        together |= change
        if (size := needed(together)) <= limit:
            return together, size
    return None
