"""From a validated config to the parts of a run: tokenizer, model, programs, engine, data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from brorl_jax import batches, diagnostics, processes, rewards
from brorl_jax import config as config_lib
from brorl_jax.collect import Rules
from brorl_jax.config import Config
from brorl_jax.data import stream
from brorl_jax.data.packing import Layout
from brorl_jax.data.tokenizer import Tokenizer, train_tokenizer
from brorl_jax.errors import UserError
from brorl_jax.learner import advantages, kl, losses, mismatch, offload, optim, reduce, shaping
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.state import TrainState
from brorl_jax.learner.step import Compute, Objective, make_next_token
from brorl_jax.models import hf, sharding, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rewards import sandbox
from brorl_jax.rewards.service import Grader
from brorl_jax.rollout.api import Engine, Sampling
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Group, Prompt

TOKENIZER_TEXTS = 2000  # records of each source that a new tokenizer is trained on
VOCAB_MULTIPLE = 64  # a new model's embedding is padded to it, for the sake of matrix products


@dataclasses.dataclass(frozen=True)
class Network:
    """What is trained, on token ids.

    Attributes:
        cfg: Its shape.
        weights: Loads or makes the initial weights, on the mesh.
        shapes: Their shapes and dtypes.
        compute: How it is run.
        mesh: Where.
    """

    cfg: ModelConfig
    weights: Callable[[], Any]
    shapes: Any
    compute: Compute
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Model(Network):
    """The network and its tokenizer."""

    tokenizer: Tokenizer


def build_model(config: Config, workdir: Path) -> Model:
    """The model at ``model.path``, or a new one of the shape ``model.new`` with a tokenizer trained on the data.

    A new tokenizer is written to ``<workdir>/tokenizer`` and found there by a run that has a checkpoint.

    Raises:
        UserError: The model, its tokenizer or the devices are missing; the message says how to get them.
    """
    if config.model.attention == "cudnn" and (backend := jax.default_backend()) != "gpu":
        raise UserError(f"config.model.attention = 'cudnn': needs a GPU, jax has a {backend}; use 'blockwise'")
    try:
        mesh = sharding.make_mesh(**config.mesh)
    except ValueError as error:
        raise UserError(str(error)) from error
    cfg, tokenizer = model_and_tokenizer(config, workdir)
    return Model(**vars(network(config, cfg, mesh, real_vocab=tokenizer.vocab_size)), tokenizer=tokenizer)


def network(config: Config, cfg: ModelConfig, mesh: Mesh, *, real_vocab: int | None = None) -> Network:
    """The network of a known shape; ``real_vocab`` is the number of its tokenizer's ids, by default all embedded."""
    dtype = jnp.dtype(config.model.param_dtype)
    where = sharding.weight_shardings(mesh, cfg)
    if config.model.path:
        load = functools.partial(hf.from_pretrained, config.model.path, config.model.revision or None, dtype, where)

        def weights() -> Any:
            try:
                return load()[1]
            except (FileNotFoundError, ValueError) as error:
                raise UserError(f"model.path = {config.model.path}: {error}") from error

    else:
        key = jax.random.key(config.seed)
        weights = jax.jit(functools.partial(transformer.init, key, cfg, dtype), out_shardings=where)
    compute = Compute(
        dtype=jnp.dtype(config.model.compute_dtype),
        remat=config.model.remat,
        head_chunk=config.model.head_chunk,
        real_vocab=real_vocab if real_vocab and real_vocab < cfg.vocab_size else None,
        temperature=config.rollout.temperature,
        sharding=sharding.slot_sharding(mesh),
        attention=config.model.attention,
        attention_block=config.model.attention_block,
    )
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        transformer.shapes(cfg),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return Network(cfg, weights, shapes, compute, mesh)


