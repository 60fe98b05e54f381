"""How fast the updates of a step were: tokens per second, FLOP/s, and the share of what the devices can do."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from brorl_jax import devices
from brorl_jax.models import flops
from brorl_jax.models.config import ModelConfig
from brorl_jax.types import Group


def of_updates(cfg: ModelConfig, groups: Sequence[Group], seconds: float, mesh: Mesh) -> dict[str, float]:
    """Metrics of updates that trained on ``groups`` in ``seconds``, the first step's compilation included.

    * ``throughput/update_tokens_per_s``: trained (response) tokens / s;
    * ``throughput/update_flops_per_s``: model FLOPs / s of all devices together, see ``models.flops``;
    * ``throughput/mfu``: model FLOPs / (s * devices * peak bfloat16 FLOP/s of one), where ``devices`` knows it.
    """
    lengths = [(len(g.prompt.tokens), [len(s.tokens) for s in g.scored]) for g in groups]
    work = sum((flops.group(*of_group) for of_group in lengths), flops.Work(0, 0, 0))
    if not work.predictions:
        return {}
    achieved = flops.train(cfg, work) / seconds
    out = {"update_tokens_per_s": work.predictions / seconds, "update_flops_per_s": achieved}
    if device := devices.find(mesh.devices.flat[0].device_kind):
        out["mfu"] = achieved / (mesh.size * device.flops)
    return {f"throughput/{name}": value for name, value in out.items()}
