"""Exact figures of an autoregressive policy that has few enough responses to score every one of them.

Responses are the ``V ** L`` sequences of exactly L tokens out of V, in the order of their digits: number
``((t_1 V + t_2) V + ...) + t_L``. Their probabilities add up to 1, so what a training run can only sample (correct
mass, pass@k, what each response lost) is a sum here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.models.config import ModelConfig
from brorl_jax.models.transformer import forward_rows, unembed


def all_sequences(vocab: int, length: int) -> Int[np.ndarray, "V^L L"]:
    """Every response, in order."""
    return np.stack(np.unravel_index(np.arange(vocab**length), (vocab,) * length), axis=1).astype(np.int32)


def sequence_logps(
    params: Any, cfg: ModelConfig, prompts: Int[Array, "G P"], *, vocab: int, length: int
) -> Float[Array, "G V^L"]:
    """Log-probability of every response to every prompt, at temperature 1 and among the first ``vocab`` ids only.

    One row per prefix of L - 1 tokens: the distributions along it hold the probabilities of all that begins with it.
    """
    groups, width = prompts.shape
    prefixes = jnp.asarray(all_sequences(vocab, length - 1) if length > 1 else np.zeros((1, 0), np.int32))
    rows = len(prefixes)
    inputs = jnp.concatenate(
        [
            jnp.broadcast_to(prompts[:, -1:, None], (groups, rows, 1)),
            jnp.broadcast_to(prefixes[None], (groups, rows, length - 1)),
        ],
        axis=-1,
    )
    earlier = prompts[:, :-1] if width > 1 else jnp.zeros((groups, 1), jnp.int32)
    hidden = forward_rows(
        params,
        cfg,
        earlier,
        jnp.full(groups, width - 1),
        inputs,
        jnp.ones_like(inputs),
        jnp.broadcast_to(width - 1 + jnp.arange(length), inputs.shape),
    )
    logp = jax.nn.log_softmax((hidden @ unembed(params))[..., :vocab].astype(jnp.float32))
    before = jnp.take_along_axis(logp[:, :, :-1], jnp.broadcast_to(prefixes, (groups, *prefixes.shape))[..., None], -1)
    return (before.sum((-2, -1))[..., None] + logp[:, :, -1]).reshape(groups, -1)


def children(
    probs: Float[np.ndarray, " S"], correct: Bool[np.ndarray, " S"], vocab: int, prefix: Sequence[int] = ()
) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, " V"]]:
    """Of every token after ``prefix``: its probability, and how likely a response that goes on with it is correct.

    Args:
        probs, correct: Of all responses to one prompt.
    """
    first = 0
    for token in prefix:
        first = first * vocab + token
    size = len(probs) // vocab ** len(prefix)
    table, right = (x[first * size : (first + 1) * size].reshape(vocab, -1) for x in (probs, correct))
    mass = table.sum(axis=1)
    return mass / mass.sum(), np.sum(table, axis=1, where=right) / mass


def figures(
    start: Float[np.ndarray, "G S"], now: Float[np.ndarray, "G S"], correct: Bool[np.ndarray, "G S"], ks: Sequence[int]
) -> dict[str, float]:
    """What a policy has become, averaged over prompts (``worst_drop``: over all of them), from all its responses.

    ``q_pos`` the correct mass; ``pass@k`` = 1 - (1 - Q_pos)^k [P]; ``improved`` the share of correct responses that are
    likelier than at the start; ``worst_drop`` the most negative change of a correct response's probability [P];
    ``retained`` = 1 - sum of the correct responses' losses / their mass at the start [FG]; ``entropy`` in nats.

    Args:
        start, now: Probabilities of all responses at the start and now.
    """
    mass = np.sum(now, axis=1, where=correct)
    change = now - start
    lost = np.sum(np.maximum(-change, 0.0), axis=1, where=correct) / np.sum(start, axis=1, where=correct)
    logp = np.log(now, where=now > 0, out=np.zeros_like(now))
    return {
        "q_pos": float(mass.mean()),
        **{f"pass@{k}": float(np.mean(1.0 - (1.0 - mass) ** k)) for k in ks},
        "improved": float(np.mean((change > 0)[correct])),
        "worst_drop": float(change[correct].min()),
        "retained": float(np.mean(1.0 - lost)),
        "entropy": float(np.mean(-np.sum(now * logp, axis=1))),
    }
