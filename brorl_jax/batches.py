"""From a step's groups to scored mini-batches on the mesh, and the metrics of their updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner import mismatch
from brorl_jax.learner.advantages import clip_advantages
from brorl_jax.learner.state import TrainState
from brorl_jax.models import sharding
from brorl_jax.types import Batch, Finish, Group, Sample


def set_advantages(
    groups: Sequence[Group], step: int, *, estimate: Callable[..., Any], shape: Callable[..., Any], clip: float
) -> None:
    """Fills ``shaped_reward`` and ``advantage`` of every sample, from all groups of the step together.

    Args:
        estimate: ``(rewards, valid, lengths) -> advantages``, all ``[G, N]``.
        shape: ``(rewards, lengths, truncated, update=step) -> shaped rewards``.
        clip: Largest absolute advantage; 0 is no limit.
    """
    if not groups:
        return
    samples = [g.samples for g in groups]
    widest = max(len(row) for row in samples)  # carried groups may be of another N after a change of config

    def table(value: Callable[[Sample], Any], dtype: Any) -> np.ndarray:
        return np.array([[value(s) for s in row] + [0] * (widest - len(row)) for row in samples], dtype)

    valid = table(lambda s: s.status is not None and s.status.scored, bool)
    lengths = table(lambda s: len(s.tokens), np.int32)
    truncated = table(lambda s: s.finish is Finish.LENGTH, bool)
    shaped = shape(table(lambda s: s.reward, np.float32), lengths, truncated, update=step)
    values = np.asarray(clip_advantages(estimate(shaped, valid, lengths), clip))
    shaped = np.asarray(shaped)
    for row, rewards, advantages in zip(samples, shaped, values, strict=True):
        for sample, reward, advantage in zip(row, rewards, advantages, strict=False):
            sample.shaped_reward, sample.advantage = float(reward), float(advantage)


def check_first_update(update: dict[str, Any], dtype: Any) -> None:
    """The first update of a run compares the policy with itself: ratio 1, and KL 0 to a reference just copied.

    Args:
        update: Its metrics.
        dtype: Of the computation. Scoring and updating are two programs that may round differently, in bfloat16 by
            some hundredths of a nat per token.

    Raises:
        RuntimeError: They disagree by more than that, and every later figure would be wrong.
    """
    if not update["batch/tokens"]:
        return
    ratio, kl = float(update["policy/ratio_mean"]), float(update.get("policy/kl_ref", 0.0))
    ratio_bound, kl_bound = (1e-3, 1e-6) if dtype == jnp.float32 else (3e-2, 1e-3)
    if not (abs(ratio - 1.0) <= ratio_bound and abs(kl) <= kl_bound):  # NaN fails, too
        raise RuntimeError(
            f"the first update should see ratio 1 and KL 0 but saw a mean ratio of {ratio:.6f} and a KL of {kl:.3g}: "
            "two passes over the same tokens with the same weights disagree (dtype, masks or positions)"
        )


def pack_updates(
    groups: Sequence[Group], layout: Layout, updates: int, mesh: Mesh, *, version: int | None = None
) -> list[Batch]:
    """Deals ``groups`` to ``updates`` mini-batches, whole and in order, and puts them on the mesh in one shape.

    Fewer groups than updates (a starved step) give as many mini-batches as there are groups; none give none.
    ``version`` is that of the present weights, see ``pack``.
    """
    count = min(updates, len(groups))
    dealt = [groups[i * len(groups) // count : (i + 1) * len(groups) // count] for i in range(count)]
    packed = [pack(part, layout, version=version) for part in dealt]
    width = max((b.prefix.shape[-1] for b in packed), default=0)
    micro = max((b.tokens.shape[0] for b in packed), default=0)
    if any(b.prefix.shape[-1] != width or b.tokens.shape[0] != micro for b in packed):
        packed = [pack(part, layout, prefix=width, n_micro=micro, version=version) for part in dealt]
    return [sharding.put_batch(mesh, batch) for batch in packed]


def add_scores(packed: Sequence[Batch], score: Callable[..., Any], state: TrainState, *, old: bool) -> list[Batch]:
    """Fills ``old_logp`` (if ``old``) from the present policy and ``ref_logp`` from the reference, if there is one."""
    if old:
        packed = [batch._replace(old_logp=score(state.params, batch)) for batch in packed]
    if state.reference is not None:
        # Beside the policy for as long as it scores, wherever it waits.
        reference = jax.device_put(state.reference, jax.tree.map(lambda x: x.sharding, state.params))
        packed = [batch._replace(ref_logp=score(reference, batch)) for batch in packed]
    return list(packed)


def metrics(groups: Sequence[Group], updates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one step's updates: sums where updates add up, the largest where they are maxima, otherwise the mean."""
    shaped = [s.shaped_reward for g in groups for s in g.scored]
    out = {"reward/shaped": float(np.mean(shaped))} if shaped else {}
    for key in updates[0] if updates else ():
        values = [float(update[key]) for update in updates]
        if key.startswith("batch/") or key == "optim/skipped":
            out[key] = sum(values)
        else:
            out[key] = max(values) if key.endswith("_max") else sum(values) / len(values)
    return out


