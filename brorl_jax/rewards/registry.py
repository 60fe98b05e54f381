"""Verifiers by name: a verifier is a scorer (what is right) and an answer format (where it must stand).

``get("numeric:boxed")`` compares numbers and reads them from the last closed box; ``get("numeric")`` takes the scorer's
usual format. A new scorer is one function::

    @register("exact", default_format="boxed")
    def exact(answer: str, prompt: Prompt) -> float: ...
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable

from brorl_jax.rewards.formats import FORMATS, Format
from brorl_jax.types import Prompt

Scorer = Callable[[str, Prompt], float]
Gold = Callable[[Prompt], str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An extracted final answer. Not a ``str``: so it can't be extracted from twice, nor a response be scored."""

    text: str


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Scores responses to prompts; safe to use from any thread or process (no signals, no global state).

    Attributes:
        name: ``<scorer>:<format>``.
        format: Where the answer must stand.
        scorer: ``(answer text, prompt) -> score``; 1 is right.
        gold: ``prompt -> the answer text that must score 1``, None where there is no single one.
    """

    name: str
    format: Format
    scorer: Scorer
    gold: Gold

    def extract(self, response: str, *, truncated: bool) -> Answer | None:
        """The final answer, stripped; None where the response states none in the agreed place."""
        if not isinstance(response, str):
            raise TypeError(f"extract needs the response as str, got {type(response).__name__} (extracted twice?)")
        text = self.format.find(response, truncated)
        return Answer(text.strip()) if text is not None and text.strip() else None

    def score(self, answer: Answer, prompt: Prompt) -> float:
        """Score in [0, 1].

        Raises:
            TypeError: ``answer`` did not come from :meth:`extract`.
            Exception: whatever the scorer raises; :func:`~brorl_jax.rewards.grade` turns it into a grader error.
        """
        if not isinstance(answer, Answer):
            raise TypeError(f"score needs an Answer from extract, got {type(answer).__name__}")
        return float(self.scorer(answer.text, prompt))

    def render(self, prompt: Prompt) -> str | None:
        """A response that states the gold answer in the prompt's own format; None where there is no single gold."""
        gold = self.gold(prompt)
        return None if gold is None else self.format.render(gold)


@dataclasses.dataclass(frozen=True)
class _Entry:
    scorer: Scorer
    gold: Gold
    default_format: str


_SCORERS: dict[str, _Entry] = {}


def _plain_gold(prompt: Prompt) -> str | None:
    return prompt.gold or None


def register(name: str, *, default_format: str, gold: Gold = _plain_gold) -> Callable[[Scorer], Scorer]:
    """Registers a scorer under ``name``; ``gold`` gives the text that must score 1."""
    if default_format not in FORMATS:
        raise ValueError(f"{name}: unknown answer format {default_format!r}; known: {', '.join(FORMATS)}")

    def add(scorer: Scorer) -> Scorer:
        if name in _SCORERS:
            raise ValueError(f"verifier {name!r} is registered twice")
        _SCORERS[name] = _Entry(scorer, gold, default_format)
        return scorer

    return add


def names() -> list[str]:
    """The registered scorers, sorted."""
    return sorted(_SCORERS)


@functools.cache
def get(name: str) -> Verifier:
    """The verifier ``<scorer>`` or ``<scorer>:<format>``.

    Raises:
        ValueError: unknown scorer or format; the message lists the known ones.
    """
    scorer, _, form = name.partition(":")
    if scorer not in _SCORERS:
        raise ValueError(f"unknown verifier {scorer!r}{_hint(scorer, names())}; known: {', '.join(names())}")
    entry = _SCORERS[scorer]
    form = form or entry.default_format
    if form not in FORMATS:
        raise ValueError(f"{name}: unknown answer format {form!r}{_hint(form, FORMATS)}; known: {', '.join(FORMATS)}")
    return Verifier(f"{scorer}:{form}", FORMATS[form], entry.scorer, entry.gold)


def _hint(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
