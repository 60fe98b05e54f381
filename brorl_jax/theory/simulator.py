"""The paper's token-level experiment [P sec. 4.1]: one softmax over 128,000 tokens, N draws a step, AdamW.

    L = -(1/N) sum_j (R_j - mean R) p_{a_j},    dL/dz_k = -(1/N) p_k (s_k - sum_i s_i p_i)

with the signal ``s`` of ``mass_balance.signal``: draws times centred reward in the paper's experiment
(``reading="multiplicity"``), or each drawn token once as in its theorem (``"distinct"``). No clip, no KL.

The whole run is one compiled scan over steps, batched over seeds. It holds the logits as their distance from the start,
``d = z - z_0``: steps are 1e-6 to 1e-4, the logits up to 5, and in float32 a sum of the two would lose what decides
whether a token gained. With that, float32 agrees with float64 (tests/theory/test_simulator.py); inside
``jax.enable_x64(True)`` everything is float64.

With few draws most incorrect tokens are never drawn, and those are all alike. An array has a *slot* for each correct
token, one for each incorrect token that may yet be drawn, and one for all the others together: N = 16 needs 26,001
slots instead of 128,000. It changes nothing but the time: which of the equal tokens a draw takes is decided when it is
taken.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from brorl_jax.theory import mass_balance

BLOCK = 16  # slots per block of the sampler; the arrays are padded to a multiple of it
POOL_N = 256  # with more draws per step every incorrect token has its slot: telling draws apart takes N^2 comparisons


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
        if self.steps < 1 or self.log_every < 1 or self.steps % self.log_every:
            raise ValueError(f"log_every = {self.log_every} must divide steps = {self.steps}, both at least 1")
        if self.reading not in mass_balance.READINGS:
            raise ValueError(f"unknown reading {self.reading!r}; known: {', '.join(mass_balance.READINGS)}")

    @property
    def pool(self) -> int | None:
        """The slot of the incorrect tokens that were never drawn; None where each token has its own."""
        enough = self.correct + self.n * self.steps
        return enough if self.n <= POOL_N and enough < self.vocab else None


class Start(NamedTuple):
    """The start, of a token of each slot."""

    z: Float[Array, " V"]
    p: Float[Array, " V"]
    rewards: Float[Array, " V"]


class State(NamedTuple):
    """``d``: logits minus their start; ``m``, ``v``: Adam's moments; ``t``: updates done.

    ``copies``: how many tokens a slot stands for: 1, those of the pool, or 0 for free slots and padding.
    """

    d: Float[Array, " V"]
    m: Float[Array, " V"]
    v: Float[Array, " V"]
    copies: Float[Array, " V"]
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
    used = setup.vocab if setup.pool is None else setup.pool + 1
    slot = np.arange(-(-used // BLOCK) * BLOCK)
    correct = slot < setup.correct
    z = np.where(correct & setup.seeded, np.where(slot == 0, 5.0, 3.0), 0.0)
    p = np.exp(z) / (np.exp(z[correct]).sum() + setup.vocab - setup.correct)
    return Start(*(jnp.asarray(x, jnp.result_type(float)) for x in (z, p, np.where(correct, 1.0, -1.0))))


def initial(setup: Setup, begin: Start) -> State:
    slot = np.arange(begin.p.size)
    if setup.pool is None:
        copies = slot < setup.vocab
    else:
        copies = np.where(slot < setup.correct, 1, 0) + np.where(slot == setup.pool, setup.vocab - setup.correct, 0)
    zero = jnp.zeros_like(begin.p)
    return State(zero, zero, zero, jnp.asarray(copies, begin.p.dtype), jnp.zeros((), jnp.int32))


def draw(key: Array, weights: Float[Array, " V"], n: int) -> Float[Array, " V"]:
    """Counts of ``n`` independent draws with probabilities in proportion to ``weights``; V a multiple of ``BLOCK``.

    Inverse distribution function in two levels, a uniform number for each: first the block, then the token in it.
    One float32 number for both would have steps of 1.2e-7, two per cent of an incorrect token's probability; so they
    are below 0.2 % of a block's and far less of a token's within. A block is a column of ``weights`` as ``[BLOCK,
    V / BLOCK]``, so that its running sum adds whole rows.
    """
    columns = weights.size // BLOCK
    sums = [weights[:columns]]
    for k in range(1, BLOCK):
        sums.append(sums[-1] + weights[k * columns : (k + 1) * columns])
    within, ends = jnp.concatenate(sums), jnp.cumsum(sums[-1])
    u = jax.random.uniform(key, (2, n), weights.dtype)
    block = _search(ends, columns, u[0] * ends[-1])
    row = _search(within, BLOCK, u[1] * sums[-1][block], stride=columns, offset=block)
    return jnp.zeros_like(weights).at[row * columns + block].add(1)


def _search(
    table: Float[Array, " M"], rows: int, u: Float[Array, " n"], stride: int = 1, offset: Int[ArrayLike, "*n"] = 0
) -> Int[Array, " n"]:
    """How many of ``table[offset + stride * k]``, ascending over the ``rows`` k, are at most ``u``; less than all are.

    ``jnp.searchsorted`` for a table per query, without its bounds checks: a third of its time on CPU.
    """
    halvings = (rows - 1).bit_length()

    def halve(k: int, position: Array) -> Array:
        ahead = jnp.minimum(position + (1 << (halvings - 1 - k)), rows)
        passed = table.at[offset + stride * (ahead - 1)].get(mode="promise_in_bounds") <= u
        return jnp.where(passed, ahead, position)

    return jax.lax.fori_loop(0, halvings, halve, jnp.zeros(u.shape, jnp.int32))


def tell_apart(
    key: Array, counts: Float[Array, " V"], copies: Float[Array, " V"], setup: Setup
) -> tuple[Float[Array, " V"], Float[Array, " V"]]:
    """Gives each token just drawn from the pool a slot of its own: new ``counts`` and ``copies``.

    The k draws took any k of the pool's tokens, independently: some may have taken the same.
    """
    pool, draws = setup.pool, jnp.arange(setup.n)
    left = copies[pool]
    taken = jnp.floor(jax.random.uniform(key, (setup.n,), copies.dtype) * left)
    live = draws < counts[pool]
    first = jnp.argmax((taken[:, None] == taken) & live, axis=1)  # the first draw of the same token
    fresh = live & (first == draws)
    slot = (setup.vocab - left).astype(jnp.int32) + (jnp.cumsum(fresh) - 1)[first]
    counts = counts.at[pool].set(0).at[jnp.where(live, slot, counts.size)].add(1, mode="drop")
    copies = copies.at[pool].add(-fresh.sum().astype(copies.dtype))
    return counts, copies.at[jnp.where(fresh, slot, counts.size)].set(1, mode="drop")


def _dot(a: Float[Array, " V"], b: Float[Array, " V"]) -> Float[Array, ""]:
    """A sum that CPUs take eight numbers at a time, unlike ``sum``'s."""
    return jnp.vdot(a, b, precision="highest")


