"""Grading at one go, and the start-up check that the verifiers can say "right"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from brorl_jax.rewards.registry import get
from brorl_jax.rewards.service import SHOWN, Grader, GradingStats
from brorl_jax.types import Finish, Group, Prompt, Sample

_EXACT = 1e-6  # of a score that sums up parts


def grade(groups: Iterable[Group]) -> GradingStats:
    """Fills ``status`` and ``reward`` of every sample of ``groups``, with a grader of its own. See :class:`Grader`."""
    with Grader() as grader:
        return grader.grade(groups)


def self_test(prompts: Iterable[Prompt], grader: Grader | None = None, *, required: float = 0.99) -> int:
    """Checks that the gold answer, written in each prompt's own answer format, scores 1.

    Run on a sample of every source before training: a grader that refuses right answers trains nothing, silently.

    Args:
        prompts: A sample of the data; prompts without a single gold answer are left out.
        grader: Does the work; None starts one for it.
        required: The fraction that must score 1.

    Returns:
        The number of prompts checked.

    Raises:
        ValueError: fewer than ``required`` score 1; the message shows the first failing rows.
        UserError: this machine lacks what a verifier needs.
    """
    prompts = list(prompts)
    for verifier in {prompt.verifier: get(prompt.verifier) for prompt in prompts}.values():
        if verifier.rules.check:
            verifier.rules.check()
    stated = [(prompt, response) for prompt in prompts if (response := get(prompt.verifier).render(prompt)) is not None]
    failures = [
        f"  {prompt.id}, {get(prompt.verifier).name}, gold response {response}: {why}"
        for (prompt, response), why in zip(stated, refusals(stated, grader), strict=True)
        if why
    ]
    if len(failures) > len(stated) * (1 - required):
        shown = "\n".join(list(dict.fromkeys(failures))[:SHOWN])  # a small source was asked several times over
        raise ValueError(
            f"the grader refuses {len(failures)} of {len(stated)} gold answers (at most {1 - required:.0%} may fail). "
            f"The verifier or its answer format does not suit this data:\n{shown}"
        )
    return len(stated)


def refusals(stated: Sequence[tuple[Prompt, str]], grader: Grader | None = None) -> list[str]:
    """For every prompt and response why the response does not score 1; "" where it does.

    Args:
        stated: Prompts with what is said to them.
        grader: Does the work; None starts one for it.
    """
    groups = [_stating(prompt, response) for prompt, response in stated]
    with contextlib.nullcontext(grader) if grader else Grader() as service:
        pending = [service.submit(group) for group in groups]
        service.wait(pending)
    return [_refusal(group.samples[0].reward, future.result()) for group, future in zip(groups, pending, strict=True)]


def _refusal(reward: float, stats: GradingStats) -> str:
    if reward >= 1.0 - _EXACT:
        return ""
    return "no answer found" if stats.unanswered else stats.errors[0] if stats.errors else f"scores {reward:g}"


def _stating(prompt: Prompt, response: str) -> Group:
    """A group of one sample that says ``response``."""
    nothing = np.zeros(0, np.float32)
    return Group(prompt, [Sample(0, 0, nothing.astype(np.int32), nothing, Finish.STOP, 0, text=response)])
