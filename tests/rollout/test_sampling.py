"""Drawing tokens, against NumPy in float64 and against the exact distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rollout import sampling
from brorl_jax.rollout.api import Request, Sampling, request, sample_seed
from brorl_jax.types import Prompt

draw = jax.jit(sampling.draw)
restrict = jax.jit(sampling.restrict)
uniforms = jax.jit(sampling.uniforms)


def softmax(logits):
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def words(n):
    return sampling.seed_words(np.array([sample_seed(0, 0, "p", i) for i in range(n)], np.uint64))


def test_words_hold_all_63_bits_of_a_seed():
    seeds = np.array([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x1234_5678_9ABC_DEF0], np.uint64)
    high_low = sampling.seed_words(seeds).astype(object)
    assert [int(h) * 2**32 + int(low) for h, low in high_low] == [int(s) for s in seeds]
    assert sampling.seed_words(seeds.reshape(2, 3)).shape == (2, 3, 2)


def test_uniforms_are_a_function_of_seed_and_token_alone():
    w, t = words(6), np.arange(6, dtype=np.int32)
    together = np.asarray(uniforms(w, t))
    alone = np.concatenate([np.asarray(uniforms(w[i : i + 1], t[i : i + 1])) for i in range(6)])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(np.asarray(uniforms(w.reshape(2, 3, 2), t.reshape(2, 3))), together.reshape(2, 3, 2))
    everything = np.asarray(uniforms(np.repeat(words(50), 40, 0), np.tile(np.arange(40, dtype=np.int32), 50)))
    assert len(np.unique(everything)) > 0.999 * everything.size  # no stream repeats another
    assert everything.min() >= 0 and everything.max() < 1
    assert abs(everything.mean() - 0.5) < 0.02  # 4 standard errors of 4,000 uniforms


@pytest.mark.parametrize("vocab", [5, 64, 200])
def test_frequencies_are_those_of_the_softmax(vocab):
    n = 20_000
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 1.5
    tokens, _ = draw(jnp.broadcast_to(logits, (n, vocab)), uniforms(words(n), np.zeros(n, np.int32)))
    expected = n * softmax(logits)
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    df = vocab - 1
    assert chi2 < df + 4 * np.sqrt(2 * df)  # fixed seeds: the same figure in every run


def test_logp_is_that_of_the_drawn_token():
    logits = np.random.default_rng(1).normal(size=(300, 130)).astype(np.float32) * 4
    tokens, logp = draw(logits, uniforms(words(300), np.zeros(300, np.int32)))
    np.testing.assert_allclose(logp, np.log(softmax(logits))[np.arange(300), tokens], atol=2e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    # A parallel cumulative sum is not monotone to the last bit: it can rise by an ulp over a weight of 0. So look for
    # such places and aim at them.
    rng = np.random.default_rng(2)
    logits = np.full((64, 64 * 1024), -np.inf, np.float32)
    for row in logits:
        alive = rng.choice(1024, 512, replace=False) * 64 + rng.integers(64, size=512)
        row[alive] = rng.normal(size=512) * 2
    masses = jnp.exp(logits - logits.max(-1, keepdims=True)).reshape(64, 1024, 64).sum(-1)
    cumulative = np.asarray(jax.jit(functools.partial(jnp.cumsum, axis=-1))(masses))
    rises = (np.diff(cumulative, axis=-1) > 0) & (np.asarray(masses)[:, 1:] == 0)
    for target in (
        np.where(rises.any(-1), np.take_along_axis(cumulative, rises.argmax(-1)[:, None], -1)[:, 0], 0),
        np.zeros(64, np.float32),
        cumulative[:, -1],
    ):
        u = target / cumulative[:, -1]
        for aim in (u, np.nextafter(u, 2, dtype=np.float32), np.nextafter(u, -1, dtype=np.float32)):
            aim = np.clip(aim, 0, np.float32(1 - 2**-24))
            for within in (0.0, 0.5, 1 - 2**-24):
                tokens, logp = draw(logits, np.stack([aim, np.full(64, within, np.float32)], -1))
                assert np.isfinite(np.asarray(logp)).all()
                assert np.isfinite(logits[np.arange(64), tokens]).all()


@pytest.mark.parametrize("only", [0, 63, 64, 70])
def test_the_only_possible_token_is_drawn_whatever_the_noise(only):
    logits = np.full((6, 71), -np.inf, np.float32)
    logits[:, only] = -3.0
    edge = np.float32(1 - 2**-24)
    u = np.array([[0, 0], [0, edge], [edge, 0], [edge, edge], [0.5, 0.5], [0.3, 0.9]], np.float32)
    tokens, logp = draw(logits, u)
    assert np.asarray(tokens).tolist() == [only] * 6
    np.testing.assert_array_equal(logp, 0.0)


def reference_support(logits, top_p, top_k, min_p):
    """Which tokens stay, one row at a time, the textbook way."""
    keep = np.zeros(logits.shape, bool)
    for row, p in enumerate(softmax(logits)):
        order = np.argsort(-p, kind="stable")
        if top_k > 0:
            order = order[:top_k]
        q = p[order] / p[order].sum()
        size = len(order) if top_p >= 1 else int(np.searchsorted(np.cumsum(q), top_p) + 1)
        order = order[:size]
        order = order[p[order] >= min_p * p[order[0]]]
        keep[row, order] = True
    return keep


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [
        (1.0, -1, 0.0),
        (0.95, -1, 0.0),
        (0.3, -1, 0.0),
        (1e-6, -1, 0.0),
        (1.0, 1, 0.0),
        (1.0, 7, 0.0),
        (1.0, 10_000, 0.0),
        (1.0, -1, 0.1),
        (0.8, 20, 0.0),
        (0.9, 20, 0.05),
    ],
)
def test_restriction_keeps_what_the_textbook_keeps(top_p, top_k, min_p):
    logits = np.random.default_rng(3).normal(size=(40, 150)).astype(np.float32) * 2
    out = np.asarray(restrict(logits, np.float32(top_p), np.int32(top_k), np.float32(min_p)))
    keep = reference_support(logits, np.float32(top_p), top_k, np.float32(min_p))
    np.testing.assert_array_equal(np.isfinite(out), keep)
    np.testing.assert_array_equal(out[keep], logits[keep])


def test_top_p_of_one_cuts_nothing_off_even_where_rounding_reaches_it():
    logits = np.full((1, 4096), -30.0, np.float32)
    logits[0, 0] = 0.0
    out = np.asarray(restrict(logits, np.float32(1.0), np.int32(-1), np.float32(0.0)))
    assert np.isfinite(out).all()


def test_restriction_leaves_padding_out():
    logits = np.random.default_rng(4).normal(size=(3, 10)).astype(np.float32)
    logits[:, 7:] = -np.inf
    out = np.asarray(restrict(logits, np.float32(1.0), np.int32(9), np.float32(0.0)))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(logits))


def test_greedy_is_the_argmax_with_its_probability():
    logits = np.random.default_rng(5).normal(size=(50, 33)).astype(np.float32)
    tokens, logp = sampling.greedy(jnp.asarray(logits))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(logp, np.log(softmax(logits).max(-1)), atol=1e-6)


def test_512_seeds_are_distinct_within_a_group_across_steps_prompts_and_runs():
    seeds = [
        sample_seed(run, step, prompt, i)
        for run in (0, 1)
        for step in (-1, 0, 1, 2)
        for prompt in ("a/1", "a/11", "b/1")
        for i in range(512)
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 3 * 512
    assert all(0 <= s < 2**63 for s in seeds)


def test_the_seed_of_a_name_never_changes():
    # First 8 bytes of BLAKE2b of "<run>/<step>/<prompt>/<index>", as `b2sum -l 64` gives, without the lowest bit:
    # a resumed run on another machine must draw the same samples.
    assert sample_seed(0, 3, "sums/17", 5) == 0x73A40A3EAE706E2C >> 1
    prompt = Prompt("sums/17", np.zeros(1, np.int32), "", "", "exact", "sums")
    assert request(prompt, 2, run_seed=0, step=3, first=5) == Request(
        prompt, (sample_seed(0, 3, "sums/17", 5), sample_seed(0, 3, "sums/17", 6))
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", 0), ("min_p", 1.0), ("max_tokens", 0)],
)
def test_unusable_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("settings", "truncated"),
    [({}, False), ({"temperature": 0.6}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True), ({"min_p": 0.1}, True)],
)
def test_truncated_is_less_than_the_full_softmax(settings, truncated):
    assert Sampling(**settings).truncated is truncated
