"""From counts to seconds and gibibytes: what one step of a config needs on a given kind of device.

Every time is a range. Its lower end is the roofline: computing, memory and interconnect run at their assumed rates and
overlap completely, so the slowest counts. At its upper end nothing overlaps, so they add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from brorl_jax import assemble
from brorl_jax.config import Config
from brorl_jax.devices import Device
from brorl_jax.models import flops
from brorl_jax.plan import memory, program
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.program import Compiled, Described

USABLE = 0.9  # of device memory; the rest is the driver's, libraries' and fragmentation's
SERVER = 0.85  # of device memory that an engine's weights and cache may fill, as rollout.sglang.launch.mem_fraction


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What no config says.

    Attributes:
        tokens: Of a response, on average.
        pass_rate: Share of the generated groups that dynamic sampling keeps.
        mfu: Share of a device's peak that matrix products reach.
        bandwidth: Share of its memory bandwidth that is reached.
    """

    tokens: float
    pass_rate: float
    mfu: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of computing, device memory and interconnect."""

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0

    def __add__(self, other: Time) -> Time:
        return Time(self.compute + other.compute, self.memory + other.memory, self.network + other.network)

    def __mul__(self, times: float) -> Time:
        return Time(self.compute * times, self.memory * times, self.network * times)

    @property
    def least(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def most(self) -> float:
        return self.compute + self.memory + self.network


def bytes_needed(d: Described, *, scores: bool) -> dict[str, int]:
    """Device memory of a train step by kind, on the device that holds most.

    Args:
        scores: Attention writes its scores to memory; otherwise it is a flash kernel.
    """
    state, share = d.state, share_of(d)
    remat, cfg = d.config.model.remat, d.cfg
    weights = sum(program.shard_sizes(state.params))
    layer, head = memory.layer_work(cfg, share, scores=scores), memory.head_work(cfg, share)
    kept = memory.kept(cfg, share, remat, scores=scores)
    return {
        "parameters": on_device(state.params),
        "optimiser": on_device(state.opt_state),
        "reference": on_device(state.reference),
        "engine's copy": share.item * _engine_weights(d, weights),
        "batch": on_device(d.batch),
        "gradients": memory.gradients(weights),
        "activations": kept + (layer if layer >= head else 0),
        "temporaries": head if head > layer else 0,
    }


def writes_scores(config: Config) -> bool:
    """Whether attention's scores go through device memory; blockwise and flash attention hold a block of them."""
    return config.model.attention == "xla"


def _engine_weights(d: Described, shard: int) -> int:
    """Weights that the embedded engine keeps beside the learner's: all, on its one device, if it samples during
    updates; the ``shard`` of each device if they are of another dtype; else none."""
    if d.config.rollout.engine != "local":
        return 0
    if d.config.rollout.overlap:
        return sum(x.size for x in jax.tree.leaves(d.state.params))
    return shard if d.config.model.compute_dtype != d.config.model.param_dtype else 0


def on_device(tree: Any) -> int:
    """Bytes of a tree of shapes in one device's own memory."""
    return program.held(tree).get("device", 0)


def share_of(d: Described) -> memory.Share:
    """What one device has of a micro-batch."""
    item = jnp.dtype(d.config.model.compute_dtype).itemsize
    prefix = d.batch.prefix.shape[-1]
    return memory.Share.of(assemble.layout(d.config), prefix, dict(d.model.mesh.shape), item, d.config.model.head_chunk)


def program_time(
    compiled: Compiled, turns: int, device: Device, assumed: Assumed, *, half: bool, scores: bool, state: int = 0
) -> Time:
    """Of one run with ``turns`` micro-batches.

    Args:
        half: Matrix products are in bfloat16.
        scores: Attention's products go through memory.
        state: Bytes read and written once, beside the products' operands.
    """
    peak = device.flops if half else device.float32
    traffic = sum(p.traffic * p.runs(turns) for p in compiled.products if scores or not p.batched)
    network = sum(seconds_to_send(c, turns, device) for c in compiled.collectives)
    return Time(
        compiled.flops(turns) / (peak * assumed.mfu),
        (traffic + state) / (device.bandwidth * assumed.bandwidth),
        network,
    )


def seconds_to_send(c: Collective, turns: int, device: Device) -> float:
    """Of all runs of a collective, for ``turns`` micro-batches."""
    return c.sent * c.runs(turns) / link(device, c.group) if c.sent else 0.0


def link(device: Device, group: tuple[int, ...]) -> float:
    """Bytes/s at which a device sends within a group.

    Between nodes, the members that a node has of a group share the work, each with a network card of its own.
    """
    nodes = Counter(member // device.node for member in group)
    return device.link if len(nodes) == 1 else min(device.link, min(nodes.values()) * device.network)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Rollouts of one step on all devices, each with a copy of the model.

    Attributes:
        samples: Generated, those that are filtered included.
        tokens: Of their responses.
        cache: Bytes of keys and values if all of one device's samples were there at once, prompts once per group.
        rows: Sequences that a device decodes together.
        steps: Decoding steps.
        time: Seconds.
    """

    samples: int
    tokens: float
    cache: float
    rows: int
    steps: float
    time: Time


def generation(d: Described, device: Device, devices: int, assumed: Assumed) -> Generation:
    """Decoding alone: every step reads the weights and all live keys and values; prompts are too few to matter.

    Rows are as many as memory holds beside the weights. At least one response is as long as it may be, so there are
    never fewer steps than ``rollout.max_tokens``.
    """
    config, cfg = d.config, d.cfg
    item = jnp.dtype(config.model.compute_dtype).itemsize
    samples = math.ceil(config.rollout.prompts_per_step / assumed.pass_rate) * config.rollout.n
    per_token = memory.kv_bytes(cfg, item)
    prompt = config.data.max_prompt_tokens
    weights = (flops.layer_params(cfg) + flops.head_params(cfg)) * item
    context = prompt + assumed.tokens / 2  # of a row of any age
    room = max(0.0, SERVER * device.memory - weights) / (per_token * context)
    rows = max(1, min(math.floor(room), math.ceil(samples / devices)))
    tokens = samples * assumed.tokens
    steps = max(tokens / devices / rows, config.rollout.max_tokens)
    live = tokens / devices / steps  # rows of an average step: fewer when the longest response sets the pace
    work = flops.forward(cfg, flops.Work(1, 1, round(context))) * live
    peak = device.flops if item == 2 else device.float32
    step = Time(
        work / (peak * assumed.mfu), (weights + live * context * per_token) / (device.bandwidth * assumed.bandwidth)
    )
    cache = (samples * assumed.tokens + samples / config.rollout.n * prompt) / devices * per_token
    return Generation(samples, tokens, cache, rows, steps, step * steps)


def scoring_passes(config: Config) -> int:
    """Forward passes before the updates: the old policy's if there are several, the reference's if there is one."""
    return (config.algo.updates_per_step > 1) + (config.algo.kl.coef > 0)


def publish_time(d: Described, device: Device) -> Time:
    """Every device receives the whole model in the engine's dtype."""
    item = jnp.dtype(d.config.model.compute_dtype).itemsize
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(d.model.shapes)) * item
    group = tuple(range(d.model.mesh.size))
    if len(group) == 1:
        return Time()
    return Time(network=whole * (len(group) - 1) / len(group) / link(device, group))


def model_flops(d: Described, tokens: float) -> float:
    """What a step's updates need in closed form, padding, recomputation and masked scores left out."""
    config = d.config
    one = flops.group(config.data.max_prompt_tokens, [round(tokens)] * config.rollout.n)
    return config.rollout.prompts_per_step * flops.train(d.cfg, one)
