"""Scoring samples: fills ``status`` and ``reward`` in place, and the start-up check that the grader can say "right"."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from brorl_jax.rewards.registry import Answer, get
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

_SHOWN = 5


@dataclasses.dataclass(slots=True)
class GradingStats:
    """What one call of :func:`grade` did.

    Attributes:
        statuses: Number of samples by status.
        unanswered: Scored samples that state no answer in the agreed place (reward 0).
        scored: Calls of a scorer; equal answers to one prompt cost one.
        errors: The first few distinct grader errors, ``"<prompt id>: <type>: <message>"``.
    """

    statuses: Counter[Status] = dataclasses.field(default_factory=Counter)
    unanswered: int = 0
    scored: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)


def grade(groups: Sequence[Group]) -> GradingStats:
    """Fills ``status`` and ``reward`` of every sample of ``groups``.

    An aborted sample and one whose verifier failed carry no reward (NaN): neither says anything about the policy. A
    response without an answer has reward 0. Every distinct (verifier, prompt id, answer) is scored once.

    Raises:
        ValueError: unknown verifier, or two samples of one group with the same index.
    """
    stats = GradingStats()
    memo: dict[tuple[str, str, Answer], float | None] = {}
    for group in groups:
        if len({s.index for s in group.samples}) != len(group.samples):
            raise ValueError(f"{group.prompt.id}: two samples of one group have the same index")
        for sample in group.samples:
            _grade_sample(sample, group.prompt, memo, stats)
            stats.statuses[sample.status or Status.GRADER_ERROR] += 1
    return stats


def _grade_sample(
    sample: Sample, prompt: Prompt, memo: dict[tuple[str, str, Answer], float | None], stats: GradingStats
) -> None:
    sample.reward = math.nan
    if sample.finish is Finish.ABORT:
        sample.status = Status.ABORTED
        return
    truncated = sample.finish is Finish.LENGTH
    verifier = get(prompt.verifier)
    answer = verifier.extract(sample.text, truncated=truncated)
    if answer is None:
        stats.unanswered += 1
        reward: float | None = 0.0
    else:
        key = (verifier.name, prompt.id, answer)
        if key not in memo:
            stats.scored += 1
            memo[key] = _score(answer, prompt, stats)
        reward = memo[key]
    if reward is None:
        sample.status = Status.GRADER_ERROR
        return
    sample.status = Status.TRUNCATED if truncated else Status.OK
    sample.reward = reward


def _score(answer: Answer, prompt: Prompt, stats: GradingStats) -> float | None:
    """The score, or None (recorded) if the verifier failed. A failure must never look like a wrong answer."""
    try:
        reward = get(prompt.verifier).score(answer, prompt)
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"score {reward} lies outside [0, 1]")
    except Exception as error:  # anything the scorer's libraries raise
        message = f"{prompt.id}: {type(error).__name__}: {error}"
        if len(stats.errors) < _SHOWN and message not in stats.errors:
            stats.errors.append(message)
        return None
    return reward


def self_test(prompts: Iterable[Prompt], *, required: float = 0.99) -> int:
    """Checks that the gold answer, written in each prompt's own answer format, scores 1.

    Run on a sample of every source before training: a grader that refuses right answers trains nothing, silently.

    Args:
        prompts: A sample of the data; prompts without a single gold answer are left out.
        required: The fraction that must score 1.

    Returns:
        The number of prompts checked.

    Raises:
        ValueError: fewer than ``required`` score 1; the message shows the first failing rows.
    """
    checked = 0
    failures: list[str] = []
    for prompt in prompts:
        verifier = get(prompt.verifier)
        response = verifier.render(prompt)
        if response is None:
            continue
        checked += 1
        stats = GradingStats()
        answer = verifier.extract(response, truncated=False)
        score = None if answer is None else _score(answer, prompt, stats)
        if score == 1.0:
            continue
        why = "no answer found" if answer is None else stats.errors[0] if stats.errors else f"scores {score:g}"
        failures.append(f"  {prompt.id}, {verifier.name}, gold response {response}: {why}")
    if len(failures) > checked * (1 - required):
        shown = "\n".join(failures[:_SHOWN])
        raise ValueError(
            f"the grader refuses {len(failures)} of {checked} gold answers (at most {1 - required:.0%} may fail). "
            f"The verifier or its answer format does not suit this data:\n{shown}"
        )
    return checked
