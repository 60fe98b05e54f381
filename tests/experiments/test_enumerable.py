"""The enumerable task's tables, worked by hand; that its runs run is shown by notebook 03."""

from __future__ import annotations

import math

import numpy as np
import pytest

from brorl_jax.types import Finish, Group, Sample
from experiments import enumerable
from experiments.enumerable_figure import draw

FIGURES = ("q_pos", "pass@16", "retained", "worst_drop", "improved")


def test_tables_of_right_answers_and_verdicts_agree():
    prompts, right = enumerable.task(seed=3)
    answers = enumerable.enumerable.all_sequences(enumerable.VOCAB, enumerable.LENGTH)
    assert right.shape == (enumerable.PROMPTS, 4096) and 0.1 < right.mean() < 0.15
    for number in (0, 17, 4095):
        text = enumerable.Digits().decode(answers[number].tolist())
        answer = text.removeprefix("<answer>").removesuffix("</answer>")
        for prompt, row in zip(prompts, right, strict=True):
            assert enumerable.listed(answer, prompt) == row[number]


def test_prediction_is_the_theorem_on_the_answers():
    """Against ``sum_i p_i^2 (f_i - F)(s_i - S)`` in NumPy, for both readings."""
    prompts, right = enumerable.task(seed=0)
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(4096, 0.05), size=enumerable.PROMPTS)
    answers = enumerable.enumerable.all_sequences(enumerable.VOCAB, enumerable.LENGTH)
    drawn = rng.choice(4096, 40, p=p[2])
    samples = [
        Sample(i, 0, answers[a], np.zeros(3, np.float32), Finish.LENGTH, 0, reward=float(right[2, a]))
        for i, a in enumerate(drawn)
    ]
    got = enumerable.predicted([Group(prompts[2], samples)], p, right)
    counts, f = np.bincount(drawn, minlength=4096), right[2].astype(float)
    assert counts.max() > 1
    for weight, value in zip((counts > 0, counts), got[0], strict=True):
        s = weight * (f - f[drawn].mean())
        assert value == pytest.approx(np.sum(p[2] ** 2 * (f - f @ p[2]) * (s - s @ p[2])), rel=1e-9)


def test_agreement_by_hand():
    rows = [
        {"arm": "a", "n": 2, "distinct": d, "multiplicity": m, "change": c}
        for d, m, c in [(1.0, -1.0, 0.3), (2.0, 5.0, 0.1), (3.0, -2.0, -0.2), (4.0, -9.0, -0.9)]
    ]
    (got,) = enumerable.agreement(rows)
    assert got["groups"] == 4 and got["went_up"] == 0.5
    assert (got["distinct/up"], got["distinct/same_sign"]) == (1.0, 0.5)
    assert (got["multiplicity/up"], got["multiplicity/same_sign"]) == (0.25, 0.75)
    assert got["distinct/correlation"] == pytest.approx(-1)
    # ranks 2 3 1 0 beside 3 2 1 0: 1 - 6 * (1 + 1) / (4 * 15)
    assert got["multiplicity/correlation"] == pytest.approx(0.8)


def test_milestones_by_hand():
    def row(seed, step, q_pos):
        rest = dict.fromkeys(enumerable.REPORTED, 0.0)
        return {"arm": "a", "n": 4, "seed": seed, "q_pos": q_pos, **rest, "step": step, "retained": 1 - step / 10}

    curves = [row(0, 0, 0.1), row(0, 1, 0.6), row(0, 2, 0.9), row(1, 0, 0.1), row(1, 1, 0.2), row(1, 2, 0.55)]
    (half,) = enumerable.milestones(curves, 0.5)
    assert (half["reached"], half["runs"], half["step"]) == (2, 2, 1.5)
    assert half["retained"] == pytest.approx(0.85)
    (most,) = enumerable.milestones(curves, 0.8)
    assert (most["reached"], most["step"]) == (1, 2)
    (none,) = enumerable.milestones(curves, 0.95)
    assert none["reached"] == 0 and math.isnan(none["step"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--n", "4", "1"], "--n 1: must be at least 2"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
    ],
)
def test_options_that_mean_nothing_end_in_one_line(options, complaint, capsys):
    assert enumerable.main(options) == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_figure_is_drawn_from_rows_of_several_sizes_and_seeds(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"n": n, "seed": seed, "step": step, "samples": n * step, **dict(zip(FIGURES, rng.random(5), strict=True))}
        for n in (2, 8) for seed in (0, 1) for step in range(4)
    ]  # fmt: skip
    draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
