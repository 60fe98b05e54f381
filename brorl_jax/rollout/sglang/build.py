"""From a validated config to the engine and to the servers it may start."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax import processes
from brorl_jax.config import Config
from brorl_jax.data.tokenizer import Tokenizer
from brorl_jax.models import transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.sglang import launch, weights
from brorl_jax.rollout.sglang.engine import Probe, Settings, SGLangEngine
from brorl_jax.rollout.sglang.launch import Spec
from brorl_jax.rollout.sglang.publish import PROBE_TOLERANCE

PROBE_TEXT = "What is 17 + 25? Think step by step, then give the answer in \\boxed{}."
SPARE_TOKENS = 8  # of context beyond prompt and response, for the server's own rounding


def layout(config: Config, cfg: ModelConfig, tokenizer: Tokenizer) -> weights.Layout:
    """What is served: the model in the trainer's compute dtype, without the padding of its embedding."""
    special = {"eos_token_id": list(tokenizer.stop_ids), "bos_token_id": None, "pad_token_id": tokenizer.pad_id}
    served = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
    return weights.Layout(served, config.model.compute_dtype, special)


def folder(config: Config, workdir: Path) -> Path:
    """Where this run's weights are published; each of several processes does so for its own servers."""
    chosen = config.rollout.sglang.weights_dir
    where = (
        Path(chosen).expanduser().absolute() / weights.run_name(workdir) if chosen else weights.default_folder(workdir)
    )
    return where if processes.is_writer() else where.with_name(f"{where.name}-{processes.index()}")


def context(config: Config, cfg: ModelConfig) -> int:
    """Tokens of prompt and response that a server must take."""
    return min(cfg.max_positions, config.data.max_prompt_tokens + config.rollout.max_tokens + SPARE_TOKENS)


def specs(
    config: Config, cfg: ModelConfig, tokenizer: Tokenizer, servers: int, *, boot: Path, logs: Path, incarnation: int
) -> list[Spec]:
    """Servers as ``rollout.sglang.launch`` describes them; ``boot`` gets the files that they start from.

    Args:
        servers: How many.
        incarnation: Differs between starts of one run, so that servers do not repeat what they sampled before.
    """
    shutil.rmtree(boot, ignore_errors=True)
    weights.make_folder(boot)
    laid = layout(config, cfg, tokenizer)
    laid.write_configs(boot)
    logs.mkdir(parents=True, exist_ok=True)
    return launch.specs(
        config.rollout.sglang.launch,
        servers,
        model=boot,
        dtype=laid.dtype,
        context=context(config, cfg),
        seed=zlib.crc32(f"{config.seed}/{incarnation}".encode()),
        logs=logs,
        keys=launch.write_keys(boot),
    )


def engine(
    config: Config,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    workdir: Path,
    *,
    incarnation: int,
    check: Callable[[], None],
) -> SGLangEngine:
    """The engine of ``rollout.sglang``. Servers of our own start here and are waited for at the first publish."""
    s, where = config.rollout.sglang, folder(config, workdir)
    settings = Settings(
        in_flight=s.in_flight,
        timeout_s=s.timeout_s,
        attempts=s.attempts,
        dead_after=s.dead_after,
        start_timeout_s=s.start_timeout_s,
        update_timeout_s=s.update_timeout_s,
        urls=tuple(processes.share(s.urls)),
        router=s.router,
    )
    own = []
    if s.launch.servers:
        paths = {"boot": where / "boot", "logs": workdir / "servers"}
        own = specs(config, cfg, tokenizer, s.launch.servers, **paths, incarnation=incarnation)
    laid = layout(config, cfg, tokenizer)
    tokens, _ = tokenizer.encode_prompt([{"role": "user", "content": PROBE_TEXT}])
    tokens = tokens[: context(config, cfg) - SPARE_TOKENS]
    score = functools.partial(_score, cfg=laid.cfg, dtype=jnp.dtype(laid.dtype))
    return SGLangEngine(
        settings,
        laid,
        where,
        Probe(tokens, lambda params, ids: np.asarray(score(params, ids)), PROBE_TOLERANCE[laid.dtype]),
        context=config.data.max_prompt_tokens + config.rollout.max_tokens,
        servers=own,
        check=check,
    )


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _score(params: Any, tokens: Any, *, cfg: ModelConfig, dtype: Any) -> jax.Array:
    """float32 ``[P]``: log-probabilities of all tokens but the first, then of the most likely next one."""
    row = tokens[None]
    positions = jnp.arange(row.shape[1])[None]
    hidden = transformer.forward(params, cfg, row, jnp.ones_like(row), positions, compute_dtype=dtype)[0]
    weight = transformer.unembed(params).astype(dtype)
    logp = jax.nn.log_softmax(jnp.matmul(hidden, weight, preferred_element_type=jnp.float32))
    taken = jnp.take_along_axis(logp[:-1], tokens[1:, None], axis=-1)[:, 0]
    return jnp.append(taken, logp[-1].max())
