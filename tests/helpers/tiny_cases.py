"""A tiny model, groups of samples for it, and what makes a packed batch of them look like one from a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner import kl, losses, mismatch, reduce
from brorl_jax.learner.step import Compute, Objective, make_gradient, make_score
from brorl_jax.models import transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.types import Batch, Finish, Group, Prompt, Sample, Status

VOCAB = 53  # equal to no other size
SHAPE = {"vocab_size": VOCAB, "hidden": 16, "layers": 2, "heads": 4, "head_dim": 6, "ffn": 24, "rope_theta": 50.0}
QWEN2 = ModelConfig("qwen2", kv_heads=2, **SHAPE)
QWEN3 = ModelConfig("qwen3", kv_heads=4, tied=False, **SHAPE)
LLAMA = ModelConfig("llama", kv_heads=1, **SHAPE)

BOUNDS = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 0.0, "low": 0.9, "high": 1.1}
KL_COEF, MAX_TOKENS = 0.1, 8
COMPUTE = Compute(head_chunk=8)


@functools.cache
def weights(cfg: ModelConfig = QWEN2, seed: int = 0) -> Any:
    """Weights with every entry random, of a size that makes attention, norms and biases matter."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(0.3 * rng.standard_normal(shape) + path[-1].key.endswith("norm"), jnp.float32)

    shapes = transformer.shapes(cfg)
    return jax.tree_util.tree_map_with_path(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def prompt(name: str, tokens: Sequence[int]) -> Prompt:
    """A prompt of these tokens and nothing else."""
    return Prompt(id=name, tokens=np.asarray(tokens, np.int32), text="", gold="", verifier="", source="test")


def sample(
    tokens: Sequence[int], *, index: int = 0, status: Status = Status.OK, advantage: float = 1.0, reward: float = 1.0
) -> Sample:
    """A graded sample whose engine found every token to have log-probability -1."""
    return Sample(
        index=index,
        seed=index,
        tokens=np.asarray(tokens, np.int32),
        logp=np.full(len(tokens), -1.0, np.float32),
        finish={Status.TRUNCATED: Finish.LENGTH, Status.ABORTED: Finish.ABORT}.get(status, Finish.STOP),
        weight_version=0,
        status=status,
        reward=reward if status.scored else float("nan"),
        advantage=advantage,
    )


def random_groups(
    sizes: Sequence[int], *, seed: int = 0, prompt_tokens: tuple[int, int] = (1, 9), response: tuple[int, int] = (1, 8)
) -> list[Group]:
    """Groups of ``sizes`` samples; prompts and responses have lengths within the bounds, the upper one included."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(low, high + 1))

    return [
        Group(
            prompt(f"test/{g}", tokens(*prompt_tokens)),
            [sample(tokens(*response), index=i, advantage=float(rng.standard_normal())) for i in range(size)],
        )
        for g, size in enumerate(sizes)
    ]


def engine_logps(groups: Sequence[Group], cfg: ModelConfig = QWEN2, noise: float = 0.15) -> Sequence[Group]:
    """Fills ``logp`` with the model's own log-probabilities, off by some noise."""
    rows = whole_sequences(groups)
    logp = np.asarray(plain_logp(weights(cfg), cfg, rows))
    rng = np.random.default_rng(1)
    for (_, s), values, mask in zip(_scored(groups), logp, rows["mask"], strict=True):
        s.logp = (values[mask] + noise * rng.standard_normal(len(s.tokens))).astype(np.float32)
    return groups


def _scored(groups: Sequence[Group]) -> list[tuple[Prompt, Sample]]:
    return [(group.prompt, s) for group in groups for s in group.scored]


def other_logps(rollout_logp: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Some ``old_logp`` and ``ref_logp``: a function of the token alone, however it is packed."""
    wave = np.sin(1.7 * tokens + 0.9 * positions)
    other = np.cos(0.8 * tokens - 1.3 * positions)
    return {
        "old_logp": (rollout_logp + 0.25 * wave).astype(np.float32),
        "ref_logp": (rollout_logp + 0.4 * other).astype(np.float32),
    }


def packed(groups: Sequence[Group], layout: Layout, **how: Any) -> Batch:
    """``pack`` with ``old_logp`` and ``ref_logp`` filled in."""
    batch = pack(groups, layout, **how)
    filled = other_logps(batch.rollout_logp, batch.tokens, batch.positions)
    return batch._replace(**{k: np.where(batch.mask, v, np.float32(0)) for k, v in filled.items()})


def whole_sequences(groups: Sequence[Group], width: int = 24) -> dict[str, np.ndarray]:
    """Every scored sample as one row ``[B, width]``: prompt repeated, response, padding; no package code involved.

    ``tokens[b, t]`` is predicted from ``inputs[b, :t + 1]``; ``mask`` marks the places that predict the response.
    """
    pairs = _scored(groups)
    out = {k: np.zeros((len(pairs), width), np.int32) for k in ("inputs", "tokens", "valid")}
    out |= {k: np.zeros((len(pairs), width), np.float32) for k in ("advantages", "rollout_logp")}
    out["mask"] = np.zeros((len(pairs), width), bool)
    for b, (start, s) in enumerate(pairs):
        whole = np.concatenate([start.tokens, s.tokens])
        response = slice(len(start.tokens) - 1, len(whole) - 1)
        out["inputs"][b, : len(whole)] = whole
        out["valid"][b, : len(whole)] = 1
        out["tokens"][b, : len(whole) - 1] = whole[1:]
        out["mask"][b, response] = True
        out["advantages"][b, response] = s.advantage
        out["rollout_logp"][b, response] = s.logp
    out["positions"] = np.broadcast_to(np.arange(width, dtype=np.int32), out["inputs"].shape)
    return out | other_logps(out["rollout_logp"], out["tokens"], out["positions"])


@functools.partial(jax.jit, static_argnames="cfg")
def plain_logp(params: Any, cfg: ModelConfig, rows: dict[str, Any], temperature: float = 1.0) -> jax.Array:
    """Log-probabilities ``[B, width]`` by the plain forward pass and a log-softmax over everything at once."""
    hidden = transformer.forward(params, cfg, rows["inputs"], rows["valid"], rows["positions"])
    logits = hidden @ transformer.unembed(params) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits), rows["tokens"][..., None], axis=-1)[..., 0]


def objective(
    loss: str = "ppo_clip",
    aggregation: str = "token",
    correction: str = "tis",
    divergence: str | None = "k2",
    *,
    on_policy: bool = False,
) -> Objective:
    """An objective by names, with bounds that bite."""
    return Objective(
        policy=losses.bind(loss, BOUNDS),
        weights=reduce.get(aggregation),
        mismatch=mismatch.bind(correction, BOUNDS),
        kl=None if divergence is None else functools.partial(kl.get_loss(divergence), clamp=10.0, clamp_output=0.0),
        kl_coef=KL_COEF,
        max_tokens=MAX_TOKENS,
        on_policy=on_policy,
    )


def gradient(cfg: ModelConfig = QWEN2, compute: Compute = COMPUTE, **names: Any) -> Callable[[Any, Batch], Any]:
    """The compiled ``make_gradient`` of ``objective(**names)``; the same one for the same arguments."""
    return _gradient(cfg, compute, tuple(sorted(names.items())))


@functools.cache
def _gradient(cfg: ModelConfig, compute: Compute, names: tuple[tuple[str, Any], ...]) -> Callable[[Any, Batch], Any]:
    return jax.jit(make_gradient(cfg, objective(**dict(names)), compute))


def score(cfg: ModelConfig = QWEN2, compute: Compute = COMPUTE) -> Callable[[Any, Batch], Any]:
    """The compiled ``make_score``; the same one for the same arguments."""
    return _score(cfg, compute)


@functools.cache
def _score(cfg: ModelConfig, compute: Compute) -> Callable[[Any, Batch], Any]:
    return make_score(cfg, compute)


def assert_same(ours: Any, theirs: Any, relative: float = 1e-5) -> None:
    """Every leaf differs from its counterpart by at most ``relative`` of that one's norm, and is not trivially zero."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        size = np.linalg.norm(b)
        assert size > 0, jax.tree_util.keystr(path)
        error = np.linalg.norm(a - b) / size
        assert error <= relative, f"{jax.tree_util.keystr(path)}: {error:.2e} of its norm"


def assert_identical(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path), strict=True)
