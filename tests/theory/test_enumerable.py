"""Every response scored: against the trainer's own scoring pass and against figures worked by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner.step import Compute, make_score
from brorl_jax.models import transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.theory import enumerable
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

CFG = ModelConfig(
    "qwen3", vocab_size=8, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=16, max_positions=16, tied=False
)
VOCAB, LENGTH = 5, 3


@pytest.fixture(scope="module")
def params():
    drawn = transformer.init(jax.random.key(0), CFG)
    return jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, drawn)


@pytest.mark.parametrize("prompts", [[[6], [7]], [[7, 1, 6], [5, 2, 2]]])
def test_equals_the_scoring_pass_on_every_response(params, prompts):
    prompts = np.array(prompts, np.int32)
    rows = enumerable.all_sequences(VOCAB, LENGTH)
    assert len(rows) == VOCAB**LENGTH and rows[7].tolist() == [0, 1, 2]
    ours = np.asarray(enumerable.sequence_logps(params, CFG, prompts, vocab=VOCAB, length=LENGTH))
    score = make_score(CFG, Compute(real_vocab=VOCAB))
    for prompt, logps in zip(prompts, ours, strict=True):
        samples = [
            Sample(i, 0, row, np.zeros(LENGTH, np.float32), Finish.LENGTH, 0, status=Status.OK, reward=0.0)
            for i, row in enumerate(rows)
        ]
        batch = pack([Group(Prompt("p", prompt, "", "", "", ""), samples)], Layout(1, len(rows), LENGTH))
        expected = np.asarray(score(params, batch))[0, 0].sum(-1)  # packed in order: all of one length
        np.testing.assert_allclose(logps, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(ours).sum(1), 1.0, rtol=1e-5)
    assert np.exp(ours).max() > 3 * np.exp(ours).mean()  # far from uniform, or the test would say little


def test_children_of_every_prefix_by_summing_over_the_responses_one_by_one():
    rng = np.random.default_rng(0)
    rows = [tuple(row) for row in enumerable.all_sequences(3, 3).tolist()]
    probs, correct = rng.dirichlet(np.ones(27)), rng.random(27) < 0.4
    for prefix in [(), (1,), (2, 0), (2, 2)]:
        p, q = enumerable.children(probs, correct, 3, prefix)
        total = sum(x for row, x in zip(rows, probs, strict=True) if row[: len(prefix)] == prefix)
        for token in range(3):
            through = [i for i, row in enumerate(rows) if row[: len(prefix) + 1] == (*prefix, token)]
            mass = sum(probs[i] for i in through)
            assert p[token] == pytest.approx(mass / total)
            assert q[token] == pytest.approx(sum(probs[i] for i in through if correct[i]) / mass)


def test_figures_by_hand():
    start = np.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    now = np.array([[0.3, 0.1, 0.2, 0.4], [0.5, 0.0, 0.25, 0.25]])
    correct = np.array([[True, True, False, False], [True, False, False, False]])
    got = enumerable.figures(start, now, correct, (1, 2))
    assert got == pytest.approx(
        {
            "q_pos": 0.45,
            "pass@1": 0.45,
            "pass@2": (1 - 0.6**2 + 1 - 0.5**2) / 2,
            "improved": 2 / 3,
            "worst_drop": -0.1,
            "retained": (1 - 0.1 / 0.3 + 1) / 2,
            "entropy": -(
                0.3 * np.log(0.3) + 0.1 * np.log(0.1) + 0.2 * np.log(0.2) + 0.4 * np.log(0.4)
                + 0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25)
            ) / 2,
        }
    )  # fmt: skip
