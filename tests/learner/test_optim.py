"""AdamW against a plain float64 loop, the learning-rate schedule, skipped updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from brorl_jax.learner import optim

SETTINGS = {"warmup_steps": 0, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 0.0}


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (4, 3), "layers": {"q": (2, 3, 3), "attn_norm": (2, 3), "q_bias": (2, 3)}, "final_norm": (3,)}
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def step_function(optimizer):
    return jax.jit(lambda grads, state, params: optim.apply_or_skip(optimizer, grads, state, params))


def test_warmup():
    schedule = optim.lr_schedule(0.4, 4)
    np.testing.assert_allclose([schedule(i) for i in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose([optim.lr_schedule(0.4, 0)(i) for i in range(3)], 0.4, rtol=1e-6)
    with pytest.raises(ValueError, match="got -1"):
        optim.lr_schedule(0.4, -1)


def test_decay_spares_norms_and_biases():
    expected = {"embed": True, "layers": {"q": True, "attn_norm": False, "q_bias": False}, "final_norm": False}
    assert optim.decay_mask(tree(0)) == expected


def test_four_steps_match_a_plain_loop():
    settings = SETTINGS | {"warmup_steps": 2, "weight_decay": 0.1, "clip_norm": 3.0}
    optimizer = optim.make_optimizer(0.01, **settings)
    params = tree(0)
    state, step = optimizer.init(params), step_function(optimizer)
    p, decays = [np.asarray(x, np.float64) for x in jax.tree.leaves(params)], jax.tree.leaves(optim.decay_mask(params))
    m, v = [np.zeros_like(x) for x in p], [np.zeros_like(x) for x in p]
    for t in range(1, 5):
        grads = jax.tree.map(lambda g, t=t: g * (0.1 if t == 2 else 1.0), tree(t))  # one of them below the clip
        params, state, norm, skipped = step(grads, state, params)
        g = [np.asarray(x, np.float64) for x in jax.tree.leaves(grads)]
        before = np.sqrt(sum((x**2).sum() for x in g))
        assert (before < 3.0) == (t == 2)
        np.testing.assert_allclose(norm, before, rtol=1e-6)  # the norm before clipping
        assert not skipped
        lr = 0.01 * min(1, t / 2)
        for i, decay in enumerate(decays):
            clipped = g[i] * min(1, 3.0 / before)
            m[i] = 0.9 * m[i] + 0.1 * clipped
            v[i] = 0.95 * v[i] + 0.05 * clipped**2
            update = (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
            p[i] = p[i] - lr * (update + (0.1 * p[i] if decay else 0))
    for mine, expected in zip(jax.tree.leaves(params), p, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_non_finite_gradient_norm_changes_no_bit(poison):
    optimizer = optim.make_optimizer(0.01, **SETTINGS | {"weight_decay": 0.1, "clip_norm": 1.0})
    params = tree(0)
    step = step_function(optimizer)
    params, state, _, skipped = step(tree(1), optimizer.init(params), params)
    assert not skipped
    bad = tree(2)
    bad["layers"]["q"] = bad["layers"]["q"].at[1, 2, 0].set(poison)  # 1e30 squared overflows the norm
    same, same_state, norm, skipped = step(bad, state, params)
    assert skipped and not np.isfinite(norm)
    for a, b in zip(jax.tree.leaves((same, same_state)), jax.tree.leaves((params, state)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # The next good update goes on as if the bad one had never been.
    after = step(tree(3), same_state, same)
    expected = step(tree(3), state, params)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert int(optax.tree_utils.tree_get(after[1], "count", filtering=lambda path, _: "adam" in str(path).lower())) == 2


def test_global_norm_is_float32_for_half_precision():
    # 4096 ones in bfloat16: a bfloat16 sum of squares would stall at 256.
    norm = optim.global_norm({"w": jnp.ones(4096, jnp.bfloat16)})
    assert norm.dtype == jnp.float32 and norm == 64


def test_negative_clip_is_refused():
    with pytest.raises(ValueError, match=r"clip_norm must be >= 0 .* got -1"):
        optim.make_optimizer(0.01, **SETTINGS | {"clip_norm": -1})


# --- moments in bfloat16 ---


def test_random_rounding_goes_to_a_neighbour_and_keeps_the_mean():
    """A quarter of the way from 1 to 1 + 2^-7, the next bfloat16: up in a quarter of the cases, down in the rest."""
    exact = jnp.float32([0.0, 1.0, -3.5, 2.0**-100])
    np.testing.assert_array_equal(optim.round_randomly(exact, jax.random.key(0)), exact)
    step = 2.0**-7
    x = jnp.full(40_000, 1 + step / 4)
    for sign in (1, -1):
        out = optim.round_randomly(sign * x, jax.random.key(sign + 1))
        assert out.dtype == jnp.bfloat16
        out = np.asarray(out, np.float64)
        assert {*out} == {sign, sign * (1 + step)}
        up = np.mean(out != sign)
        assert abs(up - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(out))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_moments_follow_the_gradient_in_either_dtype(dtype):
    """600 updates with gradient 1 and b2 = 0.999, then 600 with 0.1: the second moment by its closed form.

    Rounded to the nearest bfloat16 it would stand still at a sixteenth, where a thousandth is less than half a step.
    """
    optimizer = optim.make_optimizer(1e-3, **SETTINGS | {"b2": 0.999}, moment_dtype=dtype)
    params = {"w": jnp.zeros(2048)}

    def run(carry, gradient):
        state, params = carry
        params, state, _, _ = optim.apply_or_skip(optimizer, {"w": jnp.full(2048, gradient)}, state, params)
        return (state, params), state[0].nu["w"].astype(jnp.float32).mean()

    gradients = jnp.repeat(jnp.float32([1.0, 0.1]), 600)
    (state, _), nu = jax.jit(lambda: jax.lax.scan(run, (optimizer.init(params), params), gradients))()
    assert state[0].mu["w"].dtype == state[0].nu["w"].dtype == dtype
    first = 1 - 0.999**600
    np.testing.assert_allclose(nu[599], first, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-4)
    np.testing.assert_allclose(
        nu[1199], 0.999**600 * first + 0.01 * first, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-4
    )
    assert np.asarray(state[0].mu["w"], np.float32).mean() == pytest.approx(0.1, rel=1e-2)


def test_the_first_update_is_the_same_in_either_dtype():
    """The update is made before the moments are rounded; a skipped one rounds nothing."""
    params, grads = tree(0), tree(1)
    results = []
    for dtype in (jnp.float32, jnp.bfloat16):
        optimizer = optim.make_optimizer(0.01, **SETTINGS, moment_dtype=dtype)
        step, state = step_function(optimizer), optimizer.init(params)
        after, moved, _, _ = step(grads, state, params)
        results.append(after)
        bad = jax.tree.map(lambda g: g * jnp.nan, grads)
        _, same, _, skipped = step(bad, moved, after)
        assert skipped
        jax.tree.map(np.testing.assert_array_equal, same, moved)
    jax.tree.map(np.testing.assert_array_equal, *results)
