"""The largest update once before anything else, so that too little memory shows in the first minutes of a run.

A step's batches are as large as its responses are long, and those grow as a model learns: without this, a batch that
does not fit may come after hours. One sample with advantage NaN stands in a batch of the largest shape. Its gradient is
not finite, so the update is skipped, and with its counters put back the state is bit for bit what it was. Memory is
planned for a program as compiled, so one micro-batch needs as much as all of them and takes a fraction of the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from brorl_jax import assemble, batches
from brorl_jax.assemble import Model
from brorl_jax.config import Config
from brorl_jax.data.packing import pack, rounded_up
from brorl_jax.errors import UserError
from brorl_jax.learner.state import TrainState
from brorl_jax.models import sharding
from brorl_jax.types import Batch, Finish, Group, Prompt, Sample, Status

REMEDIES = (
    "Lower config.batch.slots = {slots} or batch.rows = {rows} (smaller micro-batches, the same gradient), "
    "rollout.max_tokens with batch.row_tokens = {row_tokens}, or data.max_prompt_tokens = {prompt}; "
    "or see model.remat, model.attention, optim.offload and config.mesh in docs/scale.md"
)


def rehearse(
    config: Config, model: Model, state: TrainState, train_step: Callable[..., Any], score: Callable[..., Any]
) -> TrainState:
    """Runs the scoring passes and updates of a step on the largest mini-batches. Donates ``state``, returns its equal.

    Raises:
        UserError: They do not fit the memory; the message names the fields to lower.
        RuntimeError: An update was made in spite of its NaN.
    """
    updates, skipped, per_step = int(state.updates), int(state.skipped), config.algo.updates_per_step
    batch = largest_batch(config)
    with memory_errors(config, batch):
        packed = [sharding.put_batch(model.mesh, batch) for _ in range(per_step)]
        packed = batches.add_scores(packed, score, state, old=per_step > 1)
        for b in packed:
            state, *_ = train_step(state, b)
        found = int(state.skipped) - skipped  # waits for the updates
    if found != per_step:
        raise RuntimeError(f"of {per_step} updates by NaN {found} were skipped: the weights have changed")
    counters = sharding.put_batch(model.mesh, (np.int32(updates), np.int32(skipped)))
    return state._replace(updates=counters[0], skipped=counters[1])


def largest_batch(config: Config) -> Batch:
    """One sample in a mini-batch of the shape that responses of ``rollout.max_tokens`` make, prompts of the longest."""
    tokens, longest = config.rollout.max_tokens, config.data.max_prompt_tokens
    prompt = Prompt("rehearsal", np.zeros(longest, np.int32), "", "", "", "")
    zeros = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    sample = Sample(0, 0, *zeros, Finish.LENGTH, 0, "", Status.TRUNCATED, 1.0, 1.0, advantage=float("nan"))
    micro = rounded_up(assemble.micro_batches(config, tokens))
    return pack([Group(prompt, [sample])], assemble.layout(config), n_micro=micro)


@contextlib.contextmanager
def memory_errors(config: Config, batch: Batch) -> Iterator[None]:
    """Turns jax's error about memory into one line that names what to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        shape = " x ".join(map(str, batch.tokens.shape))
        what = REMEDIES.format(**config.batch, prompt=config.data.max_prompt_tokens)
        if config.rollout.sglang.launch.servers:
            what += "; or rollout.sglang.launch.mem_fraction, where a server shares the device"
        raise UserError(
            f"the largest update (a batch of {shape} tokens, prompts of {batch.prefix.shape[-1]}) does not fit the "
            f"memory: {str(error).splitlines()[0]:.200}. {what}"
        ) from error
