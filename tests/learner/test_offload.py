"""A state partly in the host's memory: the same bits as on the device, in the same places after every update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import tiny_cases as tiny

from brorl_jax import batches
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.data.packing import Layout
from brorl_jax.learner import offload
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.optim import make_optimizer
from brorl_jax.learner.step import Compute, make_train_step
from brorl_jax.models import sharding

OPTIMIZER = make_optimizer(
    1e-2, warmup_steps=0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0, moment_dtype=jnp.bfloat16
)


def run(mesh, on_host):
    """Two updates with resets of the reference; the state, its shardings, and how often the program was compiled."""

    def create(weights):
        return state_lib.create(weights, OPTIMIZER, reference=True)

    shape = jax.eval_shape(create, tiny.weights())
    where = sharding.like_weights(mesh, tiny.QWEN2, shape)
    where = offload.place(where, shape, reference=on_host, optimizer=on_host)
    state = jax.jit(create, out_shardings=where)(tiny.weights())
    compute = Compute(head_chunk=8, sharding=sharding.slot_sharding(mesh))
    step, score = make_train_step(tiny.QWEN2, tiny.objective(), compute, OPTIMIZER, state), tiny.score(compute=compute)
    batch = sharding.put_batch(mesh, tiny.packed(tiny.random_groups([3] * 4), Layout(4, 1, 16), prefix=8))
    for _ in range(2):
        [batch] = batches.add_scores([batch], score, state, old=False)
        state, metrics, _ = step(state, batch)
        assert metrics["policy/kl_ref"] == 0  # just scored by the same weights
        state = state_lib.reset_reference(state, OPTIMIZER, reset_optimiser=False)
    return state, where, step._cache_size()


@pytest.fixture(scope="module")
def offloaded():
    return run(sharding.make_mesh(fsdp=2), True)


def test_nothing_but_the_place_changes(offloaded):
    state, where, compiled = offloaded
    plain, _, _ = run(sharding.make_mesh(fsdp=2), False)
    tiny.assert_identical(state, plain)
    assert compiled == 1
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, state)
    assert {*jax.tree.leaves(kinds.reference)} == {"pinned_host"}
    assert {*jax.tree.leaves(kinds.params)} == {"device"} == {kinds.updates, kinds.skipped}
    moments, counters = ([k for x, k in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(kinds.opt_state),
                                            strict=True) if bool(x.ndim) == big] for big in (True, False))  # fmt: skip
    assert {*moments} == {"pinned_host"} and {*counters} == {"device"}
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(s, x.ndim)


def test_a_checkpoint_comes_back_to_the_same_places_in_the_same_dtypes(offloaded, tmp_path):
    state, where, _ = offloaded
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state, [], {"step": 1}, None)
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path, keep=1)
    restored, _, _ = checkpointer.restore(placed)
    checkpointer.close()
    tiny.assert_identical(restored, state)
    for x, s in zip(jax.tree.leaves(restored), jax.tree.leaves(where), strict=True):
        assert x.sharding == s and x.sharding.memory_kind == s.memory_kind
    assert {x.dtype for x in jax.tree.leaves(restored.opt_state) if x.ndim} == {jnp.dtype(jnp.bfloat16)}
