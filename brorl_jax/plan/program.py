"""The real train step of a config, compiled for one device of a simulated mesh: no weights, no accelerator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from brorl_jax import assemble
from brorl_jax.config import Config
from brorl_jax.data.packing import rounded_up
from brorl_jax.learner.state import TrainState
from brorl_jax.learner.step import make_score, make_train_step
from brorl_jax.models import sharding
from brorl_jax.models.config import ModelConfig
from brorl_jax.plan import hlo
from brorl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as compiled for one device.

    Attributes:
        products: Its matrix products.
        collectives: What it exchanges with other devices.
        arguments: Bytes of its arguments on a device.
        temporaries: Bytes that XLA:CPU needs beside arguments and results.
        cost_analysis: XLA's own count of FLOPs, every loop's body once.
    """

    products: list[hlo.Product]
    collectives: list[hlo.Collective]
    arguments: int
    temporaries: int
    cost_analysis: float

    def flops(self, turns: int) -> int:
        """Of all matrix products, for ``turns`` micro-batches."""
        return sum(p.flops * p.runs(turns) for p in self.products)

    def sent(self, turns: int) -> float:
        """Bytes that each device sends for ``turns`` micro-batches."""
        return sum(c.sent * c.runs(turns) for c in self.collectives)


@dataclasses.dataclass(frozen=True)
class Described:
    """A config's learner as shapes: what its programs take, and where that lives."""

    config: Config
    model: assemble.Network
    optimizer: Any
    state: TrainState
    batch: Batch

    @property
    def cfg(self) -> ModelConfig:
        return self.model.cfg


def describe(config: Config, cfg: ModelConfig, mesh: Mesh, micro: int) -> Described:
    """The state and a mini-batch of ``micro`` micro-batches, as shapes with their shardings.

    A cuDNN kernel cannot be compiled without a GPU: the blockwise form, of the same products, stands in for it.
    """
    if config.model.attention == "cudnn":
        config = copy.deepcopy(config)
        config.model.attention = "blockwise"
    model = assemble.network(config, cfg, mesh)
    optimizer = assemble.optimizer(config, assemble.learning_rate(config), config.optim.warmup_steps)
    _, state = assemble.training_state_maker(config, model, optimizer)
    layout = assemble.layout(config)
    slots, rows = (micro, layout.slots), (micro, layout.slots, layout.rows, layout.row_tokens)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.batch_sharding(mesh, len(shape)))

    prefix = rounded_up(config.data.max_prompt_tokens - 1)
    batch = Batch(
        n_micro=array((), jnp.int32),
        prefix=array((*slots, prefix), jnp.int32),
        prefix_len=array(slots, jnp.int32),
        **{name: array(rows, jnp.int32) for name in ("inputs", "tokens", "segment_ids", "positions")},
        mask=array(rows, jnp.bool_),
        **{name: array(rows, jnp.float32) for name in ("advantages", "rollout_logp", "old_logp", "ref_logp")},
        fresh=array(slots, jnp.bool_),
    )
    return Described(config, model, optimizer, state, batch)


def compile_step(d: Described) -> Compiled:
    """The train step."""
    step = make_train_step(d.cfg, assemble.objective(d.config), d.model.compute, d.optimizer, d.state)
    return _compile(step, d.model.mesh, d.state, d.batch)


def compile_score(d: Described) -> Compiled:
    """A scoring pass, as for the old policy's and the reference's log-probabilities."""
    return _compile(make_score(d.cfg, d.model.compute), d.model.mesh, d.state.params, d.batch)


def _compile(program: Any, mesh: Mesh, *arguments: Any) -> Compiled:
    """Compiles and keeps what the partitioner made of it: the program that every backend starts from.

    XLA:CPU's later passes turn bfloat16 into float32 and products into library calls, so its final text says less.
    """
    with tempfile.TemporaryDirectory() as folder, _uncached():
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        compiled = program.lower(*arguments).compile(compiler_options=options)
        texts = sorted(Path(folder).glob("*after_spmd-partitioning*")) or sorted(
            Path(folder).glob("*before_optimizations.txt")  # one device: nothing to partition
        )
        products, collectives = hlo.analyse(texts[0].read_text(), mesh.size)
    memory = compiled.memory_analysis()
    return Compiled(
        products,
        collectives,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        compiled.cost_analysis()["flops"],
    )


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Programs with a folder's name among their options would never be found again in the cache on disk."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def shard_sizes(tree: Any) -> list[int]:
    """Numbers that each device that holds a part of an array holds of it, by array."""
    return [math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]


def held(tree: Any) -> dict[str, int]:
    """Bytes of a tree of shapes on each device that holds a part, by kind of memory (``device``, ``pinned_host``)."""
    total: dict[str, int] = {}
    for x, count in zip(jax.tree.leaves(tree), shard_sizes(tree), strict=True):
        kind = x.sharding.memory_kind or "device"
        total[kind] = total.get(kind, 0) + count * x.dtype.itemsize
    return total
