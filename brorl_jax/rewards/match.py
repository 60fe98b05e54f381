"""Matching an answer with the gold: as text, and as a number with or without a unit."""

from __future__ import annotations

from brorl_jax.rewards import math
from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt


def normalise(text: str) -> str:
    """Text for comparison: white space collapsed, enclosing ``$...$`` and a final full stop dropped, casefolded."""
    text = " ".join(text.split()).removesuffix(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text.casefold()


@register("exact", default_format="boxed", where="inline")
def exact(answer: str, prompt: Prompt) -> float:
    """1 if the answer equals the gold after :func:`normalise`, else 0.

    Raises:
        ValueError: the gold is empty.
    """
    if not prompt.gold.strip():
        raise ValueError("the gold answer is empty")  # 0 would be a verdict, and the run would learn nothing
    return float(normalise(answer) == normalise(prompt.gold))


@register("numeric", default_format="boxed", where="inline")
def numeric(answer: str, prompt: Prompt) -> float:
    """1 if the answer is the gold's number, else 0: the ``math`` scorer without algebra, so that no worker is asked.

    ``meta["tolerance"]`` is the largest difference (in the gold's unit), ``meta["relative"]`` the largest as a share of
    the larger of the two. A unit may be left out; one that is given must measure the same, and is converted.

    Raises:
        ValueError: the gold is not a number.
    """
    if not math.is_number(prompt.gold):
        raise ValueError(f"the gold {prompt.gold!r} is not a number; use another verifier for this source")
    return float(math.plainly_equal(prompt.gold, answer, **math.tolerances(prompt)))
