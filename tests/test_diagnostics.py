"""Diagnostics of real rollouts: the embedded engine's samples against the model run another way."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from brorl_jax import diagnostics
from brorl_jax.diagnostics import Bounds
from brorl_jax.learner.step import Compute, make_next_token
from brorl_jax.models import sharding, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.api import Sampling, request
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.theory import mass_balance
from brorl_jax.theory import trie as trie_lib
from brorl_jax.theory.precision import float64
from brorl_jax.types import Prompt, Status

CFG = ModelConfig(
    "qwen3", vocab_size=14, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=16, max_positions=32, tied=False
)
VOCAB, TEMPERATURE, N = 11, 0.8, 40


@pytest.fixture(scope="module")
def params():
    drawn = transformer.init(jax.random.key(1), CFG)
    return drawn | {"head": 20 * drawn["head"]}


@pytest.fixture(scope="module")
def groups(params):
    """Three groups of responses of up to 5 tokens, prompts of different lengths; half of the answers right."""
    engine = LocalEngine(CFG, rows=128, chunk=5, real_vocab=VOCAB)
    engine.publish(params, 7)
    prompts = [Prompt(str(i), np.arange(1, 2 + 2 * i, dtype=np.int32), "", "", "", "s") for i in range(3)]
    requests = [request(p, N, run_seed=0, step=0) for p in prompts]
    found = sorted(
        engine.generate(requests, Sampling(TEMPERATURE, max_tokens=5, stop_ids=(3,))), key=lambda g: g.prompt.id
    )
    for group in found:
        for sample in group.samples:
            sample.status, sample.reward = Status.OK, float(sample.tokens.sum() % 2)
    return found


@pytest.fixture(scope="module")
def measure(params):
    next_token = make_next_token(CFG, Compute(real_vocab=VOCAB, temperature=TEMPERATURE))

    def run(groups, version=7, slots=2, params=params, **bounds):
        bounds = Bounds(**{"min_visits": 4, "max_depth": 16, "exact_nodes": 3, **bounds})
        return diagnostics.mass_balance(
            params, groups, version=version, next_token=next_token, mesh=sharding.make_mesh(1, 1, 1), slots=slots,
            vocab=VOCAB, bounds=bounds,
        )  # fmt: skip

    run.next_token = next_token
    return run


def whole_forward(params, tokens):
    """The next-token distribution after ``tokens``, by a pass over the whole sequence."""
    row = np.asarray(tokens, np.int32)[None]
    hidden = transformer.forward(params, CFG, row, np.ones_like(row), np.arange(row.shape[1])[None])
    logits = np.asarray(hidden[0, -1] @ transformer.unembed(params), float)[:VOCAB] / TEMPERATURE
    p = np.exp(logits - logits.max())
    return p / p.sum()


@pytest.mark.parametrize(("slots", "mesh"), [(1, {}), (2, {}), (4, {"data": 2, "fsdp": 2})])
def test_distributions_at_nodes_equal_a_pass_over_the_whole_sequence(params, groups, measure, slots, mesh):
    mesh = sharding.make_mesh(**mesh)
    placed = jax.device_put(params, sharding.weight_shardings(mesh, CFG))
    trie, samples, _ = diagnostics.build(groups, Bounds(2, 16, 5))
    nodes = trie_lib.first_branching(trie, 5)
    nodes = nodes[(trie.group[nodes] != 1) | (trie.depth[nodes] > 0)]  # groups with different numbers of nodes
    assert set(trie.group[nodes]) == {0, 1, 2} and trie.depth[nodes].max() >= 1
    got = diagnostics.distributions(
        placed, groups, trie, samples, nodes, next_token=measure.next_token, mesh=mesh, slots=slots
    )
    for node, p in zip(nodes, got, strict=True):
        prefix = samples[trie.sample[node]].tokens[: trie.depth[node]]
        expected = whole_forward(params, [*groups[trie.group[node]].prompt.tokens, *prefix])
        np.testing.assert_allclose(p[:VOCAB], expected, rtol=2e-4, atol=1e-6)
        assert (p[VOCAB:] == 0).all()


def test_few_programs_serve_any_number_of_nodes(params, groups):
    trie, samples, _ = diagnostics.build(groups, Bounds(2, 16, 8))
    shapes = set()

    def next_token(params, batch, places):
        shapes.add((batch.tokens.shape[1:], places.shape[1:]))
        return np.zeros((*places.shape, VOCAB), np.float32)

    mesh, most = sharding.make_mesh(1, 1, 1), 0
    for nodes in (trie_lib.first_branching(trie, k) for k in range(1, 9)):
        diagnostics.distributions(params, groups, trie, samples, nodes, next_token=next_token, mesh=mesh, slots=2)
        most = max(most, int(np.bincount(trie.group[nodes]).max()))
    assert most > 5  # of one group
    assert {width for _, (_, width) in shapes} == {1, 2, 4, 8}


def test_figures_of_the_roots_equal_those_of_the_whole_distribution(params, groups, measure):
    got = measure(groups, exact_nodes=1, max_depth=1)
    mass, second, expected, moods = [], [], [], []
    for group in groups:
        p = whole_forward(params, group.prompt.tokens)
        first = np.array([s.tokens[0] for s in group.samples])
        rewards = np.array([s.reward for s in group.samples])
        drawn = np.bincount(first, minlength=VOCAB) > 0
        mass.append(p[~drawn].sum())
        second.append((p[~drawn] ** 2).sum())
        expected.append((p**2 * (1 - p) ** N).sum())
        moods.append(sum(p[c] * (rewards[first == c].mean() - rewards.mean()) for c in np.flatnonzero(drawn)))
    assert got["mass_balance/nodes"] == got["mass_balance/branching"] == 3
    assert got["mass_balance/unsampled_root"] == pytest.approx(np.mean(mass), rel=1e-3, abs=1e-6)
    assert got["mass_balance/unsampled_2"] == pytest.approx(np.mean(second), rel=1e-3, abs=1e-9)
    assert got["mass_balance/unsampled_2_expected"] == pytest.approx(np.mean(expected), rel=1e-3)
    assert got["mass_balance/mood"] == pytest.approx(np.mean(moods), rel=1e-3, abs=1e-6)
    tokens = sum(len(s.tokens) for g in groups for s in g.samples)
    assert got["mass_balance/covered"] == pytest.approx(3 * N / tokens)


def test_one_token_task_equals_the_closed_form(params, measure):
    """Responses of one token, right or wrong: the theorem's own setting, its terms from ``theory.mass_balance``."""
    right = np.arange(VOCAB) % 3 == 0
    params = params | {"head": params["head"] / 4}  # flat enough to draw every token
    engine = LocalEngine(CFG, rows=512, chunk=1, real_vocab=VOCAB)
    engine.publish(params, 7)
    prompts = [Prompt(str(i), np.array([1 + i, 2], np.int32), "", "", "", "s") for i in range(2)]
    requests = [request(p, 512, run_seed=1, step=0) for p in prompts]
    groups = list(engine.generate(requests, Sampling(TEMPERATURE, max_tokens=1)))
    terms = []
    for group in groups:
        for sample in group.samples:
            sample.status, sample.reward = Status.OK, float(right[sample.tokens[0]])
        counts = np.bincount([s.tokens[0] for s in group.samples], minlength=VOCAB)
        assert (counts > 0).all()  # so the correct mass is known, and the diagnostics' estimate of it is exact
        p, base = whole_forward(params, group.prompt.tokens), np.mean([s.reward for s in group.samples])
        terms.append(mass_balance.terms(float64(mass_balance.balance)(p, right, counts, right - base)))
    got = measure(groups, params=params)
    up, down, unsampled = np.mean(np.array(terms, float), axis=0)
    assert got["mass_balance/up"] == pytest.approx(up, rel=1e-4)
    assert got["mass_balance/down"] == pytest.approx(down, rel=1e-4)
    assert got["mass_balance/unsampled_2"] == unsampled == 0
    assert got["mass_balance/sign_certain"] == 1