def mismatch_metrics(batches: Sequence[Batch], old_logps: Sequence[Any]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's, over the step's trained tokens.

    Groups carried over were sampled with older weights: what differs there is the policy, so they are left out.
    """
    if not batches:
        return {}
    # Fetched first: outside of a compiled program, every operation on shards makes all devices talk.
    fetched = sharding.fetch(
        [(old, b.rollout_logp, b.mask, b.fresh) for b, old in zip(batches, old_logps, strict=True)]
    )
    old, rollout = (np.concatenate([np.ravel(arrays[i]) for arrays in fetched]) for i in (0, 1))
    masks = [mask if fresh is None else mask & fresh[..., None, None] for _, _, mask, fresh in fetched]
    mask = np.concatenate([np.ravel(m) for m in masks])
    return {f"mismatch/{k}": float(v) for k, v in jax.device_get(mismatch.diagnostics(old, rollout, mask)).items()}


def worst_samples(
    groups: Sequence[Group], batches: Sequence[Batch], old_logps: Sequence[Any], most: int = 20
) -> list[dict[str, Any]]:
    """The samples on which trainer and engine disagree most by the mean over their tokens, worst first, JSON-able.

    Each with its prompt, seed and weight version, and its tokens with both log-probabilities. Groups carried over are
    left out, as in ``mismatch_metrics``.
    """
    names: dict[tuple[bytes, bytes], list[tuple[str, Sample]]] = {}
    for group in groups:
        for sample in group.scored:
            names.setdefault((sample.tokens.tobytes(), sample.logp.tobytes()), []).append((group.prompt.id, sample))
    found = []
    for batch, old in zip(batches, old_logps, strict=True):
        b, old = sharding.fetch((batch, old))
        for at in (at for at in np.ndindex(b.mask.shape[:2]) if b.fresh is None or b.fresh[at]):
            for segment in np.unique(b.segment_ids[at][b.mask[at]]):
                place = b.segment_ids[at] == segment
                tokens, engine, trainer = b.tokens[at][place], b.rollout_logp[at][place], old[at][place]
                gap = np.abs(trainer - engine)
                prompt, sample = names[tokens.tobytes(), engine.tobytes()].pop()
                row = {"prompt_id": prompt, "sample": sample.index, "seed": sample.seed}
                row |= {"finish": str(sample.finish), "weight_version": sample.weight_version}
                row |= {"mean": float(gap.mean()), "max": float(gap.max()), "max_at": int(gap.argmax())}
                row |= {"tokens": tokens.tolist(), "engine_logp": engine.tolist(), "trainer_logp": trainer.tolist()}
                found.append(row)
    return sorted(found, key=lambda row: (row["mean"] == row["mean"], -row["mean"]))[:most]  # NaN first
