"""The trie and its mass balance against closed forms, brute force over all continuations, automatic differentiation."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.theory import trie as trie_lib


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def one_token(seed: int, vocab: int, n: int, dtype=np.float64):
    """A known policy over single tokens, its draws, the correct tokens, the trie of the draws."""
    rng = np.random.default_rng(seed)
    p = softmax(2.0 * rng.normal(size=vocab))
    correct = rng.random(vocab) < 0.4
    draws = rng.choice(vocab, n, p=p)
    rewards = correct[draws].astype(float)
    trie = trie_lib.build(
        draws[:, None], np.ones(n, int), np.log(p)[draws][:, None].astype(dtype), rewards, np.zeros(n, int),
        min_visits=1, max_depth=4,
    )  # fmt: skip
    return p, correct, draws, rewards, trie


def closed_form(p, correct, drawn, right, wrong):
    """The theorem's bracket, written out term by term [P]: sampled correct, sampled incorrect, unsampled coupling."""
    a, b = correct & drawn, ~correct & drawn
    u_pos, u_neg = correct & ~drawn, ~correct & ~drawn
    q = p[correct].sum()
    mood = right * p[a].sum() + wrong * p[b].sum()
    two = lambda where: (p[where] ** 2).sum()  # noqa: E731
    return (
        (right - mood) * (1 - q) * two(a),
        (mood - wrong) * q * two(b),
        mood * (q * two(u_neg) - (1 - q) * two(u_pos)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_one_token_task_everything_sampled_equals_the_closed_form(seed):
    p, correct, draws, rewards, trie = one_token(seed, vocab=6, n=100_000)
    drawn = np.bincount(draws, minlength=6) > 0
    assert drawn.all()
    base = rewards.mean()
    got = trie_lib.balance(trie, np.array([base]), 6)
    up, down, coupling = closed_form(p, correct, drawn, 1 - base, -base)
    assert coupling == 0
    np.testing.assert_allclose(got.up, up, rtol=1e-9)
    np.testing.assert_allclose(got.down, down, rtol=1e-9)
    np.testing.assert_allclose([got.low, got.high], up + down, rtol=1e-9)
    np.testing.assert_allclose(got.success, p[correct].sum(), rtol=1e-9)
    np.testing.assert_allclose(got.sampled_2, (p**2).sum(), rtol=1e-9)
    np.testing.assert_allclose([got.coupling_low, got.coupling_high, got.unsampled], 0, atol=1e-12)
    assert got.certain.all()


@pytest.mark.parametrize("seed", range(8))
def test_one_token_task_range_is_that_of_the_closed_form_over_all_labels_of_the_unsampled(seed):
    """The unsampled tokens can be right or wrong in 2^k ways; the range is that of their closed forms."""
    vocab = 12
    p, correct, draws, rewards, trie = one_token(seed, vocab, n=6)
    drawn = np.bincount(draws, minlength=vocab) > 0
    unsampled = np.flatnonzero(~drawn)
    base = rewards.mean()
    changes, couplings = [], []
    for labels in itertools.product((False, True), repeat=len(unsampled)):
        correct[unsampled] = labels
        terms = closed_form(p, correct, drawn, 1 - base, -base)
        changes.append(sum(terms))
        couplings.append(terms[2])
    exact = trie_lib.balance(trie, np.array([base]), vocab, np.array([0]), p[None])
    np.testing.assert_allclose(exact.unsampled, p[~drawn].sum(), rtol=1e-12)
    np.testing.assert_allclose([exact.unsampled_2_low, exact.unsampled_2_high], (p[~drawn] ** 2).sum(), rtol=1e-12)
    np.testing.assert_allclose(exact.mood, (p[drawn] * (correct[drawn] - base)).sum(), rtol=1e-12)
    np.testing.assert_allclose(exact.low[0], min(changes), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(exact.high[0], max(changes), rtol=1e-9, atol=1e-15)
    bounded = trie_lib.balance(trie, np.array([base]), vocab)
    assert bounded.low <= exact.low and exact.high <= bounded.high
    assert bounded.unsampled_2_low <= exact.unsampled_2_low <= bounded.unsampled_2_high


def test_change_is_that_of_the_linear_surrogate_by_automatic_differentiation():
    """Tokens that are right some of the time: first-order change of sum p q under a step on sum R p, all sampled."""
    rng = np.random.default_rng(3)
    z, q = rng.normal(size=7), rng.random(7)
    p = softmax(z)
    trie = trie_lib.build(
        np.arange(7)[:, None], np.ones(7, int), np.log(p)[:, None], q, np.zeros(7, int), min_visits=1, max_depth=1
    )
    got = trie_lib.balance(trie, np.array([q.mean()]), 7)
    with jax.enable_x64(True):
        surrogate = jax.grad(lambda z: jnp.sum((q - q.mean()) * jax.nn.softmax(z)))(jnp.asarray(z))
        change = jax.grad(lambda z: jnp.sum(q * jax.nn.softmax(z)))(jnp.asarray(z)) @ surrogate
    np.testing.assert_allclose(got.up + got.down, float(change), rtol=1e-10)
    np.testing.assert_allclose([got.low, got.high], float(change), rtol=1e-10)


@pytest.mark.parametrize("missed", range(4))
def test_bounds_hold_when_any_tokens_were_missed(missed):
    """The same surrogate, with tokens nobody sampled that are right or wrong: inside both ranges."""
    rng = np.random.default_rng(missed)
    z, q = rng.normal(size=7), rng.random(7)
    q[:missed] = rng.integers(0, 2, missed)
    p, sampled = softmax(z), np.arange(missed, 7)
    trie = trie_lib.build(
        sampled[:, None], np.ones(len(sampled), int), np.log(p)[sampled][:, None], q[sampled],
        np.zeros(len(sampled), int), min_visits=1, max_depth=1,
    )  # fmt: skip
    base = 0.3
    reward = np.where(np.arange(7) >= missed, q - base, 0.0)
    with jax.enable_x64(True):
        surrogate = jax.grad(lambda z: jnp.sum(reward * jax.nn.softmax(z)))(jnp.asarray(z))
        change = float(jax.grad(lambda z: jnp.sum(q * jax.nn.softmax(z)))(jnp.asarray(z)) @ surrogate)
    for extra in ((), (np.array([0]), p[None])):
        got = trie_lib.balance(trie, np.array([base]), 7, *extra)
        assert got.low[0] - 1e-12 <= change <= got.high[0] + 1e-12


def two_levels(seed: int, n: int, vocab: int = 4):
    """A table policy of up to two tokens (token 0 ends), its draws and rewards."""
    rng = np.random.default_rng(seed)
    first, second = softmax(rng.normal(size=vocab)), softmax(1.5 * rng.normal(size=(vocab, vocab)))
    a = rng.choice(vocab, n, p=first)
    b = np.array([rng.choice(vocab, p=second[x]) for x in a])
    lengths = np.where(a == 0, 1, 2)
    tokens = np.stack([a, np.where(lengths == 2, b, -7)], axis=1)
    logp = np.stack([np.log(first)[a], np.where(lengths == 2, np.log(second)[a, b], np.nan)], axis=1)
    table = rng.integers(0, 2, (vocab, vocab)).astype(float)
    rewards = np.where(a == 0, 1.0, table[a, b])
    return first, second, tokens, lengths, logp, rewards


@pytest.mark.parametrize("seed", range(5))
def test_two_level_policy_equals_brute_force(seed):
    """Every prefix, by looping over all rollouts and all tokens."""
    first, second, tokens, lengths, logp, rewards = two_levels(seed, n=100)
    n, vocab, least = len(tokens), 4, 5
    trie = trie_lib.build(
        tokens, lengths, logp.astype(np.float32), rewards, np.zeros(n, int), min_visits=least, max_depth=9
    )
    base = rewards.mean()
    got = trie_lib.balance(trie, np.array([base]), vocab)
    rows = [tuple(t[:length]) for t, length in zip(tokens.tolist(), lengths, strict=True)]
    prefixes = [(), *((x,) for x in range(1, vocab))]
    expected = {}
    for prefix in prefixes:
        through = [i for i, row in enumerate(rows) if row[: len(prefix)] == prefix and len(row) > len(prefix)]
        if len(through) < least:
            continue
        p = first if prefix == () else second[prefix[0]]
        next_tokens = {rows[i][len(prefix)] for i in through}
        q = {c: np.mean([rewards[i] for i in through if rows[i][len(prefix)] == c]) for c in next_tokens}
        mass = 1 - sum(p[c] for c in next_tokens)
        mood = sum(p[c] * (q[c] - base) for c in next_tokens)
        success = sum(p[c] * q[c] for c in next_tokens) + mass * base
        up = sum(p[c] ** 2 * (q[c] - success) * (q[c] - base - mood) for c in next_tokens if q[c] >= success)
        down = sum(p[c] ** 2 * (q[c] - success) * (q[c] - base - mood) for c in next_tokens if q[c] < success)
        second_moment = sum(p[c] ** 2 for c in next_tokens)
        expected[prefix] = (len(through), mass, mood, success, up, down, second_moment)
    columns = (got.unsampled, got.mood, got.success, got.up, got.down, got.sampled_2)
    found = {
        rows[trie.sample[k]][: trie.depth[k]]: (trie.visits[k], *(column[k] for column in columns))
        for k in range(len(trie.group))
    }
    assert found.keys() == expected.keys() and len(found) > 1
    for prefix, values in expected.items():
        np.testing.assert_allclose(found[prefix], values, rtol=1e-5, atol=3e-7, err_msg=str(prefix))


def test_success_of_the_root_is_the_chance_of_a_right_answer_when_every_sequence_was_sampled():
    _, second, tokens, lengths, logp, rewards = two_levels(1, n=4000)
    trie = trie_lib.build(tokens, lengths, logp, rewards, np.zeros(len(tokens), int), min_visits=1, max_depth=2)
    below = {int(trie.token[e]): None for e in np.flatnonzero(trie.node == 0)}
    assert sorted(below) == [0, 1, 2, 3]
    got = trie_lib.balance(trie, np.array([rewards.mean()]), 4)
    reward = {tuple(t[:n]): r for t, n, r in zip(tokens.tolist(), lengths, rewards, strict=True)}
    for k in np.flatnonzero(trie.depth == 1):
        a = int(tokens[trie.sample[k], 0])
        exact = sum(second[a, b] * reward[a, b] for b in range(4))
        np.testing.assert_allclose(got.success[k], exact, rtol=1e-9)


rollouts = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n),
        st.lists(st.integers(0, 2), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)
FIRST = softmax(np.random.default_rng(0).normal(size=(5, 4)))  # next-token table by depth: one policy for every prefix


def arrays(rows, rewards, groups):
    lengths = np.array([len(row) for row in rows])
    tokens = np.full((len(rows), lengths.max()), -1)
    logp = np.full(tokens.shape, np.nan, np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        logp[i, : len(row)] = [np.log(FIRST[d, x]) for d, x in enumerate(row)]
    return tokens, lengths, logp, np.array(rewards), np.array(groups)


def named(trie, balance, tokens):
    """Every figure of a node, by group and prefix: what must not depend on the order of the rollouts."""
    return {
        (int(trie.group[k]), *tokens[trie.sample[k], : trie.depth[k]].tolist()): np.array(
            [trie.visits[k], *(column[k] for column in balance)]
        )
        for k in range(len(trie.group))
    }


@settings(max_examples=60, deadline=None)
@given(rollouts, st.integers(1, 4), st.integers(1, 5))
def test_order_of_rollouts_changes_nothing_and_visits_add_up(case, min_visits, max_depth):
    rows, rewards, groups, order = case
    found = []
    for pick in (range(len(rows)), order):
        tokens, lengths, logp, r, g = arrays(*([x[i] for i in pick] for x in (rows, rewards, groups)))
        trie = trie_lib.build(tokens, lengths, logp, r, g, min_visits=min_visits, max_depth=max_depth)
        baseline = np.array([r[g == i].mean() if (g == i).any() else 0.0 for i in range(3)])
        balance = trie_lib.balance(trie, baseline, 4)
        found.append(named(trie, balance, tokens))
        assert (np.bincount(trie.node, trie.count, minlength=len(trie.group)) == trie.visits).all()
        assert (trie.visits >= min_visits)[trie.depth > 0].all() and (trie.depth < max_depth).all()
        assert set(trie.group[trie.depth == 0]) == set(groups)  # a root counts whatever its visits
        assert (balance.low <= balance.high).all() and (np.array([balance.up, balance.down]) >= 0).all()
        assert (balance.low <= balance.up + balance.down + balance.coupling_low + 1e-7).all()
        for k in range(len(trie.group)):  # all rollouts with this prefix, and that go on
            prefix = tokens[trie.sample[k], : trie.depth[k]]
            same = (tokens[:, : trie.depth[k]] == prefix).all(1) & (lengths > trie.depth[k]) & (g == trie.group[k])
            assert same.sum() == trie.visits[k]
    assert found[0].keys() == found[1].keys()
    for key, values in found[0].items():
        np.testing.assert_allclose(values, found[1][key], rtol=1e-9, atol=1e-12)


def test_float32_logp_costs_no_more_than_rounding():
    _, _, _, rewards, exact = one_token(0, vocab=2000, n=3000)
    *_, rounded = one_token(0, vocab=2000, n=3000, dtype=np.float32)
    wanted, got = (trie_lib.balance(t, np.array([rewards.mean()]), 2000) for t in (exact, rounded))
    assert wanted.unsampled[0] > 0.01
    for name, a, b in zip(got._fields, wanted, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7, err_msg=name)


def test_mass_slightly_above_one_counts_as_all_of_it():
    logp = np.log(np.array([[0.6], [0.4]])) + 1e-6
    trie = trie_lib.build(np.array([[0], [1]]), np.ones(2, int), logp, np.array([1.0, 0.0]), np.zeros(2, int),
                          min_visits=1, max_depth=1)  # fmt: skip
    got = trie_lib.balance(trie, np.array([0.5]), 2)
    assert got.unsampled[0] == 0 and got.unsampled_2_low[0] == 0


def test_first_branching_nodes_are_the_root_then_the_shallowest_then_the_most_visited():
    rows = [[5, 1, 7], [5, 1, 8], [5, 2, 7], [5, 2, 8], [5, 2, 9], [5, 3, 1], [5, 3, 1]]
    tokens = np.array(rows)
    n = len(rows)
    trie = trie_lib.build(
        tokens, np.full(n, 3), np.full((n, 3), -1.0), np.zeros(n), np.zeros(n, int), min_visits=2, max_depth=3
    )

    def prefixes(count):
        chosen = trie_lib.first_branching(trie, count)
        return [tokens[trie.sample[k], : trie.depth[k]].tolist() for k in chosen]

    assert prefixes(1) == [[]]
    assert prefixes(2) == [[], [5]]
    assert prefixes(3) == [[], [5], [5, 2]]
    assert sorted(prefixes(9)) == [[], [5], [5, 1], [5, 2]]  # after [5, 3] everybody goes on alike
    assert prefixes(0) == []


def test_summary_weighs_branching_nodes_by_visits():
    """Worked by hand: the root splits 3 : 1 with probabilities 1/2 and 1/4, below it a node splits 2 : 1."""
    tokens = np.array([[0, 0], [0, 0], [0, 1], [1, 1]])
    logp = np.log(np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.25, 1.0]]))
    rewards = np.array([1.0, 1.0, 0.0, 0.0])
    trie = trie_lib.build(tokens, np.full(4, 2), logp, rewards, np.zeros(4, int), min_visits=2, max_depth=2)
    root = np.array([[0.5, 0.25, 0.25]])
    balance = trie_lib.balance(trie, np.array([0.5]), 3, np.array([0]), root)
    got = trie_lib.summary(trie, balance, np.array([0]), root)
    assert got["nodes"] == 2 and got["branching"] == 2
    assert got["unsampled_root"] == pytest.approx(0.25)
    assert got["unsampled"] == pytest.approx((4 * 0.25 + 3 * 0.0) / 7)
    assert got["sampled_2"] == pytest.approx((4 * 0.3125 + 3 * 0.5) / 7)
    # root: 1/2 (2/3 - 1/2) + 1/4 (0 - 1/2) = -1/24; below: 1/2 (1 - 1/2) + 1/2 (0 - 1/2) = 0
    assert got["mood"] == pytest.approx(-1 / 24 * 4 / 7)
    assert got["unsampled_2"] == pytest.approx(1 / 16)
    assert got["unsampled_2_expected"] == pytest.approx(0.25 * 0.5**4 + 2 * 0.0625 * 0.75**4)
    # below: Q = 1/2, both tokens p = 1/2: 1/4 * 1/4 each. Root: Q = 1/3 + 1/8 = 11/24.
    up = (4 * 0.25 * (2 / 3 - 11 / 24) ** 2 + 3 / 16) / 7
    assert got["up"] == pytest.approx(up)
    down = (4 / 16 * (11 / 24) ** 2 + 3 / 16) / 7
    worst = 4 / 7 * (-1 / 24) * (11 / 24) / 16  # every unsampled token of the root wrong, since S < 0
    assert got["down"] == pytest.approx(down) and got["coupling_worst"] == pytest.approx(worst)
    assert got["gain"] == pytest.approx(up + down) and got["at_risk"] == pytest.approx(-worst / (up + down))