def model_and_tokenizer(config: Config, workdir: Path) -> tuple[ModelConfig, Tokenizer]:
    """The model's shape and its tokenizer, without its weights.

    Raises:
        UserError: One of them is missing, or they do not fit each other.
    """
    try:
        tokenizer = _tokenizer(config, workdir)
        cfg = hf.load_config(config.model.path, config.model.revision or None) if config.model.path else None
    except (FileNotFoundError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error
    cfg = cfg or new_model(config, tokenizer.vocab_size)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids but the model embeds only {cfg.vocab_size}")
    return cfg, tokenizer


def has_checkpoint(workdir: Path) -> bool:
    """Whether the run in ``workdir`` has saved one; its tokenizer then belongs to it."""
    return any(entry.name.isdigit() for entry in (workdir / "checkpoints").glob("*"))


def _tokenizer(config: Config, workdir: Path) -> Tokenizer:
    extra = tuple(config.rollout.stop_ids)
    if config.model.path:
        return Tokenizer(config.model.path, revision=config.model.revision, extra_stop_ids=extra)
    directory = workdir / "tokenizer"
    # Without a checkpoint it may be of a run that was killed, whose config has been changed since.
    if processes.is_writer() and not (has_checkpoint(workdir) and (directory / "tokenizer.json").exists()):
        texts = stream.sample_texts({**config.data.train, **config.data.warmup}, TOKENIZER_TEXTS)
        train_tokenizer(texts, config.model.new.vocab_size, directory)
    return Tokenizer(directory, extra_stop_ids=extra)


def new_model(config: Config, vocab: int) -> ModelConfig:
    """The shape of ``model.new`` with a tokenizer of ``vocab`` ids."""
    new = {k: v for k, v in config.model.new.items() if k != "vocab_size"}
    return ModelConfig(
        **new,
        vocab_size=-(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        max_positions=config.data.max_prompt_tokens + config.rollout.max_tokens,
    )


def held_out_prompts(config: Config, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """The evaluation prompts of every source of ``data.eval``."""
    limits = {"max_prompts": config.eval.max_prompts, "max_prompt_tokens": config.data.max_prompt_tokens}
    return {
        name: stream.held_out(name, source, tokenizer, system_prompt=config.data.system_prompt, **limits)
        for name, source in config.data.eval.items()
    }


def prompt_stream(
    config: Config, sources: Mapping[str, Any], tokenizer: Tokenizer, held_out: Mapping[str, Sequence[Prompt]]
) -> stream.PromptStream:
    """Prompts of ``sources`` in the run's order, without the questions of ``held_out``."""
    return stream.PromptStream(
        sources,
        tokenizer,
        seed=config.seed,
        max_prompt_tokens=config.data.max_prompt_tokens,
        system_prompt=config.data.system_prompt,
        exclude=stream.exclusions(p for prompts in held_out.values() for p in prompts),
    )


def local_engine(config: Config, model: Model, **_: Any) -> Engine:
    """The embedded engine."""
    return LocalEngine(
        model.cfg,
        rows=config.rollout.local.rows,
        chunk=config.rollout.local.chunk,
        real_vocab=model.tokenizer.vocab_size,
        dtype=model.compute.dtype,
        copy=config.rollout.overlap,
    )


def _sglang_engine(config: Config, model: Model, **where: Any) -> Engine:
    from brorl_jax.rollout.sglang import build  # an HTTP client that other runs need not have

    return build.engine(config, model.cfg, model.tokenizer, **where)


ENGINES: dict[str, Callable[..., Engine]] = {"local": local_engine, "sglang": _sglang_engine}


def build_engine(
    config: Config, model: Model, *, workdir: Path, incarnation: int = 0, check: Callable[[], None] = lambda: None
) -> Engine:
    """The rollout engine named by ``rollout.engine``.

    Args:
        workdir: Of the run.
        incarnation: Steps done; another start of the same run has another one.
        check: Called while the engine waits; raises to stop early.
    """
    return ENGINES[config.rollout.engine](config, model, workdir=workdir, incarnation=incarnation, check=check)


def build_grader(config: Config) -> Grader:
    """The grading service of a run; its verifiers, the user's own included, are registered."""
    rewards.load_plugins(config.grading.plugins)
    sandbox.configure(config.grading.sandbox, config.grading.sandbox_packages)
    names = ("workers", "cache", "memory_gib", "deadline_factor")
    return Grader(**{name: config.grading[name] for name in names})


def training_sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    """How training rollouts are sampled: the full softmax at ``rollout.temperature``."""
    r = config.rollout
    return Sampling(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, tokenizer.stop_ids)


def eval_sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    """How held-out responses are sampled."""
    return Sampling(
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_tokens=config.rollout.max_tokens,
        stop_ids=tokenizer.stop_ids,
    )


def objective(config: Config) -> Objective:
    """What an RL update minimises."""
    algo = config.algo
    estimator = functools.partial(
        kl.get_loss(algo.kl.estimator), clamp=algo.kl.clamp, clamp_output=algo.kl.clamp_output
    )
    return Objective(
        policy=losses.bind(algo.loss, algo),
        weights=reduce.get(algo.aggregation),
        mismatch=mismatch.bind(algo.mismatch.kind, algo.mismatch),
        kl=estimator if algo.kl.coef > 0 else None,
        kl_coef=algo.kl.coef,
        max_tokens=config.rollout.max_tokens,
        on_policy=algo.updates_per_step == 1,
    )


def sft_objective(config: Config) -> Objective:
    """What a warm-up update minimises: the negative log-likelihood per token."""
    return Objective(
        policy=losses.get("sft"),
        weights=reduce.get("token"),
        mismatch=mismatch.get("none"),
        kl=None,
        kl_coef=0.0,
        max_tokens=config.rollout.max_tokens,
        on_policy=True,
    )


def optimizer(config: Config, lr: float, warmup_steps: int) -> optax.GradientTransformation:
    """AdamW with the moments, decay and clipping of ``optim``."""
    names = ("b1", "b2", "eps", "weight_decay", "clip_norm", "moment_dtype")
    return optim.make_optimizer(lr, warmup_steps=warmup_steps, **{name: config.optim[name] for name in names})


def state_maker(
    model: Network,
    optimizer: optax.GradientTransformation,
    *,
    reference: bool,
    offload_reference: bool = False,
    offload_optimizer: bool = False,
) -> tuple[Callable[[Any], TrainState], TrainState]:
    """Compiles the making of a fresh state from weights, born sharded; and its shapes, dtypes and places.

    The weights are donated.

    Args:
        offload_reference: Keep the reference in the host's memory; it visits the devices while it scores.
        offload_optimizer: Keep the moments in the host's memory; they visit the devices for each update.
    """

    def create(weights: Any) -> TrainState:
        return state_lib.create(weights, optimizer, reference=reference)

    shape = jax.eval_shape(create, model.shapes)
    where = sharding.like_weights(model.mesh, model.cfg, shape)
    where = offload.place(where, shape, reference=offload_reference and reference, optimizer=offload_optimizer)
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shape, where)
    return jax.jit(create, out_shardings=where, donate_argnums=0), placed


def training_state_maker(
    config: Config, model: Network, optimizer: optax.GradientTransformation
) -> tuple[Callable[[Any], TrainState], TrainState]:
    """``state_maker`` for the state that RL trains: with a reference where there is a KL term, placed as asked for."""
    return state_maker(
        model,
        optimizer,
        reference=config.algo.kl.coef > 0,
        offload_reference=config.model.offload_reference,
        offload_optimizer=config.optim.offload,
    )


def learning_rate(config: Config) -> float:
    """``optim.lr`` scaled to this run's samples per step."""
    return config_lib.derived(config)["learning_rate"]


def layout(config: Config) -> Layout:
    """Shape of an RL micro-batch."""
    return Layout(config.batch.slots, config.batch.rows, config.batch.row_tokens)


def micro_batches(config: Config, tokens: float) -> int:
    """Of one update, for responses of equal length: a row holds as many as fit, and no two groups share a slot.

    No packing of responses of at most ``tokens`` takes more.
    """
    shape, groups = layout(config), config_lib.derived(config)["prompts_per_update"]
    rows = math.ceil(config.rollout.n / max(1, math.floor(shape.row_tokens / tokens)))
    return max(1, math.ceil(groups * math.ceil(rows / shape.rows) / shape.slots))


def sft_layout(config: Config) -> Layout:
    """Shape of a warm-up micro-batch: one pair per slot, at most as many as an RL micro-batch has rows."""
    shards = config.mesh.data * config.mesh.fsdp
    slots = min(config.warmup.batch, config.batch.slots * config.batch.rows)
    context = config.mesh.context
    return Layout(-(-slots // shards) * shards, 1, -(-config.rollout.max_tokens // context) * context)


def collection_rules(config: Config) -> Rules:
    """What a step asks for and keeps."""
    return Rules(
        groups=config.rollout.prompts_per_step,
        dynamic=config.filter.dynamic,
        max_rounds=config.filter.max_generation_batches,
        min_valid=config.filter.min_valid,
        oversample=config.filter.oversample,
    )


def advantage_setter(config: Config) -> Callable[[list[Group], int], None]:
    """``set(groups, step)``: fills shaped rewards and advantages of a step's groups."""
    algo = config.algo
    estimate = functools.partial(advantages.get(algo.advantage), normalise=algo.normalise)
    shape = functools.partial(shaping.shape_rewards, max_tokens=config.rollout.max_tokens, **config.shaping)
    return functools.partial(batches.set_advantages, estimate=estimate, shape=shape, clip=algo.advantage_clip)


def mass_balance(config: Config, model: Model) -> Callable[..., dict[str, float]]:
    """``mass_balance(params, groups, version=...)``: the diagnostics of a step's rollouts, for ``metrics.jsonl``."""
    return functools.partial(
        diagnostics.mass_balance,
        next_token=make_next_token(model.cfg, model.compute),
        mesh=model.mesh,
        slots=config.batch.slots,
        vocab=model.tokenizer.vocab_size,
        bounds=diagnostics.Bounds(
            min_visits=config.diagnostics.min_visits,
            max_depth=config.diagnostics.max_depth,
            exact_nodes=config.diagnostics.exact_nodes,
        ),
    )
