"""Aggregation weights: loops, and independence of how tokens are spread over micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.learner import reduce

SEGMENTS = np.array([1, 1, 1, 1, 2, 3, 3, 0])
MASK = np.array([1, 1, 0, 1, 1, 0, 0, 0], bool)  # 3 of 4 tokens of response 1, response 2, nothing of response 3
LOSS = np.array([1.0, 2.0, np.nan, 6.0, 10.0, np.nan, np.nan, np.nan])

counts = jax.jit(reduce.counts)
segment_mean = jax.jit(reduce.segment_mean)


COMPILED = {k: jax.jit(f, static_argnames="max_tokens") for k, f in reduce.AGGREGATIONS.items()}


def weights(name, mask=MASK, segments=SEGMENTS, *, tokens, sequences, max_tokens=5):
    return np.asarray(COMPILED[name](mask, segments, tokens=tokens, sequences=sequences, max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("name", "total"),
    [("token", 19 / 4), ("sequence", (9 / 3 + 10) / 2), ("constant", 19 / (2 * 5))],
)
def test_totals_by_hand(name, total):
    tokens, sequences = counts(jnp.asarray(MASK), jnp.asarray(SEGMENTS))
    assert (tokens, sequences) == (4, 2)
    w = weights(name, tokens=tokens, sequences=sequences)
    np.testing.assert_array_equal(w[~MASK], 0.0)
    np.testing.assert_allclose(reduce.masked_sum(LOSS * w, MASK), total, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(reduce.AGGREGATIONS))
def test_micro_batches_add_up_to_the_whole(name):
    rng = np.random.default_rng(0)
    responses = [rng.normal(size=k) for k in (3, 1, 5, 2, 4, 1)]
    segments = np.concatenate([np.full(len(r), i + 1) for i, r in enumerate(responses)])
    loss, mask = np.concatenate(responses), rng.random(16) < 0.8
    tokens, sequences = counts(jnp.asarray(mask), jnp.asarray(segments))
    whole = weights(name, mask, segments, tokens=tokens, sequences=sequences)
    counted, parts = np.zeros(2), []
    for members in ((1, 4), (2,), (3, 5, 6)):
        at = np.isin(segments, members)
        local = np.unique(segments[at], return_inverse=True)[1] + 1  # ids are numbered within a micro-batch
        counted += np.asarray(counts(jnp.asarray(mask[at]), jnp.asarray(local)))
        parts.append((at, weights(name, mask[at], local, tokens=tokens, sequences=sequences)))
    np.testing.assert_array_equal(counted, [tokens, sequences])
    for at, part in parts:
        np.testing.assert_array_equal(part, whole[at])
    np.testing.assert_allclose(sum((loss[at] * part).sum() for at, part in parts), (loss * whole).sum(), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(reduce.AGGREGATIONS))
def test_nothing_trained_means_weight_zero(name):
    np.testing.assert_array_equal(weights(name, np.zeros(8, bool), tokens=0.0, sequences=0.0), 0.0)


def test_as_many_responses_as_tokens():
    segments = jnp.arange(1, 5)
    mask = jnp.ones(4, bool)
    assert counts(mask, segments) == (4, 4)
    np.testing.assert_array_equal(segment_mean(jnp.array([1.0, 2, 3, 4]), mask, segments), [1, 2, 3, 4])


def test_masked_mean_and_segment_mean_ignore_the_rest():
    np.testing.assert_allclose(reduce.masked_mean(jnp.asarray(LOSS), jnp.asarray(MASK)), 19 / 4)
    assert reduce.masked_mean(jnp.asarray(LOSS), jnp.zeros(8, bool)) == 0
    mean = segment_mean(jnp.asarray(LOSS), jnp.asarray(MASK), jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(mean, [3, 3, 3, 3, 10, 0, 0, 0])
    np.testing.assert_array_equal(
        reduce.segment_lengths(jnp.asarray(MASK), jnp.asarray(SEGMENTS)), [3, 3, 3, 3, 1, 0, 0, 0]
    )


def test_unknown_aggregation():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; known: constant, sequence, token"):
        reduce.get("mean")
