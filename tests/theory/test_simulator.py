"""The simulator against a NumPy loop in float64, optax with autodiff, closed forms and counting statistics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.simulator import NumpyLoop
from brorl_jax.theory import mass_balance, simulator
from brorl_jax.theory.precision import float64
from brorl_jax.theory.simulator import AdamW, Setup

SMALL = Setup(n=12, vocab=50, correct=9, steps=20, log_every=10)
FULL = Setup(n=512)


def together(setup: Setup, adamw: AdamW, steps: int) -> tuple[NumpyLoop, simulator.Record, np.ndarray]:
    """``steps`` updates on the same draws, the loop's: the loop, our record in the precision in force, our ``d``."""
    loop = NumpyLoop(setup, adamw)
    begin = simulator.start(setup)
    state = simulator.initial(setup, begin)
    pad = begin.p.size - setup.vocab

    @jax.jit
    def advance(state, counts):
        return simulator.update(state, simulator.probabilities(begin, state), counts, begin, adamw, setup)

    rng = np.random.default_rng(0)
    for _ in range(steps):
        counts = loop.draw(rng)
        loop.step(counts)
        state = advance(state, jnp.asarray(np.pad(counts, (0, pad)), begin.p.dtype))
    record = jax.jit(simulator.measure, static_argnums=2)(state, begin, setup.correct)
    return loop, jax.tree.map(np.asarray, record), np.asarray(state.d)[: setup.vocab]


@pytest.mark.parametrize("reading", mass_balance.READINGS)
def test_float64_is_the_numpy_loop(reading):
    setup = Setup(n=12, vocab=50, correct=9, reading=reading)
    with jax.enable_x64(True):
        loop, record, d = together(setup, AdamW(weight_decay=0.1, eps=1e-7), steps=40)
    np.testing.assert_allclose(d, loop.z - loop.z0, rtol=1e-9, atol=1e-13)
    for name, want in loop.figures().items():
        np.testing.assert_allclose(getattr(record, name), want, rtol=1e-9, err_msg=name)


def compare_float32(steps: int) -> None:
    loop, record, d = together(FULL, AdamW(), steps)
    moved = loop.z - loop.z0
    assert record.q_pos.dtype == np.float32
    np.testing.assert_allclose(d, moved, rtol=2e-4, atol=2e-5 * np.abs(moved).max())
    want = loop.figures()
    gained = want["q_pos"] - loop.p0[: FULL.correct].sum()
    assert record.q_pos - loop.p0[: FULL.correct].sum() == pytest.approx(gained, rel=1e-3, abs=1e-6)
    assert record.improved == pytest.approx(want["improved"], abs=5e-4)
    assert record.worst_drop == pytest.approx(want["worst_drop"], rel=1e-3)
    assert record.retained == pytest.approx(want["retained"], abs=1e-6)
    assert record.entropy == pytest.approx(want["entropy"], rel=1e-6)


def test_float32_is_enough_at_full_size():
    """128,000 tokens: gradients near p^2 = 4e-9 under an eps of 1e-8, logits near 3 that move by 1e-5 a step."""
    compare_float32(steps=25)


@pytest.mark.slow
def test_float32_is_enough_over_the_whole_run():
    compare_float32(steps=1000)


