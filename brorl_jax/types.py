"""The nouns that travel between the rooms: prompts, samples, groups and the packed batch.

Axis names used throughout the package: ``G`` groups, ``N`` rollouts per prompt, ``M`` micro-batches,
``S`` slots, ``rows``, ``T`` tokens, ``P`` prompt, ``R`` response, ``V`` vocabulary, ``D`` model width.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # importing it imports jax, which grading's workers do without
    from jaxtyping import Array, Bool, Float, Int


class Status(enum.StrEnum):
    """What became of a sample. Only ``OK`` and ``TRUNCATED`` samples may carry a reward."""

    OK = "ok"  # ended by itself, graded
    TRUNCATED = "truncated"  # hit the token limit, graded
    ABORTED = "aborted"  # the engine gave up on it: says nothing about the policy
    GRADER_ERROR = "grader_error"  # the verifier failed: says nothing about the answer
    TIMEOUT = "timeout"  # the verifier did not decide in time, which may be the machine's fault: no reward either

    @property
    def scored(self) -> bool:
        """Whether the sample has a reward and may be trained on."""
        return self in (Status.OK, Status.TRUNCATED)


class Finish(enum.StrEnum):
    """Why generation of a sample ended."""

    STOP = "stop"  # a stop id was sampled; it is the last token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the engine failed or was told to stop


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised once.

    Attributes:
        id: Stable name ``<source>/<key>``; the ledger, seeds and logs are keyed by it.
        tokens: int32 ``[P]``, the chat-templated prompt, at least one token.
        text: The same prompt as text, for logs and reports only.
        gold: The reference answer as the verifier understands it (may be empty).
        verifier: Registered name of the verifier that scores answers.
        source: Name of the data source, for per-source metrics.
        meta: Whatever the verifier needs besides ``gold`` (JSON-serialisable).
    """

    id: str
    tokens: np.ndarray
    text: str
    gold: str
    verifier: str
    source: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Sample:
    """One rollout of one prompt.

    Attributes:
        index: Position within the group, ``0 <= index < N``.
        seed: The 63-bit seed it was sampled with (see ``rollout.api.sample_seed``).
        tokens: int32 ``[R]``, the response; a sampled stop id is included exactly once.
        logp: float32 ``[R]``, log-probability of each token under the sampling distribution.
        finish: Why generation ended.
        weight_version: Version of the weights that sampled every token.
        text: Decoded response, for grading and logs only; training uses ``tokens``.
        status: What became of it; ``None`` until graded.
        reward: Raw task reward in [0, 1]; NaN unless ``status.scored``.
        shaped_reward: Reward after length shaping; NaN unless ``status.scored``.
        advantage: As used in the loss; 0 for samples that are not trained on.
    """

    index: int
    seed: int
    tokens: np.ndarray
    logp: np.ndarray
    finish: Finish
    weight_version: int
    text: str = ""
    status: Status | None = None
    reward: float = float("nan")
    shaped_reward: float = float("nan")
    advantage: float = 0.0


@dataclasses.dataclass(slots=True)
class Group:
    """All samples of one prompt, in order of ``Sample.index``."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def scored(self) -> list[Sample]:
        """The samples that carry a reward."""
        return [s for s in self.samples if s.status is not None and s.status.scored]


class Batch(NamedTuple):
    """One mini-batch: ``M`` micro-batches of ``S`` slots; one slot is a prompt with rows of its responses.

    A prompt is stored once per slot, without its last token (``prefix``); its responses are packed into the
    slot's rows. Within a row, a response of R tokens takes R places: ``inputs`` holds the prompt's last token
    followed by the response without its last token, ``tokens`` the response itself. So place ``t`` of every
    array speaks of ``tokens[t]``: ``logp[t]`` is the log-probability of ``tokens[t]``, predicted from
    ``inputs[<= t]`` of the same segment and the slot's prefix. Nothing is shifted anywhere else.

    Attributes:
        n_micro: int32 ``[]``; micro-batches beyond it are padding and are not executed.
        prefix: int32 ``[M, S, P]``, prompt without its last token, right-padded.
        prefix_len: int32 ``[M, S]``, valid length of ``prefix`` (may be 0).
        inputs: int32 ``[M, S, rows, T]``.
        tokens: int32 ``[M, S, rows, T]``.
        segment_ids: int32 ``[M, S, rows, T]``; 0 is padding, otherwise a response, unique in its micro-batch.
        positions: int32 ``[M, S, rows, T]``, position of ``inputs`` in the whole sequence, prompt included.
        mask: bool ``[M, S, rows, T]``; the tokens that are trained. The only mask: numerator and denominator.
        advantages: float32 ``[M, S, rows, T]``, constant over a response.
        rollout_logp: float32 ``[M, S, rows, T]``, from the engine.
        old_logp: float32 ``[M, S, rows, T]``, from the trainer at the weights that sampled.
        ref_logp: float32 ``[M, S, rows, T]``, from the reference policy.
        fresh: bool ``[M, S]``, sampled with the weights that the step begins with; groups carried over are not.
    """

    n_micro: Int[Array, ""]
    prefix: Int[Array, "M S P"]
    prefix_len: Int[Array, "M S"]
    inputs: Int[Array, "M S rows T"]
    tokens: Int[Array, "M S rows T"]
    segment_ids: Int[Array, "M S rows T"]
    positions: Int[Array, "M S rows T"]
    mask: Bool[Array, "M S rows T"]
    advantages: Float[Array, "M S rows T"]
    rollout_logp: Float[Array, "M S rows T"]
    old_logp: Float[Array, "M S rows T"]
    ref_logp: Float[Array, "M S rows T"]
    fresh: Bool[Array, "M S"] | None = None
