"""The theorem on a real policy: the rollouts of one prompt as a tree of tokens, the mass balance at every node [P].

The N rollouts of a prompt form a trie. At a node that ``n`` of them pass, the policy draws the next token ``n`` times
from one distribution ``p``: the theorem's setting, with n in place of N. The probability of every token that was drawn
is known from the rollouts themselves, hence also the mass never drawn; no forward pass is needed for it.

What stands for the theorem's symbols at a node (sums over *distinct* sampled tokens c, whatever their counts):

* ``q_c``, the correctness of a token: the mean reward, in [0, 1], of the rollouts that go through it. At the last token
  of an answer it is 0 or 1, as in the theorem; before that it estimates how often the token ends well.
* ``R_c = q_c - b``, its reward: ``b`` is the mean reward of the whole group, the baseline of the group estimators. They
  may go on to divide by a positive number, which changes no sign. Unsampled tokens have R = 0, as in the theorem.
* ``m = 1 - sum_c p_c``, the unsampled mass, and ``U_2``, the sum of p^2 over it: exact where the full distribution is
  given; otherwise between m^2 / (V - k), for k sampled of V tokens, and m^2.
* ``S = sum_c p_c R_c``, the batch mood S_R.
* ``Q``, the correct mass of the node. It depends on tokens nobody has seen, so there is an estimate,
  ``sum_c p_c q_c + m b`` (an unsampled token is as good as the group), and bounds over all they could be.

With rewards that are not just right or wrong the theorem becomes ``sum_i p_i^2 (q_i - Q) (R_i - S)``, in units of
eta / N. Split as in the paper: sampled tokens better than Q (``up``, A_2's term), sampled tokens worse than Q
(``down``, B_2's), and the unsampled coupling. At the estimate of Q, ``S = Q - b`` and ``R_c - S = q_c - Q``: both
sampled terms are sums of squares, and the coupling lies between ``-S (1 - Q) U_2`` and ``S Q U_2``.

Everything here is NumPy on the host, level by level over all groups at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Trie(NamedTuple):
    """The nodes with enough visits and the tokens drawn at them (edges). Nodes are in order of depth.

    Attributes:
        group: Group of a node.
        depth: Tokens before it; 0 is the root, right after the prompt.
        visits: Rollouts that draw a token there.
        sample: One of them: the node's prefix is its first ``depth`` tokens.
        node: Node of an edge, ascending.
        token: Its token; no two edges of a node have the same.
        count: Rollouts through it.
        logp: Its log-probability (mean over those rollouts, which differ by rounding at most).
        reward: Their mean reward.
    """

    group: Int[np.ndarray, " K"]
    depth: Int[np.ndarray, " K"]
    visits: Int[np.ndarray, " K"]
    sample: Int[np.ndarray, " K"]
    node: Int[np.ndarray, " E"]
    token: Int[np.ndarray, " E"]
    count: Int[np.ndarray, " E"]
    logp: Float[np.ndarray, " E"]
    reward: Float[np.ndarray, " E"]

    @property
    def children(self) -> Int[np.ndarray, " K"]:
        """Distinct tokens sampled at each node."""
        return np.bincount(self.node, minlength=len(self.group))


class NodeBalance(NamedTuple):
    """The mass balance of each node; symbols as in the module's docstring, changes in units of eta / N.

    Attributes:
        unsampled: m.
        sampled_2: Sum of p^2 over the sampled tokens, A_2 + B_2.
        unsampled_2_low, unsampled_2_high: Bounds of U_2; equal where it is exact.
        success: The estimate of Q.
        mood: S.
        up, down: The sampled terms at that estimate; neither is negative.
        coupling_low, coupling_high: Range of the unsampled coupling at that estimate, over what unsampled tokens
            may be.
        low, high: Range of the whole change, Q included, over what unsampled tokens may be. Attained where the full
            distribution is known.
    """

    unsampled: Float[np.ndarray, " K"]
    sampled_2: Float[np.ndarray, " K"]
    unsampled_2_low: Float[np.ndarray, " K"]
    unsampled_2_high: Float[np.ndarray, " K"]
    success: Float[np.ndarray, " K"]
    mood: Float[np.ndarray, " K"]
    up: Float[np.ndarray, " K"]
    down: Float[np.ndarray, " K"]
    coupling_low: Float[np.ndarray, " K"]
    coupling_high: Float[np.ndarray, " K"]
    low: Float[np.ndarray, " K"]
    high: Float[np.ndarray, " K"]

    @property
    def certain(self) -> Bool[np.ndarray, " K"]:
        """Whether the change has one sign, whatever the unsampled tokens are."""
        return (self.low > 0) | (self.high < 0)


def build(
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    logp: Float[np.ndarray, "B T"],
    rewards: Float[np.ndarray, " B"],
    group: Int[np.ndarray, " B"],
    *,
    min_visits: int,
    max_depth: int,
) -> Trie:
    """The trie of rollouts: every root, and below it nodes of ``min_visits`` down to depth ``max_depth - 1``.

    Args:
        tokens: Token ids, not negative; places from ``lengths`` on may hold anything.
        logp: Their log-probabilities under the distribution they were drawn from.
        group: Which rollouts share a prompt: numbers in [0, B).
    """
    nodes: list[tuple[np.ndarray, ...]] = []
    edges: list[tuple[np.ndarray, ...]] = []
    key, alive, above = np.asarray(group, np.int64), np.arange(len(lengths)), 0
    for depth in range(min(max_depth, tokens.shape[1])):
        going = lengths[alive] > depth
        alive, key = alive[going], key[going]
        _, place, visits = np.unique(key, return_inverse=True, return_counts=True)
        enough = (visits >= min_visits) | (depth == 0)
        rank = np.cumsum(enough) - 1
        alive, place = alive[enough[place]], rank[place[enough[place]]]
        if not len(alive):
            break
        visits = visits[enough]
        first = np.full(len(visits), len(lengths))
        np.minimum.at(first, place, alive)
        nodes.append((group[first], np.full(len(visits), depth), visits, first))
        span = int(tokens[alive, depth].max()) + 1
        pairs, key, count = np.unique(
            place * span + tokens[alive, depth].astype(np.int64), return_inverse=True, return_counts=True
        )
        means = (np.bincount(key, x) / count for x in (logp[alive, depth].astype(float), rewards[alive]))
        edges.append((above + pairs // span, pairs % span, count, *means))
        above += len(visits)
    if not nodes:
        nodes, edges = [(np.zeros(0, np.int64),) * 4], [(np.zeros(0, np.int64),) * 3 + (np.zeros(0),) * 2]
    columns = [np.concatenate(parts) for table in (nodes, edges) for parts in zip(*table, strict=True)]
    return Trie(**dict(zip(Trie._fields, columns, strict=True)))


def first_branching(trie: Trie, per_group: int) -> Int[np.ndarray, " X"]:
    """Of each group the root and, shallowest and then most visited first, nodes with two or more distinct tokens."""
    candidates = np.flatnonzero((trie.depth == 0) | (trie.children > 1))
    order = np.lexsort((-trie.visits[candidates], trie.depth[candidates], trie.group[candidates]))
    candidates = candidates[order]
    _, start, count = np.unique(trie.group[candidates], return_index=True, return_counts=True)
    return np.sort(candidates[np.arange(len(candidates)) - np.repeat(start, count) < per_group])


def balance(
    trie: Trie,
    baseline: Float[np.ndarray, " G"],
    vocab: int,
    exact: Int[np.ndarray, " X"] | None = None,
    probs: Float[np.ndarray, "X V"] | None = None,
) -> NodeBalance:
    """The mass balance of every node.

    Args:
        baseline: Mean reward of each group, b.
        vocab: Tokens that can be sampled, V.
        exact: Nodes whose full distribution is known ...
        probs: ... and that distribution.
    """
    k = len(trie.group)
    p, q, b = np.exp(trie.logp), trie.reward, np.asarray(baseline, float)[trie.group]
    rest = {} if exact is None or probs is None else _unsampled(trie, p, exact, probs)

    def per_node(values: np.ndarray) -> np.ndarray:
        return np.bincount(trie.node, values, minlength=k)

    m = np.clip(1.0 - per_node(p), 0.0, 1.0)
    u_low, u_high = m * m / np.maximum(vocab - trie.children, 1), m * m
    for node, unsampled in rest.items():
        m[node] = unsampled.sum()
        u_low[node] = u_high[node] = (unsampled**2).sum()
    seen = per_node(p * q)
    success = seen + m * b
    mood = per_node(p * (q - b[trie.node]))
    square = p * p * (q - success[trie.node]) ** 2
    better = q >= success[trie.node]
    coupling = -mood * (1.0 - success) * u_high, mood * success * u_high  # all unsampled tokens right, all wrong
    push = p * p * (q - b[trie.node] - mood[trie.node])
    low, high = _range(per_node(push * q), per_node(push), mood, seen, m, (u_low, u_high), rest)
    return NodeBalance(
        unsampled=m,
        sampled_2=per_node(p * p),
        unsampled_2_low=u_low,
        unsampled_2_high=u_high,
        success=success,
        mood=mood,
        up=per_node(np.where(better, square, 0.0)),
        down=per_node(np.where(better, 0.0, square)),
        coupling_low=np.minimum(*coupling),
        coupling_high=np.maximum(*coupling),
        low=low,
        high=high,
    )


def _unsampled(trie: Trie, p: np.ndarray, exact: np.ndarray, probs: np.ndarray) -> dict[int, np.ndarray]:
    """Of every exact node the distribution without its sampled tokens, whose exact probabilities go to ``p``."""
    rest = {}
    for node, distribution in zip(exact.tolist(), probs, strict=True):
        place = slice(*np.searchsorted(trie.node, (node, node + 1)))
        rest[node] = np.array(distribution, float)
        p[place] = rest[node][trie.token[place]]
        rest[node][trie.token[place]] = 0.0
    return rest


def _range(
    c: np.ndarray,
    d: np.ndarray,
    mood: np.ndarray,
    seen: np.ndarray,
    m: np.ndarray,
    unsampled_2: tuple[np.ndarray, np.ndarray],
    rest: dict[int, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the change ``c - Q d - S U_pos,2 + S Q U_2`` over what the unsampled tokens may be.

    ``c`` and ``d`` are the sums of p^2 (R - S) q and p^2 (R - S) over the sampled tokens.
    """
    corners = [
        c - x * d - mood * u * right + mood * x * u
        for x in (seen, seen + m)
        for u in unsampled_2
        for right in (0.0, 1.0)
    ]
    low, high = np.min(corners, axis=0), np.max(corners, axis=0)
    for node, p in rest.items():
        # Every unsampled token adds its own amount if it is right, so the extremes are chosen token by token.
        slope = mood[node] * unsampled_2[0][node] - d[node]
        gain = p * slope - mood[node] * p * p
        wrong = c[node] + seen[node] * slope
        low[node], high[node] = wrong + np.minimum(gain, 0.0).sum(), wrong + np.maximum(gain, 0.0).sum()
    return low, high


