"""Verifiers by name: a verifier is a scorer (what is right) and an answer format (where it must stand).

``get("numeric:boxed")`` compares numbers and reads them from the last closed box; ``get("numeric")`` takes the scorer's
usual format. A new scorer is one function::

    @register("exact", default_format="boxed")
    def exact(answer: str, prompt: Prompt) -> float: ...

Scorers run in killable worker processes (:mod:`brorl_jax.rewards.service`), which import the module that registers
them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Literal

from brorl_jax.errors import UserError
from brorl_jax.rewards.formats import FORMATS, Format
from brorl_jax.types import Prompt

Scorer = Callable[[str, Prompt], float]
Gold = Callable[[Prompt], str | None]
Cheap = Callable[[str, Prompt], float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An extracted final answer. Not a ``str``: so it can't be extracted from twice, nor a response be scored."""

    text: str


def _plain_gold(prompt: Prompt) -> str | None:
    return prompt.gold or None


@dataclasses.dataclass(frozen=True)
class Rules:
    """What :func:`register` was told about a scorer.

    Attributes:
        default_format: Where its answers usually stand.
        gold: ``prompt -> the answer text that must score 1``, None where there is no single one.
        deadline: Seconds of wall clock that one answer may take in a worker; then the worker is killed.
        where: ``"worker"``, or ``"inline"``: in the trainer itself, for scorers of microseconds that can't hang.
        cheap: ``(answer, prompt) -> score | None``, run in the trainer before a worker is asked; None is undecided. It
            must agree with the scorer wherever it decides, and be as quick and safe as an inline one.
        preload: Modules imported before the clock starts, and once for all workers.
        check: Run before a run begins; raises UserError where this machine lacks what the scorer needs.
    """

    default_format: str
    gold: Gold = _plain_gold
    deadline: float = 10.0
    where: Literal["inline", "worker"] = "worker"
    cheap: Cheap | None = None
    preload: tuple[str, ...] = ()
    check: Callable[[], None] | None = None


def _checked(score: float) -> float:
    reward = float(score)
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"score {reward} lies outside [0, 1]")
    return reward


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Scores responses to prompts; safe to use from any thread or process (no signals, no global state).

    Attributes:
        name: ``<scorer>:<format>``.
        format: Where the answer must stand.
        scorer: ``(answer text, prompt) -> score``; 1 is right.
        rules: How it is run.
    """

    name: str
    format: Format
    scorer: Scorer
    rules: Rules

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
            ValueError: the scorer's result lies outside [0, 1] or is NaN.
            Exception: whatever the scorer raises; the grading service turns it into a grader error.
        """
        if not isinstance(answer, Answer):
            raise TypeError(f"score needs an Answer from extract, got {type(answer).__name__}")
        return _checked(self.scorer(answer.text, prompt))

    def decide(self, answer: Answer, prompt: Prompt) -> float | None:
        """The score where it takes microseconds: from an inline scorer, or from a cheap path that is sure."""
        if self.rules.where == "inline":
            return self.score(answer, prompt)
        score = self.rules.cheap(answer.text, prompt) if self.rules.cheap else None
        return None if score is None else _checked(score)

    def render(self, prompt: Prompt) -> str | None:
        """A response that states the gold answer in the prompt's own format; None where there is no single gold.

        Raises:
            ValueError: the prompt lacks what the verifier finds a gold answer by.
        """
        try:
            gold = self.rules.gold(prompt)
        except Exception as error:  # of verifiers of one's own, too
            raise ValueError(
                f"{prompt.id}: verifier {self.name!r} finds no gold answer ({type(error).__name__}: {error}); does it "
                f"suit source {prompt.source!r}?"
            ) from error
        return None if gold is None else self.format.render(gold)


_SCORERS: dict[str, tuple[Scorer, Rules]] = {}


def register(
    name: str,
    *,
    default_format: str,
    gold: Gold = _plain_gold,
    deadline: float = 10.0,
    where: Literal["inline", "worker"] = "worker",
    cheap: Cheap | None = None,
    preload: tuple[str, ...] = (),
    check: Callable[[], None] | None = None,
) -> Callable[[Scorer], Scorer]:
    """Registers a scorer under ``name``; the arguments are the fields of :class:`Rules`.

    Raises:
        ValueError: unknown format or place, a deadline that is not positive, or a name already taken.
    """
    if default_format not in FORMATS:
        raise ValueError(f"{name}: unknown answer format {default_format!r}; known: {', '.join(FORMATS)}")
    if where not in ("inline", "worker"):
        raise ValueError(f"{name}: where = {where!r}; use 'inline' or 'worker'")
    if not deadline > 0:
        raise ValueError(f"{name}: deadline = {deadline!r}; use seconds above 0")

    def add(scorer: Scorer) -> Scorer:
        if name in _SCORERS:
            raise ValueError(f"verifier {name!r} is registered twice")
        _SCORERS[name] = scorer, Rules(default_format, gold, deadline, where, cheap, preload, check)
        return scorer

    return add


def load_plugins(modules: Iterable[str]) -> None:
    """Imports modules that register verifiers.

    Raises:
        UserError: one can't be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise UserError(
                f"config.grading.plugins: {module!r} can't be imported ({type(error).__name__}: {error}); it names a "
                "module as an import statement would, found from where Python was started or installed"
            ) from error


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
    function, rules = _SCORERS[scorer]
    form = form or rules.default_format
    if form not in FORMATS:
        raise ValueError(f"{name}: unknown answer format {form!r}{_hint(form, FORMATS)}; known: {', '.join(FORMATS)}")
    return Verifier(f"{scorer}:{form}", FORMATS[form], function, rules)


def _hint(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
