"""Mass balance: where probability goes in one policy-gradient step on N samples of one softmax.

Notation of [P sec. 2, App. C]. ``p = softmax(z)`` over ``V`` tokens, N draws from it. Correct tokens carry the mass
``Q_pos``, the others ``Q_neg``. A = sampled correct, B = sampled incorrect, U = never sampled. The objective is the
linear surrogate ``J = (1/N) sum_i s_i p_i`` with one *signal* ``s_i`` per token, 0 on U. Everything follows from

    S = sum_i s_i p_i                                          the batch's mood, S_R in the paper
    dz_j = (eta/N) p_j (s_j - S)                               the logit update
    dp_i = p_i (dz_i - sum_j p_j dz_j)                         first order in eta
    d(sum_i f_i p_i) = (eta/N) sum_j p_j^2 (f_j - F)(s_j - S)  for any f, with F = sum_i f_i p_i

The last line, with f = 1 on correct tokens and split by A, B and U, is the paper's Theorem 1 for any real signals:

    dQ_pos = (eta/N) [  Q_neg sum_A p_j^2 (s_j - S)            sampled correct
                      + Q_pos sum_B p_j^2 (S - s_j)            sampled incorrect
                      + S (Q_pos U_neg2 - Q_neg U_pos2) ]      unsampled coupling

Two reward levels (``s = R_c`` on A, ``R_w`` on B) make the first two lines ``(R_c - S) Q_neg A_2`` and
``(S - R_w) Q_pos B_2``: the theorem as printed. f = 1 on unsampled correct tokens gives F-GRPO's Proposition 3.2.

**Two readings of the sample**, see ``signal``. ``"distinct"`` is the theorem's: A and B are sets, each sampled token
counts once. With the prefactor 1/N the change then shrinks like 1/N once everything relevant is sampled: compare
``Terms`` (the bracket), not ``delta_q_pos``, across N. ``"multiplicity"`` weighs a token by its number of draws, as
policy-gradient code does, and the first two terms may then be negative: a token drawn less often than its
neighbours is pushed down although it is correct.

Functions broadcast over leading axes (``*batch``), keep the dtype of ``probs`` and can be traced; for float64 wrap
them in ``precision.float64``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num

READINGS = ("distinct", "multiplicity")


class Balance(NamedTuple):
    """Every quantity of the theorem, each ``[*batch]``.

    Attributes:
        n: Draws, N.
        q_pos: Mass of the correct tokens.
        q_neg: Mass of the incorrect tokens.
        p_pos: Mass of the sampled correct tokens (A).
        p_neg: Mass of the sampled incorrect tokens (B).
        a2: ``sum_A p^2``.
        b2: ``sum_B p^2``.
        u_pos2: ``sum p^2`` over unsampled correct tokens.
        u_neg2: ``sum p^2`` over unsampled incorrect tokens.
        sa2: ``sum_A s p^2``; ``R_c A_2`` with two reward levels.
        sb2: ``sum_B s p^2``; ``R_w B_2`` with two reward levels.
        s_r: ``sum s p``, the batch's mood; between R_w and R_c in the distinct reading.
    """

    n: Num[Array, "*batch"]
    q_pos: Float[Array, "*batch"]
    q_neg: Float[Array, "*batch"]
    p_pos: Float[Array, "*batch"]
    p_neg: Float[Array, "*batch"]
    a2: Float[Array, "*batch"]
    b2: Float[Array, "*batch"]
    u_pos2: Float[Array, "*batch"]
    u_neg2: Float[Array, "*batch"]
    sa2: Float[Array, "*batch"]
    sb2: Float[Array, "*batch"]
    s_r: Float[Array, "*batch"]


class Terms(NamedTuple):
    """The bracket of the theorem, ``N dQ_pos / eta``, in its three parts, each ``[*batch]``.

    Attributes:
        sampled_correct: Drawn from the incorrect pool by sampled correct tokens. Never negative with two reward
            levels in the distinct reading.
        sampled_incorrect: Freed by sampled incorrect tokens; likewise never negative.
        unsampled: The coupling through tokens never sampled, of either sign; 0 when ``s_r`` is.
    """

    sampled_correct: Float[Array, "*batch"]
    sampled_incorrect: Float[Array, "*batch"]
    unsampled: Float[Array, "*batch"]

    @property
    def total(self) -> Float[Array, "*batch"]:
        return self.sampled_correct + self.sampled_incorrect + self.unsampled


def two_level(correct: Bool[ArrayLike, "*batch V"], r_c: float = 1.0, r_w: float = -1.0) -> Float[Array, "*batch V"]:
    """The paper's rewards per token: ``r_c`` on correct ones, ``r_w`` on the others.

    Raises:
        ValueError: unless ``r_c >= 0 >= r_w``, which the theorem's signs need.
    """
    if not r_c >= 0 >= r_w:
        raise ValueError(f"the theorem needs r_c >= 0 >= r_w, got r_c = {r_c}, r_w = {r_w}")
    return jnp.where(jnp.asarray(correct, bool), r_c, r_w)


def signal(
    counts: Int[ArrayLike, "*batch V"], rewards: Float[ArrayLike, "*batch V"], reading: str = "distinct"
) -> Float[Array, "*batch V"]:
    """Signal per token from ``counts`` (draws of each token) and ``rewards`` (of each token, minus a baseline if any).

    ``"distinct"``: the reward where sampled, else 0 [P]. ``"multiplicity"``: draws times reward. What ``rewards``
    holds where nothing was sampled, NaN included, changes nothing.
    """
    if reading not in READINGS:
        raise ValueError(f"unknown reading {reading!r} of the sample; known: {', '.join(READINGS)}")
    counts, rewards = jnp.asarray(counts), jnp.asarray(rewards)
    weighted = rewards * counts.astype(rewards.dtype) if reading == "multiplicity" else rewards
    return jnp.where(counts > 0, weighted, jnp.zeros_like(rewards))


def logit_update(
    probs: Float[ArrayLike, "*batch V"], signal: Float[ArrayLike, "*batch V"], n: Num[ArrayLike, "*batch"], eta: float
) -> Float[Array, "*batch V"]:
    """One gradient-ascent step on J: ``dz_j = (eta/N) p_j (s_j - S)``; on unsampled tokens ``-(eta/N) p_j S``."""
    probs, signal = jnp.asarray(probs), jnp.asarray(signal)
    mood = jnp.vecdot(signal, probs, precision="highest")[..., None]  # CPUs add a product faster than a sum
    return eta / jnp.asarray(n)[..., None] * probs * (signal - mood)


def first_order(probs: Float[ArrayLike, "*batch V"], dz: Float[ArrayLike, "*batch V"]) -> Float[Array, "*batch V"]:
    """Change of the probabilities to first order: ``dp_i = p_i (dz_i - sum_j p_j dz_j)``."""
    probs, dz = jnp.asarray(probs), jnp.asarray(dz)
    return probs * (dz - jnp.sum(probs * dz, axis=-1, keepdims=True))


def balance(
    probs: Float[ArrayLike, "*batch V"],
    correct: Bool[ArrayLike, "*batch V"],
    counts: Int[ArrayLike, "*batch V"],
    rewards: Float[ArrayLike, "*batch V"],
    reading: str = "distinct",
    n: Num[ArrayLike, "*batch"] | None = None,
) -> Balance:
    """Every quantity of the theorem for one sample.

    Args:
        probs: The policy, rows summing to 1.
        correct: Which tokens are correct.
        counts: How often each was drawn. For a sampled *set*, pass 0/1 and ``n``.
        rewards: Reward of each token, read where sampled only; ``two_level`` makes the paper's.
        reading: ``"distinct"`` or ``"multiplicity"``, see ``signal``.
        n: Draws; by default the sum of ``counts``.
    """
    probs, correct, counts = jnp.asarray(probs), jnp.asarray(correct, bool), jnp.asarray(counts)
    s = signal(counts, jnp.asarray(rewards, probs.dtype), reading)
    sampled = counts > 0

    def total(x: Array, where: Array) -> Array:
        return jnp.sum(jnp.where(where, x, 0), axis=-1)  # not sum's own where: it takes the axes of x alone

    a, b, square = sampled & correct, sampled & ~correct, probs**2
    return Balance(
        n=jnp.asarray(counts.sum(axis=-1) if n is None else n),
        q_pos=total(probs, correct),
        q_neg=total(probs, ~correct),  # not 1 - q_pos: exact where it is small
        p_pos=total(probs, a),
        p_neg=total(probs, b),
        a2=total(square, a),
        b2=total(square, b),
        u_pos2=total(square, ~sampled & correct),
        u_neg2=total(square, ~sampled & ~correct),
        sa2=total(s * square, a),
        sb2=total(s * square, b),
        s_r=jnp.sum(s * probs, axis=-1),
    )


def terms(b: Balance) -> Terms:
    """The three terms of Theorem 1 (for two reward levels, as printed; see the module for real-valued ones)."""
    return Terms(
        sampled_correct=b.q_neg * (b.sa2 - b.s_r * b.a2),
        sampled_incorrect=b.q_pos * (b.s_r * b.b2 - b.sb2),
        unsampled=b.s_r * (b.q_pos * b.u_neg2 - b.q_neg * b.u_pos2),
    )


def delta_q_pos(b: Balance, eta: float) -> Float[Array, "*batch"]:
    """Theorem 1: first-order change of the correct mass, ``(eta/N) * terms(b).total``."""
    return eta / b.n * terms(b).total


def delta_unsampled_correct(b: Balance, eta: float) -> Float[Array, "*batch"]:
    """First-order change of the mass of correct tokens nobody sampled [FG Prop. 3.2].

    ``(eta/N) {-S U_pos2 - Q_upos [sum_A p^2 (s - S) + sum_B p^2 (s - S) - S U_2]}`` with ``Q_upos = Q_pos - P_pos``.
    It can be negative while ``delta_q_pos`` is positive: a growing correct pool that forgets its rare members.
    """
    drift = b.sa2 - b.s_r * b.a2 + b.sb2 - b.s_r * b.b2 - b.s_r * (b.u_pos2 + b.u_neg2)
    return eta / b.n * (-b.s_r * b.u_pos2 - (b.q_pos - b.p_pos) * drift)


def delta_expectation(
    probs: Float[ArrayLike, "*batch V"],
    values: Float[ArrayLike, "*batch V"],
    signal: Float[ArrayLike, "*batch V"],
    n: Num[ArrayLike, "*batch"],
    eta: float,
) -> Float[Array, "*batch"]:
    """First-order change of ``E_p[values]``: ``(eta/N) sum_j p_j^2 (f_j - F)(s_j - S)``.

    The general law behind the theorem: with ``values`` 1 on correct tokens it is ``delta_q_pos``; with the expected
    reward below each token of a rollout trie, the change of a node's value.
    """
    probs, values, signal = jnp.asarray(probs), jnp.asarray(values), jnp.asarray(signal)
    centred = values - jnp.sum(probs * values, axis=-1, keepdims=True)
    mood = jnp.sum(probs * signal, axis=-1, keepdims=True)
    return eta / jnp.asarray(n) * jnp.sum(probs**2 * centred * (signal - mood), axis=-1)


def unsampled_second_moment(
    probs: Float[ArrayLike, "*batch V"], n: Num[ArrayLike, "*batch"], where: Bool[ArrayLike, "*batch V"] | None = None
) -> Float[Array, "*batch"]:
    """``E[U_2] = sum_i p_i^2 (1 - p_i)^N`` [P Lemma 2, Cor. 3], over the tokens of ``where`` (all by default).

    It falls with N, but a token only leaves once N is about ``1/p`` or more.
    """
    probs = jnp.asarray(probs)
    n = jnp.asarray(n, probs.dtype)[..., None]
    # exp(N log1p(-p)): 1 - p loses a small p, and a power of N = 50,000 multiplies the loss.
    never = jnp.where(n > 0, jnp.exp(n * jnp.log1p(-probs)), 1.0)
    return jnp.sum(jnp.where(True if where is None else jnp.asarray(where, bool), probs**2 * never, 0), axis=-1)


def unsampled_second_moment_bound(n: Num[ArrayLike, "*batch"]) -> Float[Array, "*batch"]:
    """No policy has a larger ``E[U_2]``: ``(1/(N+1)) (N/(N+1))^N``, itself below ``1/(e N)``.

    ``sum_i p_i [p_i (1-p_i)^N]`` is an average, so at most ``max_p p (1-p)^N``, which is reached at ``p = 1/(N+1)``.
    """
    n = jnp.asarray(n, jnp.result_type(float))
    return jnp.exp(-n * jnp.log1p(1 / jnp.maximum(n, 1))) / (n + 1)
