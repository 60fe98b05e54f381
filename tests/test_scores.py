"""Scores against counting by hand, brute force and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from brorl_jax import scores
from brorl_jax.scores import Row


def row(prompt_id, rewards, *, source="a", lengths=None, finish=None):
    n = len(rewards)
    return Row(prompt_id, source, list(rewards), lengths or [1] * n, finish or ["stop"] * n)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
        expected = np.mean([any(subset) for subset in subsets])
        assert scores.pass_at_k(np.array([n]), np.array([correct]), k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_closed_form_at_large_n():
    n, correct, k = 512, 3, 128
    expected = 1 - math.comb(n - correct, k) / math.comb(n, k)
    assert scores.pass_at_k(np.array([n]), np.array([correct]), k)[0] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="pass@4 needs at least 4 samples per prompt, the smallest n is 3"):
        scores.pass_at_k(np.array([8, 3]), np.array([1, 1]), 4)


def test_scores_of_a_benchmark_by_hand():
    rows = [
        row("a/0", [1.0, 0.0, 1.0, 0.0], lengths=[10, 20, 30, 40], finish=["stop", "length", "stop", "stop"]),
        row("a/1", [0.5, 1.0, None, 0.0], lengths=[1, 2, 99, 4], finish=["stop", "stop", "abort", "length"]),
        row("a/2", [None] * 4, finish=["abort"] * 4),
    ]
    result = scores.source_scores(rows)
    assert result["pass@1"] == pytest.approx((0.5 + 0.5) / 2)  # prompts first; unscored samples count neither way
    assert result["pass@2"] == pytest.approx((5 / 6 + 2 / 3) / 2)  # 2 right of 4, 1 of 3; half marks are not right
    assert result["pass@4"] == 1.0  # one prompt only has four scored samples
    assert result["length"] == pytest.approx((10 + 20 + 30 + 40 + 1 + 2 + 4) / 7)
    assert result["length_correct"] == pytest.approx((10 + 30 + 2) / 3)
    assert result["truncated_rate"] == pytest.approx(2 / 7)
    assert result["prompts"] == 3
    assert result["unscored_rate"] == pytest.approx(5 / 12)


def test_nothing_scored_is_nan_and_not_zero():
    result = scores.source_scores([row("a/0", [None, None])])
    assert all(math.isnan(result[name]) for name in ("pass@1", "pass@2", "stderr", "length", "truncated_rate"))


def test_bootstrap_error_is_that_of_the_mean():
    values = np.random.default_rng(3).uniform(size=400)
    assert scores.standard_error(values) == pytest.approx(values.std() / math.sqrt(400), rel=0.06)
    assert math.isnan(scores.standard_error(values[:1]))


def test_averages_by_heading_are_over_benchmarks_and_the_plain_one_over_headings():
    """Two algebra tasks and one logic task: weighted by tasks (paper) and by category (model card)."""
    reward = {"aime": 0.2, "linear": 0.3, "poly": 0.5, "zebra": 0.9, "other": 1.0}
    rows = [row(f"{name}/0", [r], source=name) for name, r in reward.items()]
    headings = {"aime": "math", "linear": "gym/algebra", "poly": "gym/algebra", "zebra": "gym/logic", "other": ""}
    result = scores.metrics(rows, headings)
    assert result["eval/pass@1"] == pytest.approx(np.mean(list(reward.values())))
    expected = {
        "math": 0.2,
        "gym": (0.3 + 0.5 + 0.9) / 3,
        "gym/algebra": 0.4,
        "gym/logic": 0.9,
        "gym/plain": (0.4 + 0.9) / 2,
    }
    average = {k[13:-7]: v for k, v in result.items() if k.startswith("eval/average/") and k.endswith("/pass@1")}
    assert average == pytest.approx(expected)


def test_no_score_depends_on_the_order_of_the_rows():
    rng = np.random.default_rng(0)
    rows = [row(f"{s}/{i}", rng.integers(2, size=4).tolist(), source=s) for s in "ab" for i in range(20)]
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    assert scores.metrics(rows, {"b": "math"}) == scores.metrics(shuffled, {"b": "math"})


def test_paired_difference_is_scipys():
    rng = np.random.default_rng(1)
    a = rng.random(60)
    b = np.clip(a + 0.05 + 0.1 * rng.standard_normal(60), 0, 1)
    keys = [f"p{i}" for i in range(60)]
    result = scores.paired(dict(zip(keys, a, strict=True)), dict(zip(reversed(keys), reversed(b), strict=True)))
    d = b - a
    t = d.mean() / (d.std(ddof=1) / math.sqrt(60))
    assert result.t == pytest.approx(t, rel=1e-12)
    assert result.p == pytest.approx(stats.t.sf(t, 59), rel=1e-9)
    assert (result.a, result.b, result.difference) == pytest.approx((a.mean(), b.mean(), d.mean()))
    exact = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=20_000, random_state=5).confidence_interval
    assert (result.low, result.high) == pytest.approx((exact.low, exact.high), abs=0.003)


def test_paper_sized_comparison_finds_a_third_of_a_point():
    """10,000 instances, a mean gain of 0.0033 and a t of 4.84 belong together: the differences' spread is 0.068."""
    rng = np.random.default_rng(2)
    d = rng.standard_normal(10_000)
    d = 0.0033 + (d - d.mean()) / d.std(ddof=1) * 0.0033 * 100 / 4.84
    a = dict(enumerate(rng.random(10_000)))
    result = scores.paired(a, {i: a[i] + d[i] for i in a})
    assert result.t == pytest.approx(4.84, rel=1e-6)
    assert result.p == pytest.approx(6.5e-7, rel=0.03)


def test_only_prompts_of_both_sides_are_compared():
    a = [row("x/0", [1.0], source="x"), row("x/1", [0.0], source="x"), row("x/2", [0.0], source="x")]
    b = [row("x/0", [1.0], source="x"), row("x/1", [1.0], source="x"), row("y/0", [1.0], source="y")]
    result = scores.compare(a, b)
    assert set(result) == {"x", "all"}
    assert (result["x"].prompts, result["x"].difference) == (2, 0.5)
    with pytest.raises(ValueError, match="no benchmark in common: x against y"):
        scores.compare(a, b[2:])
    with pytest.raises(ValueError, match="1 prompts in common"):
        scores.compare(a, b[:1])


def test_equal_sides_have_no_t():
    a = {"p": 0.25, "q": 0.75}
    result = scores.paired(a, a)
    assert result.difference == result.low == result.high == 0.0
    assert math.isnan(result.t) and math.isnan(result.p)
