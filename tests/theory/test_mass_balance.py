"""The theorem against direct expansion, autodiff, finite differences, simulation, and a case worked by hand."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.theory import mass_balance as mb
from brorl_jax.theory.precision import float64

CASES = 100


def policy(rng: np.random.Generator, vocab: int) -> np.ndarray:
    logits = rng.normal(0, rng.uniform(0.1, 4), vocab)
    p = np.exp(logits - logits.max())
    return p / p.sum()


def case(seed: int) -> dict:
    """A random policy, labels, draws and reward levels; some samples miss a side altogether."""
    rng = np.random.default_rng(seed)
    vocab, n = int(rng.choice([2, 9, 60])), int(rng.integers(1, 80))  # few shapes: each compiles
    p = policy(rng, vocab)
    return dict(
        p=p,
        correct=rng.random(vocab) < rng.uniform(0, 1),
        counts=rng.multinomial(n, p),
        n=n,
        r_c=float(rng.uniform(0, 2)),
        r_w=-float(rng.uniform(0, 2)),
        eta=float(10 ** rng.uniform(-4, 0)),
    )


def expansion(c: dict, signals: np.ndarray) -> np.ndarray:
    """``dp`` by the Jacobian of the softmax applied twice, as a dense matrix in NumPy float64."""
    jacobian = np.diag(c["p"]) - np.outer(c["p"], c["p"])
    gradient = jacobian @ (signals / c["n"])  # of J = (1/N) sum s_i p_i
    return jacobian @ (c["eta"] * gradient)


def signals_of(c: dict, reading: str) -> np.ndarray:
    rewards = np.where(c["correct"], c["r_c"], c["r_w"])
    return rewards * (c["counts"] if reading == "multiplicity" else c["counts"] > 0)


def balance_of(c: dict, reading: str) -> mb.Balance:
    rewards = float64(mb.two_level)(c["correct"], c["r_c"], c["r_w"])
    return float64(mb.balance)(c["p"], c["correct"], c["counts"], rewards, reading)


@pytest.mark.parametrize("reading", mb.READINGS)
def test_theorem_is_the_direct_expansion(reading):
    worst = 0.0
    for seed in range(CASES):
        c = case(seed)
        dp = expansion(c, signals_of(c, reading))
        b = balance_of(c, reading)
        unsampled = c["correct"] & (c["counts"] == 0)
        scale = np.abs(dp).sum()  # the two sides cancel: relative to what moves
        for got, want in (
            (float64(mb.delta_q_pos)(b, c["eta"]), dp[c["correct"]].sum()),
            (float64(mb.delta_unsampled_correct)(b, c["eta"]), dp[unsampled].sum()),
        ):
            worst = max(worst, abs(got - want) / scale)
    assert worst < 1e-12


@pytest.mark.parametrize("reading", mb.READINGS)
def test_logit_update_and_first_order_change_are_the_softmax_jacobian(reading):
    for seed in range(20):
        c = case(seed)
        s = signals_of(c, reading)
        dz = float64(mb.logit_update)(c["p"], s, c["n"], c["eta"])
        dp = float64(mb.first_order)(c["p"], dz)
        np.testing.assert_allclose(dp, expansion(c, s), rtol=1e-9, atol=1e-15)


def test_logit_update_is_the_gradient_of_the_surrogate():
    c = case(3)
    s = signals_of(c, "multiplicity")
    with jax.enable_x64(True):
        z = jnp.log(jnp.asarray(c["p"]))
        want = jax.grad(lambda z: jnp.sum(jnp.asarray(s) * jax.nn.softmax(z)) / c["n"])(z)
        got = mb.logit_update(jnp.asarray(c["p"]), jnp.asarray(s), c["n"], 1.0)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-18)


def test_real_steps_approach_the_theorem_as_they_shrink():
    """Halving eta halves the relative distance between the moved softmax and the theorem: first order, exactly."""
    for seed in range(20):
        c = case(seed) | {"eta": 1e-3}
        b = balance_of(c, "distinct")
        s = signals_of(c, "distinct")
        errors = []
        for eta in (1e-2, 5e-3):
            z = np.log(c["p"]) + float64(mb.logit_update)(c["p"], s, c["n"], eta)
            moved = np.exp(z - z.max())
            moved /= moved.sum()
            change = (moved - c["p"])[c["correct"]].sum()
            errors.append(abs(change - float64(mb.delta_q_pos)(b, eta)) / eta)
        assert errors[1] == pytest.approx(errors[0] / 2, rel=0.02, abs=1e-12)


def test_worked_by_hand():
    """p = 1/2, 1/4, 1/8, 1/8; the first and third are correct; the first is drawn twice, the second once."""
    p = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    correct = np.array([True, False, True, False])
    b = float64(mb.balance)(p, correct, np.array([2, 1, 0, 0]), np.array([1.0, -1.0, 1.0, -1.0]))
    assert (b.n, b.q_pos, b.q_neg, b.p_pos, b.p_neg) == (3, 5 / 8, 3 / 8, 1 / 2, 1 / 4)
    assert (b.a2, b.b2, b.u_pos2, b.u_neg2, b.s_r) == (1 / 4, 1 / 16, 1 / 64, 1 / 64, 1 / 4)
    t = float64(mb.terms)(b)
    # (1 - 1/4) 3/8 1/4, (1/4 + 1) 5/8 1/16, 1/4 (5/8 - 3/8) 1/64
    assert t == (float(Fraction(9, 128)), float(Fraction(25, 512)), float(Fraction(1, 1024)))
    assert float64(mb.delta_q_pos)(b, 3.0) == float(Fraction(72 + 50 + 1, 1024))

    twice = float64(mb.balance)(p, correct, np.array([2, 1, 0, 0]), np.array([1.0, -1.0, 9.0, 9.0]), "multiplicity")
    assert (twice.s_r, twice.sa2, twice.sb2) == (3 / 4, 1 / 2, -1 / 16)


def test_a_rare_draw_is_pushed_down_when_multiplicities_count():
    """Two correct tokens, drawn nine times and once: under ``multiplicity`` the rare one loses, as a set it gains."""
    p, counts = np.array([0.5, 0.5]), np.array([9, 1])
    dz = {r: float64(mb.logit_update)(p, float64(mb.signal)(counts, np.ones(2), r), 10, 1.0) for r in mb.READINGS}
    np.testing.assert_allclose(dz["distinct"], 0.0, atol=1e-17)
    np.testing.assert_allclose(dz["multiplicity"], [0.2, -0.2])


def test_real_valued_rewards_follow_the_general_law():
    for seed in range(20):
        c = case(seed)
        rng = np.random.default_rng(seed + 1000)
        rewards, values = rng.normal(size=(2, c["p"].size))
        s = np.where(c["counts"] > 0, rewards, 0.0)
        dp = expansion(c, s)
        got = float64(mb.delta_expectation)(c["p"], values, s, c["n"], c["eta"])
        assert got == pytest.approx(values @ dp, rel=1e-9, abs=1e-14)
        indicator = float64(mb.delta_expectation)(c["p"], c["correct"].astype(float), s, c["n"], c["eta"])
        b = float64(mb.balance)(c["p"], c["correct"], c["counts"], rewards)
        assert float64(mb.delta_q_pos)(b, c["eta"]) == pytest.approx(indicator, rel=1e-9, abs=1e-14)


def test_rewards_of_unsampled_tokens_are_never_read():
    c = case(5)
    rewards = np.where(c["correct"], c["r_c"], c["r_w"])
    poisoned = np.where(c["counts"] > 0, rewards, np.nan)
    for reading in mb.READINGS:
        clean = float64(mb.balance)(c["p"], c["correct"], c["counts"], rewards, reading)
        assert clean == float64(mb.balance)(c["p"], c["correct"], c["counts"], poisoned, reading)


def test_batches_of_nodes_are_the_nodes_one_by_one():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(7), (2, 3))
    correct = rng.random((2, 3, 7)) < 0.5
    counts = rng.multinomial(5, p)
    rewards = rng.normal(size=(2, 3, 7))
    many = float64(mb.balance)(p, correct, counts, rewards, "multiplicity")
    for i in np.ndindex(2, 3):
        one = float64(mb.balance)(p[i], correct[i], counts[i], rewards[i], "multiplicity")
        np.testing.assert_allclose([x[i] for x in many], one, rtol=1e-12, atol=1e-15)
    dz = float64(mb.logit_update)(p, rewards, np.full((2, 3), 5), 0.1)
    np.testing.assert_allclose(dz[1, 2], float64(mb.logit_update)(p[1, 2], rewards[1, 2], 5, 0.1), rtol=1e-12)


def test_many_samples_of_one_policy_broadcast():
    rng = np.random.default_rng(1)
    p, correct = rng.dirichlet(np.ones(7)), np.arange(7) < 3
    counts, rewards = rng.multinomial(4, p, size=5), np.where(correct, 1.0, -1.0)
    terms = float64(mb.terms)(float64(mb.balance)(p, correct, counts, rewards))
    moments = float64(mb.unsampled_second_moment)(p, 4, counts == 0)
    for i in range(5):
        one = float64(mb.terms)(float64(mb.balance)(p, correct, counts[i], rewards))
        np.testing.assert_allclose([x[i] for x in terms], one, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(moments[i], (p**2 * (1 - p) ** 4)[counts[i] == 0].sum(), rtol=1e-12)


def test_traced_in_float32():
    c = case(8)
    rewards = np.where(c["correct"], c["r_c"], c["r_w"]).astype(np.float32)
    p = c["p"].astype(np.float32)
    b = jax.jit(mb.balance)(p, c["correct"], c["counts"], rewards)
    assert b.s_r.dtype == jnp.float32
    for got, want in zip(b, balance_of(c, "distinct"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "seed"), [(4, 0), (16, 1), (128, 2)])
def test_expected_unsampled_second_moment_by_simulation(n, seed):
    rng = np.random.default_rng(seed)
    p = policy(rng, 300)
    correct = rng.random(300) < 0.3
    draws = rng.multinomial(n, p, size=4000)
    for where in (None, correct):
        keep = np.ones(300, bool) if where is None else where
        moments = ((draws == 0) & keep) @ p**2
        error = moments.std(ddof=1) / np.sqrt(len(moments))
        got = float64(mb.unsampled_second_moment)(p, n, where)
        assert abs(moments.mean() - got) < 4 * error


def test_a_leaf_of_the_simulator_survives_as_often_as_published():
    """(1-p)^N at p = 6.3e-5 is 0.999, 0.968 and 0.040 for N = 16, 512 and 51,200; in float32, too."""
    p = np.float32(6.3e-5)
    for n, want in ((16, 0.999), (512, 0.968), (51_200, 0.040)):
        assert float(mb.unsampled_second_moment(p[None], n)) / p**2 == pytest.approx(want, abs=5e-4)


def test_bound_is_reached_by_a_uniform_policy_over_n_plus_1_tokens():
    for n in (1, 4, 511):
        uniform = np.full(n + 1, 1 / (n + 1))
        bound = float64(mb.unsampled_second_moment_bound)(n)
        assert float64(mb.unsampled_second_moment)(uniform, n) == pytest.approx(float(bound), rel=1e-12)
        assert float(bound) == pytest.approx(float(Fraction(n, n + 1) ** n / (n + 1)), rel=1e-12)


def test_nothing_drawn_leaves_everything_unsampled():
    p = np.array([0.7, 0.3])
    assert float64(mb.unsampled_second_moment)(p, 0) == pytest.approx(0.58)
    assert float64(mb.unsampled_second_moment)(np.array([1.0]), 0) == 1.0
    assert float64(mb.unsampled_second_moment)(np.array([1.0]), 1) == 0.0
    assert float64(mb.unsampled_second_moment_bound)(0) == 1.0


def test_refusals_name_the_value():
    with pytest.raises(ValueError, match="r_c >= 0 >= r_w, got r_c = -1"):
        mb.two_level(np.array([True]), -1.0)
    with pytest.raises(ValueError, match="unknown reading 'bag'"):
        mb.signal(np.array([1]), np.array([1.0]), "bag")


def test_float64_stays_inside_the_call():
    assert float64(jnp.square)(np.array([1 / 3])).dtype == np.float64
    assert jnp.zeros(1).dtype == jnp.float32
