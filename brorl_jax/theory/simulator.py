"""The paper's token-level experiment [P sec. 4.1]: one softmax over 128,000 tokens, N draws a step, AdamW.

    L = -(1/N) sum_j (R_j - mean R) p_{a_j},    dL/dz_k = -(1/N) p_k (s_k - sum_i s_i p_i)

with the signal ``s`` of ``mass_balance.signal``: draws times centred reward in the paper's experiment
(``reading="multiplicity"``), or each drawn token once as in its theorem (``"distinct"``). No clip, no KL.

The whole run is one compiled scan over steps, batched over seeds. It holds the logits as their distance from the start,
``d = z - z_0``: steps are 1e-6 to 1e-4, the logits up to 5, and in float32 a sum of the two would lose what decides
whether a token gained. With that, float32 agrees with float64 (tests/theory/test_simulator.py); inside
``jax.enable_x64(True)`` everything is float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brorl_jax.theory import mass_balance

BLOCK = 16  # tokens per block of the sampler; the arrays are padded to a multiple of it


class AdamW(NamedTuple):
    """The optimiser's numbers; PyTorch's defaults with the paper's rate. Traced: another value compiles nothing.

    ``eps`` decides much here: gradients of rare tokens are about p^2 = 4e-9, below 1e-8. The decay is decoupled:
    ``z <- z (1 - lr weight_decay) - lr m / (sqrt(v) + eps)``. The paper publishes the rate only.
    """

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is simulated; a different one is a different program.

    Attributes:
        n: Draws per step.
        vocab: Tokens.
        correct: Correct tokens, reward +1 (ids 0 to ``correct - 1``); the others have reward -1.
        seeded: Start from z = 3 on correct tokens and 5 on token 0, the anchor, which is one of them
            (Q_pos = 0.630, the start of the paper's figure); else from z = 0 (Q_pos = 0.078).
        steps: Updates.
        log_every: Updates between two records; divides ``steps``.
        reading: ``"multiplicity"`` [P sec. 4.1] or ``"distinct"``, see ``mass_balance.signal``.
    """

    n: int
    vocab: int = 128_000
    correct: int = 10_000
    seeded: bool = True
    steps: int = 1000
    log_every: int = 10
    reading: str = "multiplicity"

    def __post_init__(self) -> None:
        if not 0 < self.correct < self.vocab:
            raise ValueError(f"correct must lie between 1 and vocab - 1, got {self.correct} of {self.vocab} tokens")
        if self.n < 1:
            raise ValueError(f"n must be >= 1 draw per step, got {self.n}")
        if self.log_every < 1 or self.steps < 1 or self.steps % self.log_every:
            raise ValueError(f"log_every = {self.log_every} must divide steps = {self.steps}")
        if self.reading not in mass_balance.READINGS:
            raise ValueError(f"unknown reading {self.reading!r}; known: {', '.join(mass_balance.READINGS)}")


class Start(NamedTuple):
    """The start, padded to whole blocks with tokens of probability 0."""

    z: Float[Array, " V"]
    p: Float[Array, " V"]
    rewards: Float[Array, " V"]


class State(NamedTuple):
    """``d``: logits minus their start; ``m``, ``v``: Adam's moments; ``t``: updates done."""

    d: Float[Array, " V"]
    m: Float[Array, " V"]
    v: Float[Array, " V"]
    t: Int[Array, ""]


class Record(NamedTuple):
    """The run at each logged step, ``[logs]``, or ``[seeds, logs]`` from ``simulate``.

    Attributes:
        step: Updates done, from 0.
        q_pos: Mass of the correct tokens.
        improved: Share of correct tokens whose probability is above its start.
        worst_drop: Most negative change of a correct token's probability since the start (positive: none fell).
        retained: ``1 - sum_correct max(0, p_0 - p) / sum_correct p_0`` [FG].
        entropy: Of the policy, nats.
    """

    step: Int[Array, "*seeds logs"]
    q_pos: Float[Array, "*seeds logs"]
    improved: Float[Array, "*seeds logs"]
    worst_drop: Float[Array, "*seeds logs"]
    retained: Float[Array, "*seeds logs"]
    entropy: Float[Array, "*seeds logs"]