def test_update_is_optax_adamw_on_the_autodiff_gradient():
    setup, adamw = SMALL, AdamW(lr=0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3)
    with jax.enable_x64(True):
        begin = simulator.start(setup)
        optimiser = optax.adamw(0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3)
        z = begin.z[: setup.vocab]
        theirs, ours = optimiser.init(z), simulator.initial(setup, begin)
        pad = begin.p.size - setup.vocab
        for seed in range(8):
            draws = np.random.default_rng(seed).choice(setup.vocab, setup.n, p=np.asarray(jax.nn.softmax(z)))
            reward = np.where(draws < setup.correct, 1.0, -1.0)

            def loss(z, draws=draws, reward=reward):
                return -jnp.mean(jnp.asarray(reward - reward.mean()) * jax.nn.softmax(z)[draws])

            updates, theirs = optimiser.update(jax.grad(loss)(z), theirs, z)
            z = optax.apply_updates(z, updates)
            counts = jnp.asarray(np.bincount(draws, minlength=setup.vocab + pad), begin.p.dtype)
            ours = simulator.update(ours, simulator.probabilities(begin, ours), counts, begin, adamw, setup)
        np.testing.assert_allclose((begin.z + ours.d)[: setup.vocab], z, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reading", mass_balance.READINGS)
def test_a_step_of_plain_gradient_is_theorem_1(reading):
    """A huge eps turns AdamW into gradient ascent at the rate lr / eps; the theorem is its first order."""
    setup, rate = Setup(n=12, vocab=50, correct=9, reading=reading), 1e-5
    with jax.enable_x64(True):
        begin = simulator.start(setup)
        state, correct = simulator.initial(setup, begin), begin.rewards > 0
        counts = simulator.draw(jax.random.key(0), state.copies * begin.p, setup.n)
        adamw = AdamW(lr=rate * 1e6, eps=1e6, weight_decay=0.0)
        after = simulator.update(state, simulator.probabilities(begin, state), counts, begin, adamw, setup)
        gained = simulator.measure(after, begin, setup.correct).q_pos - begin.p[: setup.correct].sum()
        rewards = begin.rewards - counts @ begin.rewards / setup.n
        p = state.copies * begin.p  # without the padding
        want = mass_balance.delta_q_pos(mass_balance.balance(p, correct, counts, rewards, reading), rate)
    assert float(gained) == pytest.approx(float(want), rel=1e-5)


def test_the_start_is_the_figures():
    record = simulator.simulate(Setup(n=4, steps=1, log_every=1))
    e3, e5 = np.exp(3), np.exp(5)
    assert record.q_pos[0, 0] == pytest.approx((9999 * e3 + e5) / (9999 * e3 + e5 + 118_000), abs=1e-6)  # 0.630
    assert (record.improved[0, 0], record.worst_drop[0, 0], record.retained[0, 0]) == (0, 0, 1)
    flat = simulator.simulate(Setup(n=4, seeded=False, steps=1, log_every=1))
    assert flat.q_pos[0, 0] == pytest.approx(10 / 128, abs=1e-6)
    assert flat.entropy[0, 0] == pytest.approx(np.log(128_000), rel=1e-6)
    np.testing.assert_array_equal(flat.step[0], [0, 1])


def test_draws_follow_the_weights():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(64, 0.3)).astype(np.float32)
    weights[[0, 15, 16, 40, 63]] = 0.0  # at the edges of blocks
    weights[32:48] = 0.0  # a whole block
    n = 200_000
    counts = np.asarray(simulator.draw(jax.random.key(1), jnp.asarray(weights), n))
    assert counts.sum() == n and counts[weights == 0].sum() == 0
    p = weights / weights.sum(dtype=np.float64)
    sigma = np.sqrt(n * p * (1 - p))
    assert (np.abs(counts - n * p) <= 4.5 * sigma + 1e-9).all()


def test_draws_of_a_step_are_independent():
    """Variance of a token's count and covariance of two, one block or two: the multinomial's."""
    weights = jnp.asarray(np.repeat([0.02, 0.05, 0.055], [16, 8, 5]).tolist() + [0.005] * 3, jnp.float32)
    p = np.asarray(weights / weights.sum(), np.float64)
    keys = jax.random.split(jax.random.key(2), 4000)
    counts = np.asarray(jax.vmap(lambda key: simulator.draw(key, weights, 50))(keys), np.float64)
    centred = counts - 50 * p
    for i, j in ((0, 0), (20, 20), (0, 1), (0, 20), (16, 24), (31, 31)):
        products = centred[:, i] * centred[:, j]
        want = 50 * (p[i] * (i == j) - p[i] * p[j])
        assert abs(products.mean() - want) < 4.5 * products.std() / np.sqrt(len(products))


