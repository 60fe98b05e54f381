"""Joining servers: where a router says they are, whether they answer, whether they are of the model that is trained."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from brorl_jax.errors import UserError
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.sglang.client import Client, Refused, ServerFailure
from brorl_jax.rollout.sglang.pool import SAY_EVERY_S, NoServers, Pool, Worker
from brorl_jax.rollout.sglang.publish import unpause
from brorl_jax.rollout.sglang.weights import Layout

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.5
CALL_S = 10.0
# Fields of config.json that decide names and shapes of tensors, with our names for them.
SHAPING = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
}


async def of_router(router: Client) -> list[str]:
    """The servers behind a router.

    Raises:
        UserError: It has none, or does not answer.
    """
    try:
        answer = await router.get("/workers", CALL_S)
    except (ServerFailure, Refused) as error:
        raise UserError(f"rollout.sglang.router = {router.url}: {error}") from error
    try:
        urls = sorted(entry["url"] for entry in answer["workers"])
    except (KeyError, TypeError) as error:
        raise UserError(f"rollout.sglang.router = {router.url} is no router: /workers answers {answer}") from error
    if not urls:
        raise UserError(f"rollout.sglang.router = {router.url} has no workers; add them before the trainer starts")
    return urls


async def join_all(pool: Pool, layout: Layout, context: int, timeout_s: float) -> None:
    """Waits until every server answers, and refuses one that serves another model or too short a context.

    Raises:
        UserError: A server does not fit; nothing has been sent to it.
        NoServers: Not all of them are there within ``timeout_s``, or one of ours has ended.
    """
    results = await asyncio.gather(
        *(_join(w, layout, context, timeout_s) for w in pool.workers), return_exceptions=True
    )
    for error in results:
        if isinstance(error, BaseException):
            raise error


async def _join(worker: Worker, layout: Layout, context: int, timeout_s: float) -> None:
    clock = asyncio.get_running_loop().time
    started = said = clock()
    why = "no answer yet"
    while True:
        try:
            await worker.client.get("/model_info", CALL_S)
            # /model_info has the path of the last update, which may be gone; this one has that of the start.
            info = await worker.client.get("/server_info", 3 * CALL_S)
            break
        except ServerFailure as error:
            why = str(error)
        if worker.server is not None and not worker.server.alive():
            raise NoServers(f"the server that was started at {worker.url} ended; {worker.server.last_words()}")
        if clock() - started > timeout_s:
            where = "; start it before the trainer, or correct its address in the config"
            if worker.server:
                where = f"; {worker.server.last_words()}"
            raise NoServers(f"no server at {worker.url} within {timeout_s:g} s ({why}){where}")
        if clock() - said > SAY_EVERY_S:
            said = clock()
            log.warning("waiting for the server at %s, %.0f s so far: %s", worker.url, said - started, why)
        await asyncio.sleep(ASK_EVERY_S)
    await unpause(worker.client)  # a trainer that was killed during an update may have left it paused
    check_model(worker.url, info, layout, context)


def check_model(url: str, info: dict[str, Any], layout: Layout, context: int) -> None:
    """A tensor of another shape kills a server, a missing one is silently accepted: so both are looked at first.

    Raises:
        UserError: The server's model is another one, cannot be seen from here, or is served with less than ``context``.
    """
    path = Path(str(info.get("model_path", "")))
    file = path / "config.json"
    if not path.is_absolute() or not file.is_file():
        raise UserError(
            f"{url} serves {str(path)!r}, which this machine cannot see as a model directory, so the tensors it "
            "expects cannot be checked; start servers with `python -m brorl_jax.rollout.serve`, or on an absolute path "
            "that both see"
        )
    try:
        theirs = ModelConfig.from_hf(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{url} serves {str(path)!r}, which is no model that is trained here: {error}") from error
    wrong = [
        f"{name} {getattr(theirs, ours)}, expected {getattr(layout.cfg, ours)}"
        for name, ours in SHAPING.items()
        if getattr(theirs, ours) != getattr(layout.cfg, ours)
    ]
    if theirs.family != layout.cfg.family or theirs.tied != layout.cfg.tied or theirs.head_dim != layout.cfg.head_dim:
        wrong.append(f"family {theirs.family}, tied {theirs.tied}, head_dim {theirs.head_dim}")
    if wrong:
        hint = "start it with `python -m brorl_jax.rollout.serve`, which leaves out the embedding's padding"
        raise UserError(f"{url} serves another model than the one trained ({'; '.join(wrong)}); {hint}")
    length = info.get("context_length")
    if isinstance(length, int) and length < context:
        raise UserError(
            f"{url} takes {length} tokens of prompt and response, data.max_prompt_tokens + rollout.max_tokens are "
            f"{context}; start it with a larger --context-length"
        )
