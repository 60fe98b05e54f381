"""The supervised warm start: before RL can learn from groups, some rollouts must be right and some wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from brorl_jax import assemble, processes
from brorl_jax.assemble import Model
from brorl_jax.config import Config
from brorl_jax.data.packing import pack
from brorl_jax.data.stream import Pair, warmup_pair
from brorl_jax.errors import UserError
from brorl_jax.learner.step import make_train_step
from brorl_jax.metrics import MetricLogger, PhaseTimer
from brorl_jax.models import sharding
from brorl_jax.progress import WARMUP, Progress
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

RAMP = 16


def run(
    config: Config,
    workdir: Path,
    model: Model,
    params: Any,
    held_out: dict,
    stop: Any,
    measure: Callable[[Any], float] = lambda _: 0.0,
) -> Any:
    """Trains ``params`` on gold answers for at most ``warmup.steps`` updates and returns the new weights.

    ``measure`` gives the held-out pass@1 of weights, asked every ``warmup.every`` updates if ``warmup.until`` is set:
    how many updates lead there differs from seed to seed, and RL needs groups with right and wrong samples.
    The rate rises over the first ``1 / RAMP`` of the updates, then stays. Metrics go to ``<workdir>/warmup.jsonl``. A
    run that is stopped in its warm start begins it again.

    Raises:
        UserError: The data is missing, or a prompt has no single gold answer, or one longer than a rollout.
    """
    try:
        pairs = assemble.prompt_stream(config, config.data.warmup, model.tokenizer, held_out)
    except ValueError as error:
        raise UserError(f"data.warmup: {error}") from error
    optimizer = assemble.optimizer(config, config.warmup.lr, warmup_steps=config.warmup.steps // RAMP)
    make_state, placed = assemble.state_maker(model, optimizer, reference=False)
    step_fn = make_train_step(model.cfg, assemble.sft_objective(config), model.compute, optimizer, placed)
    state = make_state(params)
    layout, timer = assemble.sft_layout(config), PhaseTimer()
    tensorboard = config.log.tensorboard and processes.is_writer()
    logger = MetricLogger(processes.folder(workdir), tensorboard=tensorboard, stream="warmup")
    logger.truncate_after(0)
    total, until = config.warmup.steps, config.warmup.until

    def next_batch() -> Any:
        prompts = pairs.take(config.warmup.batch)
        groups = [as_group(_pair(p, model, config.rollout.max_tokens)) for p in prompts]
        return sharding.put_batch(model.mesh, pack(groups, layout))

    with (
        logger,
        Progress(total, title=processes.title("warm-up"), fields=WARMUP, every=max(1, total // 10)) as progress,
    ):
        batch = next_batch()
        for step in range(1, total + 1):
            state, metrics, _ = step_fn(state, batch)
            with timer("data"):  # while the device works on the update
                batch = next_batch()
            metrics = jax.device_get(metrics)
            times = timer.pop()
            row = {
                "warmup/loss": float(metrics["loss/total"]),
                "optim/grad_norm": float(metrics["optim/grad_norm"]),
                "throughput/tokens_per_s": float(metrics["batch/tokens"]) / times["time/step_s"],
                **times,
            }
            if until and step % config.warmup.every == 0:
                row["eval/pass@1"] = measure(state.params)
                timer.pop()
            logger.write(step, row)
            progress.update(step, row)
            if until and row.get("eval/pass@1", 0.0) >= until:
                progress.note(f"warm start ends: {row['eval/pass@1']:.1%} of held-out answers are right")
                break
            stop.check_together()
    return state.params


def _pair(prompt: Prompt, model: Model, max_tokens: int) -> Pair:
    try:
        pair = warmup_pair(prompt, model.tokenizer)
    except ValueError as error:
        raise UserError(f"data.warmup: {error}") from error
    if len(pair.response) > max_tokens:
        raise UserError(
            f"data.warmup: the gold answer to {prompt.id} has {len(pair.response)} tokens with its end, more than "
            f"rollout.max_tokens = {max_tokens}; raise that, or warm up on shorter answers"
        )
    return pair


def as_group(pair: Pair) -> Group:
    """A pair as a group of one right sample, which is all that the supervised loss needs."""
    sample = Sample(
        index=0,
        seed=0,
        tokens=pair.response,
        logp=np.zeros(len(pair.response), np.float32),
        finish=Finish.STOP,
        weight_version=0,
        status=Status.OK,
    )
    return Group(pair.prompt, [sample])