def test_without_exact_nodes_the_rollouts_alone_give_the_same_masses(groups, measure):
    exact, bounded = measure(groups), measure(groups, exact_nodes=0)
    assert "mass_balance/unsampled_2" not in bounded
    for name in ("unsampled_root", "unsampled", "sampled_2", "mood", "up", "down", "covered", "nodes", "branching"):
        key = f"mass_balance/{name}"
        assert bounded[key] == pytest.approx(exact[key], rel=1e-3, abs=1e-6), name
    assert bounded["mass_balance/sign_certain"] <= exact["mass_balance/sign_certain"]


def test_groups_of_older_weights_get_no_exact_distribution(groups, measure):
    old = measure(groups, version=8)
    assert "mass_balance/unsampled_2" not in old
    assert old == pytest.approx(measure(groups, exact_nodes=0))


def test_samples_without_a_score_do_not_count(groups, measure):
    bad = [dataclasses.replace(s, status=Status.ABORTED, reward=math.nan) for s in groups[0].samples[:10]]
    mixed = dataclasses.replace(groups[0], samples=[*bad, *groups[0].samples[10:]])
    without = dataclasses.replace(groups[0], samples=groups[0].samples[10:])
    assert measure([mixed, groups[1]]) == pytest.approx(measure([without, groups[1]]))
    assert measure([dataclasses.replace(groups[0], samples=bad)]) == {}
    assert measure([]) == {}
