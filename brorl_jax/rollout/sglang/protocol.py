"""The wire format of ``POST /generate``: bodies out, answers in, both checked. Token ids only, never text.

A server of 0.5.x answers much that is wrong without saying so (a default of 128 tokens, an ignored key) and dies of an
id outside its vocabulary. So nothing is sent before it has been checked, and no answer is used before it has been.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import orjson

from brorl_jax.errors import UserError
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.types import Finish, Sample

LOGP_SLACK = 1e-3  # nats by which rounding may lift a log-probability above 0


class BadAnswer(Exception):
    """An answer that must not be trained on. ``reason`` is its name in the ledger."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a server can take.

    Attributes:
        vocab: Number of ids; a larger one kills the server.
        context: Most tokens of prompt and response together.
    """

    vocab: int
    context: int


def check(requests: list[Request], sampling: Sampling, limits: Limits) -> None:
    """Refuses what a server would choke on, before anything is sent.

    Raises:
        UserError: Naming the prompt or the setting, and the limit.
    """
    outside = [i for i in sampling.stop_ids if not 0 <= i < limits.vocab]
    if outside or not sampling.stop_ids:
        raise UserError(f"stop ids {outside or '()'} are not ids of the served vocabulary of {limits.vocab}")
    for request in requests:
        tokens, name = np.asarray(request.prompt.tokens), request.prompt.id
        if not len(tokens) or not request.seeds:
            raise UserError(f"prompt {name!r} has {len(tokens)} tokens, {len(request.seeds)} samples are wanted of it")
        if tokens.min() < 0 or tokens.max() >= limits.vocab:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UserError(f"prompt {name!r} holds id {worst}, outside the served vocabulary of {limits.vocab}")
        total = len(tokens) + sampling.max_tokens
        if total > limits.context:
            raise UserError(
                f"prompt {name!r} has {len(tokens)} tokens; with rollout.max_tokens = {sampling.max_tokens} it exceeds "
                f"the server's context of {limits.context}; lower data.max_prompt_tokens or raise --context-length"
            )


class Body:
    """The bodies of one prompt's samples: what they share is serialised once."""

    __slots__ = ("_head", "_ids", "prompt_tokens")

    def __init__(self, tokens: np.ndarray, sampling: Sampling) -> None:
        params = {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": int(sampling.top_k),
            "min_p": float(sampling.min_p),
            "max_new_tokens": int(sampling.max_tokens),
            "stop_token_ids": [int(i) for i in sampling.stop_ids],
        }
        self._ids = np.asarray(tokens).tolist()
        whole = orjson.dumps(
            {
                "input_ids": self._ids,
                "return_logprob": True,
                "stream": False,
                "sampling_params": params,
            }
        )
        self._head = whole[:-2] + b',"sampling_seed":'  # open again: the inner object, then the outer one
        self.prompt_tokens = len(tokens)

    def sample(self, rid: str, seed: int) -> bytes:
        """The body of one sample; ``rid`` has a fixed length, since aborting "1" also aborts "10"."""
        return b'%b%d},"rid":"%b"}' % (self._head, seed, rid.encode())

    def prefill(self, rid: str) -> bytes:
        """Asks for no token: afterwards the server's prefix cache holds the prompt."""
        return orjson.dumps({"input_ids": self._ids, "sampling_params": {"max_new_tokens": 0}, "rid": rid})


def parse(
    raw: bytes,
    *,
    rid: str,
    index: int,
    seed: int,
    prompt_tokens: int,
    sampling: Sampling,
    tag: str,
    version: int,
    vocab: int,
) -> tuple[Sample, int]:
    """The sample in an answer, and how many of its prompt's tokens came from the server's prefix cache.

    Args:
        tag: The ``weight_version`` that every token must carry.
        version: The same as the number that samples carry.

    Raises:
        BadAnswer: It is not what was asked for: ``malformed``, ``swapped``, ``aborted`` or ``stale_version``.
    """
    try:
        answer = orjson.loads(raw)
        meta = answer["meta_info"]
        ids, triples, kind = answer["output_ids"], meta.get("output_token_logprobs"), meta["finish_reason"]["type"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BadAnswer("malformed", f"not an answer to /generate ({what}): {raw[:200]!r}") from error
    if meta.get("id") != rid:
        raise BadAnswer("swapped", f"asked for request {rid}, got the answer to {meta.get('id')!r}")
    if kind == "abort":
        raise BadAnswer("aborted", f"the server gave up: {meta['finish_reason'].get('message')}")
    if meta.get("prompt_tokens") != prompt_tokens:
        raise BadAnswer("malformed", f"{prompt_tokens} prompt tokens sent, {meta.get('prompt_tokens')} read")
    versions = {part["version"] for part in meta.get("weight_versions") or ()} | {meta.get("weight_version")}
    if versions != {tag}:
        raise BadAnswer("stale_version", f"sampled with weights {sorted(map(str, versions))}, expected {tag}")
    tokens, logp = _tokens(ids, triples, vocab, sampling.max_tokens)
    stopped = int(tokens[-1]) in sampling.stop_ids
    if not stopped and (kind != "length" or len(tokens) != sampling.max_tokens):
        reason = meta["finish_reason"]
        raise BadAnswer("malformed", f"ended after {len(tokens)} of {sampling.max_tokens} tokens with {reason}")
    finish = Finish.STOP if stopped else Finish.LENGTH
    sample = Sample(index=index, seed=seed, tokens=tokens, logp=logp, finish=finish, weight_version=version)
    return sample, meta.get("cached_tokens") or 0


def _tokens(ids: Any, triples: Any, vocab: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities as arrays, if they belong together and are possible."""
    if not isinstance(ids, list) or not isinstance(triples, list) or not 0 < len(ids) <= most:
        raise BadAnswer("malformed", f"{len(ids) if isinstance(ids, list) else ids!r} tokens, 1 to {most} expected")
    try:
        logp = np.array([t[0] for t in triples], np.float32)
        if [t[1] for t in triples] != ids:
            raise BadAnswer("malformed", "log-probabilities and ids are of different tokens")
        tokens = np.array(ids, np.int32)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise BadAnswer("malformed", f"tokens that are none: {error}") from error
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise BadAnswer("malformed", f"an id outside the vocabulary of {vocab}: {tokens.min()} to {tokens.max()}")
    if not (np.isfinite(logp).all() and logp.max() <= LOGP_SLACK):
        raise BadAnswer("malformed", f"log-probabilities that are none: {logp.min()} to {logp.max()}")
    return tokens, logp


def aborted(index: int, seed: int, version: int) -> Sample:
    """What stands for a sample that no server delivered: no token, no reward, weight zero."""
    nothing = np.zeros(0)
    return Sample(index, seed, nothing.astype(np.int32), nothing.astype(np.float32), Finish.ABORT, version)


def probe_body(tokens: np.ndarray, rid: str) -> bytes:
    """Asks for the log-probabilities of a fixed prompt and of the most likely next token."""
    return orjson.dumps(
        {
            "input_ids": np.asarray(tokens).tolist(),
            "rid": rid,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        }
    )


def parse_probe(raw: bytes) -> np.ndarray:
    """float32 ``[P]``: of the probe prompt's tokens but the first, then of the most likely next one."""
    try:
        meta = orjson.loads(raw)["meta_info"]
        triples = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        return np.array([t[0] for t in triples], np.float32)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadAnswer("malformed", f"not an answer to the probe ({error}): {raw[:200]!r}") from error
