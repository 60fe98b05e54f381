"""Where weights and batches live, and that an update on a mesh leaves them there, compiles once and shares the work."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
import tiny_cases as tiny
from jax.sharding import PartitionSpec

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.optim import make_optimizer
from brorl_jax.learner.step import Compute, make_train_step
from brorl_jax.models import sharding
from brorl_jax.models.config import ModelConfig
from brorl_jax.models.transformer import shapes

OPTIMIZER = make_optimizer(1e-3, warmup_steps=0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)


def spec(tree):
    return jax.tree.map(lambda s: tuple(s.spec), tree)


def test_rules_by_hand():
    """Qwen2 on fsdp 2 x tensor 2: matrices are split both ways, vectors along the width are whole."""
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    cfg = ModelConfig("qwen2", vocab_size=54, hidden=16, layers=3, heads=4, kv_heads=2, head_dim=6, ffn=24, tied=False)
    assert spec(sharding.weight_shardings(mesh, cfg)) == {
        "embed": ("tensor", "fsdp"),
        "head": ("fsdp", "tensor"),
        "final_norm": (None,),
        "layers": {
            "attn_norm": (None, None),
            "mlp_norm": (None, None),
            **dict.fromkeys(("q", "k", "v", "gate", "up"), (None, "fsdp", "tensor")),
            **dict.fromkeys(("o", "down"), (None, "tensor", "fsdp")),
            **dict.fromkeys(("q_bias", "k_bias", "v_bias"), (None, "tensor")),
        },
    }


@pytest.mark.parametrize("cfg", [tiny.QWEN2, tiny.QWEN3, tiny.LLAMA], ids=lambda cfg: cfg.family)
@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 8}, {"fsdp": 3}, {"tensor": 5}, {"fsdp": 2, "tensor": 4}])
def test_every_weight_fits_its_sharding(cfg, mesh):
    """An axis that does not divide (a vocabulary of 53 by 2, a width of 16 by 3) is left whole instead of failing."""
    where = sharding.weight_shardings(sharding.make_mesh(**mesh), cfg)
    tree = shapes(cfg)
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    assert jax.tree.structure(where) == jax.tree.structure(tree, **is_shape)
    for s, shape in zip(jax.tree.leaves(where), jax.tree.leaves(tree, **is_shape), strict=True):
        assert len(s.spec) == len(shape)
        s.shard_shape(shape)  # raises where it does not divide


def test_a_mesh_of_too_many_devices_says_how_many_there_are():
    have = len(jax.devices())
    with pytest.raises(
        ValueError, match=rf"data=3 x fsdp={have} x context=1 x tensor=1 needs {3 * have} devices, jax sees {have}"
    ):
        sharding.make_mesh(data=3, fsdp=have)
    assert sharding.make_mesh(data=2, tensor=2).shape == {"data": 2, "fsdp": 1, "context": 1, "tensor": 2}


def test_batches_are_split_along_their_slots_and_their_rows_tokens():
    mesh = sharding.make_mesh(data=2, fsdp=2, context=2)
    batch = pack(tiny.random_groups([3] * 4), Layout(4, 2, 8), prefix=8)
    placed = sharding.put_batch(mesh, batch)
    tiny.assert_identical(placed, batch)
    assert placed.n_micro.sharding.is_fully_replicated
    for name in placed._fields[1:]:
        value = getattr(placed, name)
        rest = (2, 4) if value.ndim == 4 else value.shape[2:]
        assert value.sharding.shard_shape(value.shape) == (value.shape[0], 1, *rest), name


def test_everything_that_mirrors_the_weights_is_split_like_them():
    mesh = sharding.make_mesh(fsdp=2)
    state = jax.eval_shape(lambda w: state_lib.create(w, OPTIMIZER, reference=True), tiny.weights())
    leaves = jax.tree_util.tree_leaves_with_path(sharding.like_weights(mesh, tiny.QWEN2, state))
    where = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    split = [path for path, s in where.items() if s.spec == PartitionSpec(None, "fsdp", "tensor")]
    for copy in (".params", ".reference", ".mu", ".nu"):
        assert sum(copy + "['layers']['gate']" in path for path in split) == 1
    assert all(
        s.spec == PartitionSpec() for path, s in where.items() if path.endswith((".count", ".updates", ".skipped"))
    )
    # A leaf of another rank that happens to bear a weight's name is no weight.
    other = sharding.like_weights(mesh, tiny.QWEN2, {"gate": np.zeros(4), "embed": np.zeros((53, 16)), "x": 1.0})
    assert spec(other) == {"gate": (), "embed": ("tensor", "fsdp"), "x": ()}


def on_mesh(mesh, cfg, layout, chunk):
    """A state and a batch on the mesh, and the step for them, as a run makes them."""
    mesh = sharding.make_mesh(**mesh)

    def create(weights):
        return state_lib.create(weights, OPTIMIZER, reference=True)

    where = sharding.like_weights(mesh, cfg, jax.eval_shape(create, tiny.weights(cfg)))
    state = jax.jit(create, out_shardings=where)(tiny.weights(cfg))
    batch = sharding.put_batch(mesh, tiny.packed(tiny.random_groups([3] * 8), layout, prefix=8))
    compute = Compute(head_chunk=chunk, sharding=sharding.slot_sharding(mesh))
    return state, batch, make_train_step(cfg, tiny.objective(), compute, OPTIMIZER, state), where


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=["fsdp4", "data2-context2-tensor2"]
)
def test_updates_leave_the_state_in_place_and_compile_once(mesh):
    """Donated buffers are reused; a second update compiles nothing, nor does one after a reset."""
    state, batch, step, where = on_mesh(mesh, tiny.QWEN2, Layout(8, 1, 16), 16)
    for update in range(4):
        before = jax.tree.leaves(state)
        state, metrics, _ = step(state, batch)
        assert all(x.is_deleted() for x in before)
        for (path, x), s in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(where), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim), jax.tree_util.keystr(path)
        assert step._cache_size() == 1 and metrics["optim/skipped"] == 0
        if update in (1, 2):
            state = state_lib.reset_reference(state, OPTIMIZER, reset_optimiser=update == 1)
    assert state.updates == 4


def test_each_device_computes_its_share():
    """The matrix products that one of 8 devices runs: an eighth of the tokens in each, those of the head included.

    Left to itself the compiler gives every device the whole head, and under fsdp all tokens and an eighth of the width.
    """
    slots, tokens, vocab = 8, 16, tiny.VOCAB
    products = {}
    for name, mesh in {"one": {}, "data": {"data": 8}, "fsdp": {"fsdp": 8}}.items():
        state, batch, step, _ = on_mesh(mesh, tiny.QWEN2, Layout(slots, 1, tokens), slots * tokens)
        text = step.lower(state, batch).compile().as_text()
        products[name] = sorted(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    assert {f"{slots * tokens},{vocab}", f"{slots * tokens},24"} <= set(products["one"])
    assert {f"{tokens},{vocab}", f"{tokens},24"} <= set(products["data"])
    assert not any(shape.startswith((f"{slots * tokens},", f"{slots},2,")) for shape in products["data"])
    assert products["fsdp"] == products["data"]


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 4}, {"data": 2, "context": 2, "tensor": 2}],
    ids=["fsdp4", "data2-context2-tensor2"],
)
def test_the_gradient_of_the_head_is_summed_over_devices_once(mesh):
    """Not chunk by chunk: the loops over chunks, forward and backward, hold no collective."""
    chunk = 8
    state, batch, step, _ = on_mesh(mesh, tiny.QWEN2, Layout(8, 1, 16), chunk)
    text = step.lower(state, batch).compile().as_text()
    heads = re.findall(r'body=%?([\w.\-]+), .*op_name="[^"]*\(head\)+/while', text)
    assert len(heads) == 2, "one loop forward, one backward"
    body = "\n".join(re.search(rf"^%?{re.escape(name)} \(.*?^}}", text, re.M | re.S)[0] for name in heads)
    assert f"[{chunk}," in body
    assert not re.search(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)", body)