def summary(
    trie: Trie, balance: NodeBalance, exact: Int[np.ndarray, " X"], probs: Float[np.ndarray, "X V"]
) -> dict[str, float]:
    """The aggregates of a step: means over the branching nodes, each weighted by its visits; roots count once.

    Args:
        exact, probs: As given to ``balance``; what depends on them speaks of these nodes only.
    """
    roots, branching = trie.depth == 0, trie.children > 1
    out = {"nodes": float(len(trie.group)), "branching": float(branching.sum())}
    if roots.any():
        out["unsampled_root"] = float(balance.unsampled[roots].mean())
    if branching.any():

        def mean(values: np.ndarray) -> float:
            return float(np.average(values[branching], weights=trie.visits[branching]))

        out |= {
            "unsampled": mean(balance.unsampled),
            "sampled_2": mean(balance.sampled_2),
            "mood": mean(balance.mood),
            "mood_abs": mean(np.abs(balance.mood)),
            "up": mean(balance.up),
            "down": mean(balance.down),
            "coupling_worst": mean(balance.coupling_low),
            "sign_certain": mean(balance.certain),
        }
        out["gain"] = out["up"] + out["down"]
        if out["gain"]:
            out["at_risk"] = -out["coupling_worst"] / out["gain"]
    if len(exact):
        visits = trie.visits[exact]
        expected = [float(np.sum(p**2 * (1 - p) ** n)) for p, n in zip(probs.astype(float), visits, strict=True)]
        out |= {
            "unsampled_2": float(np.average(balance.unsampled_2_low[exact], weights=visits)),
            "unsampled_2_expected": float(np.average(expected, weights=visits)),
        }
    return out