def probabilities(begin: Start, state: State) -> Float[Array, " V"]:
    """Of a token of each slot: ``copies * probabilities`` add up to 1."""
    weights = begin.p * jnp.exp(state.d)
    return weights / _dot(state.copies, weights)


def update(
    state: State, probs: Float[Array, " V"], counts: Float[Array, " V"], begin: Start, adamw: AdamW, setup: Setup
) -> State:
    """One step of AdamW on L, for the ``setup.n`` draws in ``counts``.

    By hand, not optax's: it works on ``d`` while the decay pulls on ``z_0 + d``, and is one pass over memory.
    """
    baseline = _dot(counts, begin.rewards) / setup.n
    signal = mass_balance.signal(counts, begin.rewards - baseline, setup.reading)
    grad = -mass_balance.logit_update(probs, signal, setup.n, 1.0)
    t = state.t + 1
    m = adamw.b1 * state.m + (1 - adamw.b1) * grad
    v = adamw.b2 * state.v + (1 - adamw.b2) * grad**2
    unbias_m, unbias_v = 1 / (1 - adamw.b1**t), 1 / (1 - adamw.b2**t)  # scalars, so that no array is divided by them
    ahead = unbias_m * m / (jnp.sqrt(unbias_v * v) + adamw.eps)
    d = state.d - adamw.lr * (adamw.weight_decay * (begin.z + state.d) + ahead)
    return State(d, m, v, state.copies, t)


def measure(state: State, begin: Start, correct: int) -> Record:
    """The run's figures now. Changes are computed as changes: ``expm1`` keeps those far smaller than p itself."""
    growth = jnp.expm1(state.d)
    mass = state.copies * begin.p
    rise = _dot(mass, growth)  # of the partition sum, relative
    p0 = begin.p[:correct]
    change = p0 * (growth[:correct] - rise) / (1 + rise)
    surprise = jnp.log1p(rise) - state.d - jnp.log(begin.p)
    return Record(
        step=state.t,
        q_pos=p0.sum() + change.sum(),
        improved=jnp.mean(change > 0, dtype=p0.dtype),
        worst_drop=change.min(),
        retained=1 + jnp.minimum(change, 0).sum() / p0.sum(),
        entropy=_dot(mass * (1 + growth) / (1 + rise), surprise),
    )


@functools.partial(jax.jit, static_argnames="setup")
def _run(setup: Setup, begin: Start, adamw: AdamW, keys: Array) -> Record:
    def one(key: Array) -> Record:
        def step(_: int, state: State) -> State:
            probs = probabilities(begin, state)
            for_draws, for_pool = jax.random.split(jax.random.fold_in(key, state.t))
            counts = draw(for_draws, state.copies * probs, setup.n)
            if setup.pool is not None:
                counts, copies = tell_apart(for_pool, counts, state.copies, setup)
                state = state._replace(copies=copies)
            return update(state, probs, counts, begin, adamw, setup)

        def stretch(state: State, _: None) -> tuple[State, Record]:
            state = jax.lax.fori_loop(0, setup.log_every, step, state)
            return state, measure(state, begin, setup.correct)

        first = measure(initial(setup, begin), begin, setup.correct)
        _, rest = jax.lax.scan(stretch, initial(setup, begin), length=setup.steps // setup.log_every)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)

    return jax.vmap(one)(keys)


def simulate(setup: Setup, adamw: AdamW = AdamW(), seeds: tuple[int, ...] = (0,)) -> Record:  # noqa: B008
    """Runs every seed to the end; the record, step 0 included, as NumPy arrays ``[seeds, logs]``.

    Two calls with one setup compile once, whatever the optimiser's numbers.
    """
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jax.tree.map(np.asarray, _run(setup, start(setup), jax.tree.map(jnp.asarray, adamw), keys))
