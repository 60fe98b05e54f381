"""The compiled programs of the learner: one update, and log-probabilities of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int

from brorl_jax.learner import offload
from brorl_jax.learner.head import distributions, logp_and_entropy
from brorl_jax.learner.optim import apply_or_skip
from brorl_jax.learner.reduce import counts, masked_sum
from brorl_jax.learner.state import TrainState
from brorl_jax.models.config import ModelConfig
from brorl_jax.models.placement import Placement
from brorl_jax.models.transformer import forward_rows, unembed
from brorl_jax.types import Batch

Metrics = dict[str, Float[Array, ""]]
PER_MICRO = ("prefix", "prefix_len", "inputs", "tokens", "segment_ids", "positions", "mask")
PER_TOKEN = ("advantages", "rollout_logp", "old_logp", "ref_logp")


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the model is run; changes memory and speed, not the result.

    Attributes:
        dtype: Of activations and matrix products.
        remat: What the backward pass recomputes, see ``models.transformer.REMAT``.
        head_chunk: Tokens at a time in the language-model head, on each device.
        real_vocab: Ids from here on are padding of the embedding; None: there are none.
        temperature: Of the rollouts; divides the logits.
        sharding: Of activations on a mesh, see ``models.transformer.forward_rows``; None: the compiler's choice.
        attention: Form of attention, see ``models.attention.ATTENTION``.
        attention_block: Queries and keys at a time in blockwise attention.
    """

    dtype: Any = jnp.float32
    remat: str = "none"
    head_chunk: int = 1024
    real_vocab: int | None = None
    temperature: float = 1.0
    sharding: jax.sharding.NamedSharding | None = None
    attention: str = "xla"
    attention_block: int = 512


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an update minimises: functions already bound to their hyper-parameters.

    ``sum_t weights_t * (mismatch_t * policy_t + kl_coef * kl_t)`` over all trained tokens of the mini-batch, with
    ``weights`` from global counts.

    Attributes:
        policy: ``(logp, old_logp, advantages, mask, segment_ids) -> (loss, aux)``, see ``losses``.
        weights: ``(mask, segment_ids, *, tokens, sequences, max_tokens) -> weights``, see ``reduce``.
        mismatch: ``(old_logp, rollout_logp, mask, segment_ids) -> weights``, see ``mismatch``.
        kl: ``(logp, ref_logp, mask) -> values``, see ``kl``; None without a reference.
        kl_coef: Weight of the KL term.
        max_tokens: Longest response, for the ``constant`` aggregation.
        on_policy: The batch was sampled with the present weights, so ``old_logp`` is the log-probability itself: the
            ratio is exactly 1 and no separate pass is needed. Right for the only update of a step.
    """

    policy: Callable[..., Any]
    weights: Callable[..., Any]
    mismatch: Callable[..., Any]
    kl: Callable[..., Any] | None
    kl_coef: float
    max_tokens: int
    on_policy: bool


def _micro(batch: Batch, i: Array) -> Batch:
    """Micro-batch ``i``, without the leading axis."""
    fields = {name: getattr(batch, name)[i] for name in PER_MICRO + PER_TOKEN}
    return Batch(n_micro=batch.n_micro, **fields)


def _hidden(params: Any, cfg: ModelConfig, micro: Batch, compute: Compute) -> Float[Array, "S rows T D"]:
    return forward_rows(
        params, cfg, micro.prefix, micro.prefix_len, micro.inputs, micro.segment_ids, micro.positions,
        compute_dtype=compute.dtype, remat=compute.remat, attention=compute.attention,
        attention_block=compute.attention_block, sharding=compute.sharding,
    )  # fmt: skip


def _logp(params: Any, cfg: ModelConfig, micro: Batch, compute: Compute) -> tuple[Array, Array]:
    """Log-probability and entropy of every place of a micro-batch, flat."""
    where = Placement(compute.sharding)
    results = logp_and_entropy(
        where.in_line(_hidden(params, cfg, micro, compute)),
        unembed(params),
        where.in_line(micro.tokens),
        temperature=compute.temperature,
        real_vocab=compute.real_vocab,
        chunk=compute.head_chunk,
        over=where.line,
    )
    logp, entropy = (where.in_rows(x, *micro.tokens.shape).reshape(-1) for x in results)
    return logp, entropy


def make_score(cfg: ModelConfig, compute: Compute) -> Callable[[Any, Batch], Float[Array, "M S rows T"]]:
    """Compiles ``score(params, batch) -> logp``, 0 where nothing is trained. By the same path as the update."""

    @jax.jit
    def score(params: Any, batch: Batch) -> Array:
        def one(i: Array, out: Array) -> Array:
            micro = _micro(batch, i)
            logp, _ = _logp(params, cfg, micro, compute)
            return out.at[i].set(jnp.where(micro.mask, logp.reshape(micro.mask.shape), 0.0))

        return jax.lax.fori_loop(0, batch.n_micro, one, jnp.zeros(batch.mask.shape, jnp.float32))

    return score


def make_next_token(
    cfg: ModelConfig, compute: Compute
) -> Callable[[Any, Batch, Int[ArrayLike, "M S X"]], Float[Array, "M S X V"]]:
    """Compiles ``next_token(params, batch, places)``: the distribution that ``tokens`` were drawn from, at few places.

    ``places`` count along a slot's rows, ``row * T + t``. Every distribution is returned whole, so keep X small.
    """

    @jax.jit
    def next_token(params: Any, batch: Batch, places: Array) -> Array:
        def one(i: Array, out: Array) -> Array:
            hidden = _hidden(params, cfg, _micro(batch, i), compute)
            hidden = hidden.reshape(hidden.shape[0], -1, cfg.hidden)
            chosen = jnp.take_along_axis(hidden, places[i][..., None], axis=1).reshape(-1, cfg.hidden)
            p = distributions(chosen, unembed(params), temperature=compute.temperature, real_vocab=compute.real_vocab)
            return out.at[i].set(p.reshape(out.shape[1:]))

        return jax.lax.fori_loop(0, batch.n_micro, one, jnp.zeros((*places.shape, cfg.vocab_size), jnp.float32))

    return next_token


def _loss(
    params: Any, micro: Batch, totals: tuple[Array, Array], cfg: ModelConfig, objective: Objective, compute: Compute
) -> tuple[Array, tuple[Metrics, Metrics, Array]]:
    """A micro-batch's share of the loss; sums and maxima for metrics; its log-probabilities."""
    logp, entropy = _logp(params, cfg, micro, compute)
    mask, segments = micro.mask.reshape(-1), micro.segment_ids.reshape(-1)
    advantages, rollout_logp, old_logp, ref_logp = (getattr(micro, name).reshape(-1) for name in PER_TOKEN)
    with jax.named_scope("loss"):
        if objective.on_policy:
            old_logp = jax.lax.stop_gradient(logp)
        policy, aux = objective.policy(logp, old_logp, advantages, mask, segments)
        policy = policy * objective.mismatch(old_logp, rollout_logp, mask, segments)
        tokens, sequences = totals
        weights = objective.weights(mask, segments, tokens=tokens, sequences=sequences, max_tokens=objective.max_tokens)
        policy_loss = masked_sum(policy * weights, mask)
        sums = {"loss/policy": policy_loss}
        total = policy_loss
        if objective.kl is not None:
            kl = objective.kl(logp, ref_logp, mask)
            kl_loss = objective.kl_coef * masked_sum(kl * weights, mask)
            total = total + kl_loss
            sums |= {"loss/kl": kl_loss, "policy/kl_ref": masked_sum(kl, mask) / tokens}
        sums |= {
            "loss/total": total,
            "policy/entropy": masked_sum(entropy, mask) / tokens,
            "policy/ratio_mean": masked_sum(aux["ratio"], mask) / tokens,
            "policy/clip_low": masked_sum(aux["clipped_low"], mask) / tokens,
            "policy/clip_high": masked_sum(aux["clipped_high"], mask) / tokens,
        }
        maxima = {"policy/ratio_max": jnp.max(aux["ratio"], where=mask, initial=0.0)}
    return total, (sums, maxima, jnp.where(mask, logp, 0.0).reshape(micro.mask.shape))


