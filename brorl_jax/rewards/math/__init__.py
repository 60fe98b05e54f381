r"""The ``math`` verifier: is the answer the same mathematical object as the gold?

Gold and answer go through one path. Text that is equal in one spelling, and numbers, are decided at once
(:func:`cheap`); lists, sets, tuples, intervals, matrices and equations are taken apart and compared item by item; only
expressions that are left reach sympy through math-verify, in a worker that can be killed. docs/math.md states what
counts as equal.
"""

from __future__ import annotations

from brorl_jax.rewards.math import compare, guard, structure
from brorl_jax.rewards.math.compare import Plain, Verdict
from brorl_jax.rewards.math.structure import Kind
from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt

_AT_ONCE = 400  # characters up to which an answer is taken apart in the trainer itself: a fraction of a millisecond


def cheap(answer: str, prompt: Prompt) -> float | None:
    """The score where text and numbers decide it, None where it takes algebra or a long look.

    Raises:
        ValueError: the gold is empty.
    """
    verdict = _quick(prompt.gold, answer, Plain(**tolerances(prompt)), _AT_ONCE)
    return None if verdict is None else float(verdict)


@register("math", default_format="boxed", cheap=cheap, deadline=5.0, preload=("latex2sympy2_extended", "math_verify"))
def math(answer: str, prompt: Prompt) -> float:
    """1 if answer and gold are equal, else 0; ``meta["tolerance"]`` and ``meta["relative"]`` widen numbers.

    Raises:
        ValueError: the gold is empty.
    """
    return float(equal(prompt.gold, answer, **tolerances(prompt)))


def equal(gold: str, answer: str, *, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether the two texts state the same; symmetric. May take long on hostile text: run it where it can be killed."""
    verdict = _quick(gold, answer, Plain(absolute, relative), guard.MAX_CHARS)
    if verdict is None:
        from brorl_jax.rewards.math.symbolic import Algebra  # sympy takes seconds to import

        verdict = compare.equal(structure.parse(gold), structure.parse(answer), Algebra(absolute, relative))
    return bool(verdict)


def plainly_equal(gold: str, answer: str, *, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether the two texts state the same as far as that shows at once, for any answer."""
    return _quick(gold, answer, Plain(absolute, relative), _AT_ONCE) is True


def is_number(text: str) -> bool:
    """Whether the text is a number and nothing else, or a number with a unit."""
    if guard.too_long(text):
        return False
    node = structure.parse(text)
    value = node.items[0] if node.kind is Kind.QUANTITY else node
    return value.kind is Kind.EXPRESSION and compare.number(value.source) is not None


def _quick(gold: str, answer: str, oracle: Plain, chars: int) -> Verdict:
    if not gold.strip():
        raise ValueError("the gold answer is empty")
    if gold.strip() == answer.strip():
        return True
    if guard.too_long(answer) or guard.too_long(gold):
        return False
    if max(len(answer), len(gold)) > chars:
        return None
    verdict = compare.equal(structure.parse(gold), structure.parse(answer), oracle)
    return False if verdict is None and (guard.too_large(answer) or guard.too_large(gold)) else verdict


def tolerances(prompt: Prompt) -> dict[str, float]:
    """The prompt's own tolerances as arguments of :func:`equal`."""
    meta = prompt.meta
    return {"absolute": float(meta.get("tolerance", 0)), "relative": float(meta.get("relative", 0))}
