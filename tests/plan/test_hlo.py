"""What is read from a partitioned program: against counts worked by hand on a toy mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from brorl_jax.models import sharding
from brorl_jax.plan import hlo, program

L, B, D = 3, 16, 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3]]),
        ("x", [[0, 1, 2, 3]]),
    ],
)
def test_groups_in_every_notation(text, expected):
    assert sorted(map(sorted, hlo.groups(text, 4).tolist())) == expected


def test_sizes():
    assert hlo.size("f32[2,3]{1,0}") == 24
    assert hlo.size("(bf16[5], s32[], pred[4]{0})") == 10 + 4 + 4


def test_products_and_collectives_of_a_toy_mesh():
    """``n`` turns of a scan over fsdp-split layers, data 2 x fsdp 4: per device a B/8 x D x D product thrice a layer.

    A layer's weights (D x D bfloat16) are gathered among 4 forward and again backward, its gradient is scattered among
    them and reduced over the 2 replicas; all of it per layer and per turn of the outer loop, whose length is not known.
    """

    def loss(w, x):
        y, _ = jax.lax.scan(lambda c, wi: (jnp.tanh(c @ wi.astype(jnp.bfloat16)), None), x.astype(jnp.bfloat16), w)
        return jnp.sum(y.astype(jnp.float32))

    def turns(w, x, n):
        return jax.lax.fori_loop(0, n, lambda _, g: g + jax.grad(loss)(w + g, x), jnp.zeros_like(w))

    mesh = sharding.make_mesh(data=2, fsdp=4)
    where = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    w = jax.ShapeDtypeStruct((L, D, D), jnp.float32, sharding=where)
    x = jax.ShapeDtypeStruct((B, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    n = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = program._compile(jax.jit(turns, out_shardings=where), mesh, w, x, n)
    # Forward, and two gradients of it. XLA's own count has one layer of one turn.
    assert compiled.flops(1) == 3 * L * 2 * (B // 8) * D * D
    assert compiled.flops(5) == 5 * compiled.flops(1)
    assert compiled.cost_analysis < compiled.flops(1)
    big = [c for c in compiled.collectives if c.size >= D * D // 4 * 2]
    assert all(c.turns and c.times == L for c in big)
    kinds = sorted((c.kind, len(c.group), c.size) for c in big)
    whole = D * D * 2
    assert kinds == [
        ("all-gather", 4, whole),
        ("all-gather", 4, whole),
        ("all-reduce", 2, whole // 4),
        ("reduce-scatter", 4, whole),
    ]
    # In a ring of 4 each sends 3/4 of the whole, in one of 2 an all-reduce sends its size once.
    assert sum(c.sent for c in big) == 3 * 0.75 * whole + whole // 4


def test_what_a_loop_does_not_change_is_gathered_once():
    def f(w, x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=7)[0]

    mesh = sharding.make_mesh(fsdp=4)
    w = jax.ShapeDtypeStruct((D, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp", None)))
    rows = NamedSharding(mesh, PartitionSpec("fsdp", None))
    x = jax.ShapeDtypeStruct((B, D), jnp.float32, sharding=rows)
    compiled = program._compile(jax.jit(f, out_shardings=rows), mesh, w, x)
    assert [(c.kind, c.times, c.turns) for c in compiled.collectives if c.sent] == [("all-gather", 1, False)]
    assert compiled.flops(1) == 7 * 2 * (B // 4) * D * D
    assert np.isclose(compiled.sent(1), 0.75 * D * D * 4)