def make_gradient(
    cfg: ModelConfig, objective: Objective, compute: Compute
) -> Callable[[Any, Batch], tuple[Any, Metrics, Float[Array, "M S rows T"]]]:
    """``gradient(params, batch) -> (gradients, metrics, logp)`` of one mini-batch, summed over its micro-batches.

    The sum runs in float32 and comes back in the weights' dtype.

    Denominators are counted over the whole mini-batch first, so how it is cut into micro-batches, packed, padded or
    sharded changes nothing but rounding.
    """

    def gradient(params: Any, batch: Batch) -> tuple[Any, Metrics, Array]:
        flat = batch.mask.shape[0], -1
        per_micro = jax.vmap(counts)(batch.mask.reshape(flat), batch.segment_ids.reshape(flat))
        totals = tuple(jnp.maximum(jnp.sum(x), 1.0) for x in per_micro)
        differentiate = jax.value_and_grad(_loss, has_aux=True)

        def one(i: Array, carry: Any) -> Any:
            grads, sums, maxima, logps = carry
            (_, (s, m, logp)), g = differentiate(params, _micro(batch, i), totals, cfg, objective, compute)
            add, top = (lambda a, b: jax.tree.map(jnp.add, a, b)), (lambda a, b: jax.tree.map(jnp.maximum, a, b))
            return add(grads, g), add(sums, s), top(maxima, m), logps.at[i].set(logp)

        names = ["loss/policy", "loss/total", "policy/entropy", "policy/ratio_mean", "policy/clip_low"]
        names += ["policy/clip_high"] + (["loss/kl", "policy/kl_ref"] if objective.kl is not None else [])
        start = (
            jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
            {name: jnp.float32(0) for name in names},
            {"policy/ratio_max": jnp.float32(0)},
            jnp.zeros(batch.mask.shape, jnp.float32),
        )
        grads, sums, maxima, logps = jax.lax.fori_loop(0, batch.n_micro, one, start)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        trained = {"batch/tokens": jnp.sum(per_micro[0]), "batch/sequences": jnp.sum(per_micro[1])}
        return grads, sums | maxima | trained, logps

    return gradient


