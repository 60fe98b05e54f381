"""The plan as lines of text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from brorl_jax import assemble
from brorl_jax import config as config_lib
from brorl_jax.config import Config
from brorl_jax.devices import Device
from brorl_jax.models import flops, sharding
from brorl_jax.plan import fit, memory, predict, program, shapes
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.predict import Assumed, Time
from brorl_jax.plan.program import Compiled, Described

SHOWN = 6  # collectives by name


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the config is to run.

    Attributes:
        count: Devices.
        name: Of their kind.
        device: Their kind.
        assumed: What no config says.
    """

    count: int
    name: str
    device: Device
    assumed: Assumed


def plan(config: Config, target: Target, model_file: str | None) -> Iterator[str]:
    """Plans ``config``, yielding lines as they are known.

    Raises:
        UserError: The model's shape is unknown, or the devices do not fit the mesh.
    """
    started = time.monotonic()
    cfg, source = shapes.model_config(config, model_file)
    changes = fit.choose_mesh(config, target.count, target.device.node)
    config = fit.apply(config, changes)
    config_lib.validate(config)
    micro = assemble.micro_batches(config, target.assumed.tokens)

    def describe(change: fit.Changes) -> Described:
        changed = fit.apply(config, change)
        return program.describe(changed, cfg, sharding.make_mesh(**changed.mesh), micro)

    d = describe({})
    yield from _header(d, target, source, changes)
    step = program.compile_step(d)
    yield from _memory(d, target.device, step)
    yield from _verdict(d, target.device, describe)
    yield from _flops(d, step, micro, target)
    yield from _collectives(step, micro, target.device)
    yield from _rollouts(d, target)
    yield from _time(d, step, micro, target)
    yield f"(planned in {time.monotonic() - started:.0f} s; nothing was run)"


def _header(d: Described, target: Target, source: str, changes: fit.Changes) -> Iterator[str]:
    config, device, batch = d.config, target.device, d.config.batch
    weights = flops.layer_params(d.cfg) + flops.head_params(d.cfg) * (1 if d.cfg.tied else 2)
    mesh = " x ".join(f"{axis}={size}" for axis, size in d.model.mesh.shape.items())
    size = f"{weights / 1e9:.3g} B" if weights >= 1e9 else f"{weights / 1e6:.3g} M"
    yield f"{config.name}: {size} weights ({source})"
    yield f"on {target.count} {target.name} of {device.memory / 1e9:g} GB ({device.source}), mesh {mesh}"
    if changes:
        yield f"  config.mesh has another number of devices, so this is proposed instead: {_named(changes)}"
    if cut := fit.cut_heads(d.cfg, config.mesh.tensor):
        yield f"  warning: mesh.tensor={config.mesh.tensor} cuts through {' and '.join(cut)}: devices then exchange"
        yield "  parts of heads, which is among the collectives below, and may hold more than the memory below says"
    yield (
        f"micro-batch of {batch.slots} slots x {batch.rows} rows x {batch.row_tokens} tokens, prompts of up to "
        f"{config.data.max_prompt_tokens} tokens"
    )
    yield f"remat {config.model.remat}, {config.model.compute_dtype} over {config.model.param_dtype} weights"
    yield ""


def _memory(d: Described, device: Device, step: Compiled) -> Iterator[str]:
    plain, flash = (predict.bytes_needed(d, scores=scores) for scores in (True, False))
    yield f"{'memory of one device in a train step, GiB':<46}{'scores in memory':>18}{'flash attention':>18}"
    for kind in plain:
        if plain[kind] or flash[kind]:
            yield f"  {kind:<44}{_gib(plain[kind]):>18}{_gib(flash[kind]):>18}"
    yield f"  {'all':<44}{_gib(sum(plain.values())):>18}{_gib(sum(flash.values())):>18}"
    for kind, size in program.held(d.state).items():
        if kind != "device":
            yield f"  {f'of the state in {kind}':<44}{_gib(size):>18}"
    which = "scores in memory" if predict.writes_scores(d.config) else "flash attention"
    yield "  State and batch follow from shapes and shardings, the rest from closed forms; model.attention ="
    yield f"  {d.config.model.attention} is the column '{which}'. Compiled for this processor, which also turns"
    yield f"  bfloat16 into float32: {_gib(step.arguments)} of arguments, {_gib(step.temporaries)} of temporaries."


def _verdict(d: Described, device: Device, describe: Callable[[fit.Changes], Described]) -> Iterator[str]:
    def needed(change: fit.Changes) -> int:
        changed = describe(change)
        return sum(predict.bytes_needed(changed, scores=predict.writes_scores(changed.config)).values())

    limit, size = int(predict.USABLE * device.memory), needed({})
    of = f"{_gib(size)} of {_gib(limit)} GiB, {predict.USABLE:.0%} of the device"
    if size <= limit:
        yield f"fits: {of}"
    else:
        yield f"does not fit: {of}"
        options = fit.candidates(d.config, d.cfg, device.node)
        if found := fit.smallest_change(options, needed, limit):
            yield f"smallest change that fits: {_named(found[0])} ({_gib(found[1])} GiB)"
        else:
            tried = "; ".join(map(_named, options)) or "nothing left to change"
            yield f"no change that was tried fits ({tried}): more devices, shorter rows or a smaller model"
    yield ""


