"""Diagnostics of a step's rollouts: from groups to the arrays of ``theory.trie``, and to metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from brorl_jax.data.packing import Layout, pack
from brorl_jax.models import sharding
from brorl_jax.theory import trie as trie_lib
from brorl_jax.theory.trie import Trie
from brorl_jax.types import Group, Sample


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How much of a step's tries is looked at.

    Attributes:
        min_visits: Least rollouts through a node; a root always counts.
        max_depth: Most tokens of a rollout.
        exact_nodes: Nodes of each group whose full distribution is computed: the root, then the first that branch.
    """

    min_visits: int
    max_depth: int
    exact_nodes: int


def mass_balance(
    params: Any,
    groups: Sequence[Group],
    *,
    version: int,
    next_token: Callable[..., Any],
    mesh: Mesh,
    slots: int,
    vocab: int,
    bounds: Bounds,
) -> dict[str, float]:
    """``mass_balance/...`` of the groups of a step, from the tries of their scored samples (see ``theory.trie``).

    Args:
        params: The policy's weights.
        version: Theirs. Groups that other weights sampled get bounds in place of exact distributions.
        next_token: See ``learner.step.make_next_token``.
        slots: Prompts in one micro-batch of that pass.
        vocab: Tokens that can be sampled.
    """
    groups = [group for group in groups if group.scored]
    if not groups:
        return {}
    trie, samples, baseline = build(groups, bounds)
    fresh = np.array([all(s.weight_version == version for s in group.scored) for group in groups])
    exact = trie_lib.first_branching(trie, bounds.exact_nodes)
    exact = exact[fresh[trie.group[exact]]]
    probs = distributions(params, groups, trie, samples, exact, next_token=next_token, mesh=mesh, slots=slots)
    balance = trie_lib.balance(trie, baseline, vocab, exact, probs)
    out = trie_lib.summary(trie, balance, exact, probs)
    out["covered"] = float(trie.visits.sum()) / max(1, sum(len(s.tokens) for s in samples))
    return {f"mass_balance/{name}": value for name, value in out.items()}


def build(groups: Sequence[Group], bounds: Bounds) -> tuple[Trie, list[Sample], np.ndarray]:
    """The trie of all scored samples of ``groups``, those samples, and the groups' mean rewards ``[G]``."""
    samples = [sample for group in groups for sample in group.scored]
    lengths = np.array([min(len(sample.tokens), bounds.max_depth) for sample in samples])
    tokens = np.zeros((len(samples), lengths.max(initial=0)), np.int32)
    logp = np.zeros(tokens.shape, np.float32)
    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        tokens[i, :length], logp[i, :length] = sample.tokens[:length], sample.logp[:length]
    rewards = np.array([sample.reward for sample in samples], float)
    group = np.repeat(np.arange(len(groups)), [len(g.scored) for g in groups])
    trie = trie_lib.build(
        tokens, lengths, logp, rewards, group, min_visits=bounds.min_visits, max_depth=bounds.max_depth
    )
    baseline = np.bincount(group, rewards) / np.bincount(group)
    return trie, samples, baseline


def distributions(
    params: Any,
    groups: Sequence[Group],
    trie: Trie,
    samples: Sequence[Sample],
    nodes: np.ndarray,
    *,
    next_token: Callable[..., Any],
    mesh: Mesh,
    slots: int,
) -> np.ndarray:
    """Next-token distributions ``[len(nodes), V]`` at some nodes of the trie: one pass over their prompts and prefixes.

    A node's prefix becomes a short response that ends with the node's own next token, so that the place of that token
    is the node.
    """
    of_group = [nodes[trie.group[nodes] == g] for g in range(len(groups))]
    used = [(groups[g], mine) for g, mine in enumerate(of_group) if len(mine)]
    if not used:
        return np.zeros((0, 0), np.float32)
    short, ends, order = [], [], []
    for group, mine in used:
        mine = mine[np.argsort(-trie.depth[mine], kind="stable")]  # the order in which they are packed into a row
        cut = [samples[i] for i in trie.sample[mine].tolist()]
        parts = [
            dataclasses.replace(sample, index=i, tokens=sample.tokens[: d + 1], logp=sample.logp[: d + 1])
            for i, (sample, d) in enumerate(zip(cut, trie.depth[mine], strict=True))
        ]
        short.append(Group(group.prompt, parts))
        ends.append(np.cumsum(trie.depth[mine] + 1) - 1)
        order.append(mine)
    # powers of two: few shapes to compile
    row = 1 << int(max(end[-1] for end in ends)).bit_length()
    width = 1 << (max(len(end) for end in ends) - 1).bit_length()
    batch = pack(short, Layout(slots, 1, row))
    places = np.zeros((batch.tokens.shape[0] * slots, width), np.int32)
    for i, end in enumerate(ends):
        places[i, : len(end)] = end
    places = places.reshape(-1, slots, places.shape[1])
    out = sharding.fetch(next_token(params, sharding.put_batch(mesh, batch), places))
    out = out.reshape(-1, *out.shape[2:])
    found = np.concatenate([out[i, : len(end)] for i, end in enumerate(ends)])
    return found[np.argsort(np.concatenate(order))]
