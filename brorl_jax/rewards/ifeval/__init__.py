"""Instruction following: the verifiable instructions of IFEval, judged on what the user sees.

The instructions travel in ``prompt.meta`` under IFEval's own names, ``instruction_id_list`` and ``kwargs``. The answer
format is ``final``: the text after ``</think>``, the whole response where the model does not reason.

========== ===============================================================
verifier   score
========== ===============================================================
ifeval     share of the instructions followed, strict ([V1]: continuous)
ifeval_loose the same, loose
ifeval_all 1 if all are followed, strict (IFEval's prompt level), else 0
========== ===============================================================
"""

from __future__ import annotations

from brorl_jax.rewards.ifeval.kinds import KINDS, OPTIONS, accuracies, check_instructions, judge
from brorl_jax.rewards.ifeval.render import LANGUAGES, render
from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt

__all__ = ["KINDS", "LANGUAGES", "OPTIONS", "accuracies", "check_instructions", "judge", "render"]


_PRELOAD = ("brorl_jax.rewards.ifeval.language",)


def _judge(answer: str, prompt: Prompt, *, loose: bool = False) -> list[bool]:
    return judge(answer, prompt.meta["instruction_id_list"], prompt.meta["kwargs"], loose=loose)


def _gold(prompt: Prompt) -> str | None:
    return render(prompt.meta["instruction_id_list"], prompt.meta["kwargs"])


@register("ifeval", default_format="final", gold=_gold, preload=_PRELOAD)
def ifeval(answer: str, prompt: Prompt) -> float:
    """The share of the instructions in ``prompt.meta`` that the answer follows, strict."""
    verdicts = _judge(answer, prompt)
    return sum(verdicts) / len(verdicts)


@register("ifeval_loose", default_format="final", gold=_gold, preload=_PRELOAD)
def ifeval_loose(answer: str, prompt: Prompt) -> float:
    """The share of the instructions that one of the eight variants of the answer follows."""
    verdicts = _judge(answer, prompt, loose=True)
    return sum(verdicts) / len(verdicts)


@register("ifeval_all", default_format="final", gold=_gold, preload=_PRELOAD)
def ifeval_all(answer: str, prompt: Prompt) -> float:
    """1 if the answer follows every instruction, strict, else 0."""
    return float(all(_judge(answer, prompt)))