def make_train_step(
    cfg: ModelConfig,
    objective: Objective,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    placed: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics, Float[Array, "M S rows T"]]]:
    """Compiles ``train_step(state, batch) -> (state, metrics, logp)``: one update from one mini-batch.

    ``state`` is donated: the caller must use the returned one. ``logp`` is the policy's log-probability of every
    trained token before the update. A gradient that is not finite changes nothing and is counted in
    ``state.skipped``. Padding micro-batches (beyond ``batch.n_micro``) are not executed.

    Args:
        placed: A state, or its shapes, with the shardings that every new state is to keep; needed on a mesh, where the
            compiler's own choice would move weights between updates, compile twice and give donated memory away.
            What of the optimiser's state lies in the host's memory is on the device for its update only.
    """
    gradient = make_gradient(cfg, objective, compute)
    where = None if placed is None else jax.tree.map(lambda x: x.sharding, placed)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Array]:
        grads, metrics, logp = gradient(state.params, batch)
        with jax.named_scope("optimizer"):
            opt_state = state.opt_state
            if where is not None and offload.any_on_host(where.opt_state):
                opt_state = jax.device_put(opt_state, offload.on_device(where.opt_state))
            params, opt_state, norm, skipped = apply_or_skip(optimizer, grads, opt_state, state.params)
        state = state._replace(
            params=params,
            opt_state=opt_state,
            updates=state.updates + 1,
            skipped=state.skipped + skipped.astype(jnp.int32),
        )
        return state, metrics | {"optim/grad_norm": norm, "optim/skipped": skipped.astype(jnp.float32)}, logp

    return jax.jit(train_step, donate_argnums=0, out_shardings=(where, None, None))