def _flops(d: Described, step: Compiled, micro: int, target: Target) -> Iterator[str]:
    updates, tokens = d.config.algo.updates_per_step, target.assumed.tokens
    executed = step.flops(micro) * updates * target.count
    yield f"FLOPs of one step: {updates} updates of {micro} micro-batches, responses of {tokens:g} tokens, all devices"
    yield f"  {predict.model_flops(d, tokens):.3e} needed, in closed form: causal pairs, each prompt once"
    yield f"  {executed:.3e} in matrix products of the compiled program: with padding, recomputation, masked scores"
    yield f"  {step.cost_analysis:.3e} by XLA's own count of one update on one device: every loop's body once"
    yield ""


def _collectives(step: Compiled, micro: int, device: Device) -> Iterator[str]:
    def seconds(c: Collective) -> float:
        return predict.seconds_to_send(c, micro, device)

    sent = [c for c in step.collectives if c.sent]
    yield "collectives of one update, each device" + ("" if sent else ": none")
    for kind in sorted({c.kind for c in sent}):
        those = [c for c in sent if c.kind == kind]
        total = sum(c.sent * c.runs(micro) for c in those)
        took = sum(map(seconds, those))
        yield f"  {kind:<20}{sum(c.runs(micro) for c in those):>9} times{total / 1e9:12.2f} GB sent{took:10.2f} s"
    for c in sorted(sent, key=seconds, reverse=True)[:SHOWN]:
        where = "/".join(part for part in c.where.split("/") if part not in ("while", "body", "closed_call"))
        yield f"    {seconds(c):8.2f} s: {c.runs(micro)} x {c.kind} of {c.size / 1e6:.1f} MB among {len(c.group)}"
        yield f"                {where}"
    yield ""


def _rollouts(d: Described, target: Target) -> Iterator[str]:
    assumed, r = target.assumed, predict.generation(d, target.device, target.count, target.assumed)
    per_token = memory.kv_bytes(d.cfg, jnp.dtype(d.config.model.compute_dtype).itemsize)
    yield "rollouts of one step"
    yield (
        f"  {r.samples:,} samples of {assumed.tokens:g} tokens, {r.tokens:.3g} in all; {assumed.pass_rate:.0%} of the "
        "groups are trained on"
    )
    yield f"  keys and values: {per_token / 1024:.1f} KiB a token, {_gib(r.cache)} GiB a device for all samples at once"
    yield f"  {r.rows} rows at a time beside a whole copy of the model on each device, {r.steps:.0f} decoding steps"
    yield ""


def _time(d: Described, step: Compiled, micro: int, target: Target) -> Iterator[str]:
    config, device, assumed = d.config, target.device, target.assumed
    half = jnp.dtype(config.model.compute_dtype).itemsize == 2
    updates, passes = config.algo.updates_per_step, predict.scoring_passes(config)
    scores = predict.writes_scores(config)
    score = program.compile_score(d) if passes else None

    def of(compiled: Compiled, state: int = 0) -> Time:
        return predict.program_time(compiled, micro, device, assumed, half=half, scores=scores, state=state) * updates

    optimiser = 2 * sum(predict.on_device(tree) for tree in (d.state.params, d.state.opt_state))
    parts: dict[str, Time] = {
        "generation": predict.generation(d, device, target.count, assumed).time,
        f"scoring, {passes} passes": of(score) * passes if score else Time(),
        f"updates, {updates}": of(step, optimiser),
        "publishing": predict.publish_time(d, device),
    }
    yield (
        f"seconds of one step: products at {assumed.mfu:.0%} of the peak, memory at {assumed.bandwidth:.0%}, links at "
        "their full rate"
    )
    yield f"  {'':<20}{'compute':>12}{'memory':>12}{'network':>12}{'overlapping':>14}{'in turn':>12}"
    for part, t in parts.items():
        yield f"  {part:<20}{t.compute:12.2f}{t.memory:12.2f}{t.network:12.2f}{t.least:14.2f}{t.most:12.2f}"
    least, most = (sum(getattr(t, end) for t in parts.values()) for end in ("least", "most"))
    yield f"  {'all':<56}{least:14.2f}{most:12.2f}   = {span(least, most)}"
    steps, update = config.train.steps, parts[f"updates, {updates}"]
    peak = target.count * (device.flops if half else device.float32)
    low, high = (predict.model_flops(d, assumed.tokens) / (t * peak) for t in (update.most, update.least))
    yield f"  {steps} steps: {span(least * steps, most * steps)}"
    yield f"  MFU of the updates: {low:.1%} to {high:.1%}"
    yield "  Left out: verifiers, data, packing, evaluation, checkpoints, compilation."


def span(least: float, most: float) -> str:
    """From so many seconds to so many, in the unit that suits the longer."""
    if most < 120:
        return f"{least:.3g} to {most:.3g} s"
    size, unit = (60, "min") if most < 7200 else (3600, "h")
    return f"{least / size:,.1f} to {most / size:,.1f} {unit}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _named(changes: dict[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in changes.items())