def test_full_size_draws_reach_the_rare_tokens():
    """51,200 draws: correct ones in number, and the share of incorrect tokens never drawn, (1-p)^N, as they should."""
    begin = simulator.start(FULL)
    counts = np.asarray(simulator.draw(jax.random.key(3), begin.p, 51_200))
    q = float(begin.p[:10_000].sum())
    assert abs(counts[:10_000].sum() - 51_200 * q) < 4 * np.sqrt(51_200 * q * (1 - q))
    never = (1 - float(begin.p[-1])) ** 51_200
    got = (counts[10_000:] == 0).mean()
    assert abs(got - never) < 4 * np.sqrt(never * (1 - never) / 118_000)
    halves = (counts[10_000:69_000].sum(), counts[69_000:].sum())  # equal weights, however far along the sum
    assert abs(halves[0] - halves[1]) < 4 * np.sqrt(sum(halves))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(n=3, vocab=60, correct=8, steps=10),  # 30 slots for 52 incorrect tokens
        Setup(n=4, vocab=14, correct=5, steps=2, log_every=2, seeded=False),  # 8 for 9: many draws of one new token
    ],
)
def test_tokens_never_drawn_can_share_a_slot(setup):
    """The same law as the loop's, which has an entry for each token: means and spreads of every figure, 600 seeds."""
    assert setup.pool is not None
    adamw = AdamW(lr=0.05)
    record = simulator.simulate(setup, adamw, seeds=tuple(range(600)))
    runs = []
    for seed in range(600):
        loop, rng = NumpyLoop(setup, adamw), np.random.default_rng(seed)
        for _ in range(setup.steps):
            loop.step(loop.draw(rng))
        runs.append(loop.figures())
    for name in runs[0]:
        ours, theirs = np.asarray(getattr(record, name)[:, -1], np.float64), np.array([run[name] for run in runs])
        middle = theirs.mean()
        for a, b in ((ours, theirs), ((ours - middle) ** 2, (theirs - middle) ** 2)):
            error = np.sqrt((a.var() + b.var()) / 600)
            assert abs(a.mean() - b.mean()) < 4.5 * error + 1e-7, name


def test_draws_of_the_pool_get_slots_of_their_own():
    """Every draw is counted once, new tokens fill the next slots, and the pool has as many tokens less."""
    setup = Setup(n=6, vocab=40, correct=2, steps=5, log_every=5)  # pool of 38 at slot 32
    state = simulator.initial(setup, simulator.start(setup))
    counts, copies = np.zeros(48, np.float32), np.array(state.copies)
    copies[[2, 3, 4, 32]] = [1, 1, 1, 35]  # three have been drawn before
    counts[[0, 3, 32]] = [1, 1, 4]
    split, seen = jax.jit(functools.partial(simulator.tell_apart, setup=setup)), set()
    for seed in range(300):
        new, left = map(np.asarray, split(jax.random.key(seed), counts, copies))
        k = int(35 - left[32])
        assert new[32] == 0 and new.sum() == 6 and (new[0], new[3]) == (1, 1)
        assert (new[5 : 5 + k] > 0).all() and new[5 : 5 + k].sum() == 4
        assert (left[:5] == 1).all() and (left[5 : 5 + k] == 1).all() and left.sum() == 40
        seen.add(k)
    assert seen == {3, 4} or seen == {2, 3, 4}  # of 4 draws from 35 tokens two agree in 16 of 100 cases


def test_a_seed_is_the_same_alone_or_in_company():
    many = simulator.simulate(SMALL, seeds=(3, 5, 7))
    alone = simulator.simulate(SMALL, seeds=(5,))
    for a, b in zip(many, alone, strict=True):
        np.testing.assert_allclose(a[1], b[0], rtol=1e-5, atol=1e-6)
    assert np.ptp(many.q_pos[:, -1]) > 0
    np.testing.assert_array_equal(many.step[0], [0, 10, 20])


def test_simulate_in_float64():
    record = float64(simulator.simulate)(SMALL, AdamW(), (0,))
    assert record.q_pos.dtype == np.float64 and record.q_pos[0, -1] != record.q_pos[0, 0]


def test_mass_kept_without_updates():
    """A rate of 0 moves nothing, whatever was drawn."""
    record = simulator.simulate(SMALL, AdamW(lr=0.0), seeds=(0, 1))
    np.testing.assert_array_equal(record.improved, 0)
    np.testing.assert_array_equal(record.worst_drop, 0)
    np.testing.assert_array_equal(record.retained, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"n": 0}, "n must be >= 1 draw per step, got 0"),
        ({"correct": 50}, "got 50 of 50 tokens"),
        ({"log_every": 7}, "log_every = 7 must divide steps = 20, both at least 1"),
        ({"reading": "bag"}, "unknown reading 'bag'"),
    ],
)
def test_setups_that_mean_nothing_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Setup(**{"n": 4, "vocab": 50, "correct": 9, "steps": 20, "log_every": 10} | change)