def start(setup: Setup) -> Start:
    """Logits, probabilities and rewards before the first step; probabilities computed in float64."""
    padded = -(-setup.vocab // BLOCK) * BLOCK
    z = np.zeros(padded)
    if setup.seeded:
        z[: setup.correct] = 3.0
        z[0] = 5.0
    p = np.where(np.arange(padded) < setup.vocab, np.exp(z), 0.0)
    rewards = np.where(np.arange(padded) < setup.correct, 1.0, -1.0)
    return Start(*(jnp.asarray(x, jnp.result_type(float)) for x in (z, p / p.sum(), rewards)))


def initial(begin: Start) -> State:
    return State(*(jnp.zeros_like(begin.p) for _ in range(3)), t=jnp.zeros((), jnp.int32))


def draw(key: Array, weights: Float[Array, " V"], n: int) -> Int[Array, " V"]:
    """Counts of ``n`` independent draws with probabilities in proportion to ``weights``; V a multiple of ``BLOCK``.

    Inverse distribution function in two levels, a uniform number for each: first the block, then the token in it.
    One float32 number for both would have steps of 1.2e-7, two per cent of an incorrect token's probability; so they
    are below 0.2 % of a block's and far less of a token's within.
    """
    within = jnp.cumsum(weights.reshape(-1, BLOCK), axis=1)
    ends = jnp.cumsum(within[:, -1])
    u = jax.random.uniform(key, (2, n), weights.dtype)
    block = jnp.searchsorted(ends, u[0] * ends[-1], side="right")
    rows = within[block]
    place = jnp.sum(rows <= u[1][:, None] * rows[:, -1:], axis=1)
    return jnp.zeros(weights.shape, jnp.int32).at[block * BLOCK + place].add(1)


def probabilities(begin: Start, d: Float[Array, " V"]) -> Float[Array, " V"]:
    weights = begin.p * jnp.exp(d)
    return weights / weights.sum()


def update(
    state: State, probs: Float[Array, " V"], counts: Int[Array, " V"], begin: Start, adamw: AdamW, reading: str
) -> State:
    """One step of AdamW on L, for ``counts`` drawn from ``probs``.

    By hand, not optax's: it works on ``d`` while the decay pulls on ``z_0 + d``, and is one pass over memory.
    """
    n = counts.sum().astype(probs.dtype)
    baseline = jnp.sum(counts * begin.rewards) / n
    signal = mass_balance.signal(counts, begin.rewards - baseline, reading)
    grad = -mass_balance.logit_update(probs, signal, n, 1.0)
    t = state.t + 1
    m = adamw.b1 * state.m + (1 - adamw.b1) * grad
    v = adamw.b2 * state.v + (1 - adamw.b2) * grad**2
    ahead = (m / (1 - adamw.b1**t)) / (jnp.sqrt(v / (1 - adamw.b2**t)) + adamw.eps)
    d = state.d - adamw.lr * (adamw.weight_decay * (begin.z + state.d) + ahead)
    return State(d, m, v, t)


def measure(state: State, begin: Start, correct: int) -> Record:
    """The run's figures now. Changes are computed as changes: ``expm1`` keeps those far smaller than p itself."""
    growth = jnp.expm1(state.d)
    rise = jnp.sum(begin.p * growth)  # of the partition sum, relative
    change = (begin.p * (growth - rise) / (1 + rise))[:correct]
    p0 = begin.p[:correct]
    p = begin.p * (1 + growth) / (1 + rise)
    log_p = jnp.log(jnp.where(begin.p > 0, begin.p, 1.0)) + state.d - jnp.log1p(rise)
    return Record(
        step=state.t,
        q_pos=p0.sum() + change.sum(),
        improved=jnp.mean(change > 0, dtype=p.dtype),
        worst_drop=change.min(),
        retained=1 + jnp.minimum(change, 0).sum() / p0.sum(),
        entropy=-jnp.sum(p * log_p),
    )


@functools.partial(jax.jit, static_argnames="setup")
def _run(setup: Setup, begin: Start, adamw: AdamW, keys: Array) -> Record:
    def one(key: Array) -> Record:
        def step(_: int, state: State) -> State:
            probs = probabilities(begin, state.d)
            counts = draw(jax.random.fold_in(key, state.t), probs, setup.n)
            return update(state, probs, counts, begin, adamw, setup.reading)

        def stretch(state: State, _: None) -> tuple[State, Record]:
            state = jax.lax.fori_loop(0, setup.log_every, step, state)
            return state, measure(state, begin, setup.correct)

        first = measure(initial(begin), begin, setup.correct)
        _, rest = jax.lax.scan(stretch, initial(begin), length=setup.steps // setup.log_every)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)

    return jax.vmap(one)(keys)


def simulate(setup: Setup, adamw: AdamW = AdamW(), seeds: tuple[int, ...] = (0,)) -> Record:  # noqa: B008
    """Runs every seed to the end; the record, step 0 included, as NumPy arrays ``[seeds, logs]``.

    Two calls with one setup compile once, whatever the optimiser's numbers.
    """
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jax.tree.map(np.asarray, _run(setup, start(setup), jax.tree.map(jnp.asarray, adamw), keys))
