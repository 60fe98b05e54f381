"""What an engine is: prompts in, groups of samples out as they complete; weights published between steps."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from brorl_jax.types import Group, Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one response.

    Attributes:
        temperature: Divides the logits; 0 is greedy (log-probabilities are then at temperature 1).
        top_p: Smallest set of tokens whose mass reaches it; 1 is off. Training rollouts must leave it off.
        top_k: Only the k most likely tokens; -1 is off. Training rollouts must leave it off.
        min_p: Only tokens at least this fraction as likely as the most likely; 0 is off. Same remark.
        max_tokens: Longest response, stop id included.
        stop_ids: Token ids that end a response; the one sampled is kept as the last token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "temperature must be >= 0": self.temperature >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be -1 or >= 1": self.top_k == -1 or self.top_k >= 1,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "max_tokens must be >= 1": self.max_tokens >= 1,
        }
        if broken := [rule for rule, ok in checks.items() if not ok]:
            raise ValueError(f"unusable sampling settings: {'; '.join(broken)} (got {self})")

    @property
    def truncated(self) -> bool:
        """Whether the sampling distribution is less than the full softmax."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the seeds of the samples wanted of it (``len(seeds)`` is N)."""

    prompt: Prompt
    seeds: tuple[int, ...]


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The 63-bit seed of one sample: a pure function of what names it, so that any sample can be drawn again."""
    name = f"{run_seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def request(prompt: Prompt, n: int, *, run_seed: int, step: int, first: int = 0) -> Request:
    """A request for ``n`` samples with the seeds of this run and step.

    Args:
        first: Index of the first seed; a prompt that comes twice in a step goes on where its first request ended.
    """
    return Request(prompt, tuple(sample_seed(run_seed, step, prompt.id, first + i) for i in range(n)))


class Engine(Protocol):
    """Generates groups with the weights last published. No request may be in flight during ``publish``."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Group]:
        """Yields one group per request, in the order in which they complete; samples are not graded yet.

        Closing the generator gives up what is not complete.
        """
        ...

    def publish(self, params: Any, version: int) -> None:
        """Makes ``params`` the weights of every later sample. Returns when they are in place, or raises."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the engine counted since the last call, under ``engine/``."""
        ...

    def close(self) -> None:
        """Frees what the engine holds; safe to call twice."""
        ...
