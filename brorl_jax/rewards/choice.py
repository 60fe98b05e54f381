r"""Multiple choice: the letter of an option, however it is written, or the option's own words.

``B``, ``(b)``, ``\text{(B)}``, ``**B.** 3.2 m``, ``option B`` and, where the options are known, ``3.2 m`` are one
answer. One that names two options where the gold names one, or a letter and another option's words, is wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from brorl_jax.rewards import math
from brorl_jax.rewards.registry import register
from brorl_jax.types import Prompt

LETTERS = "ABCDEFGHIJ"  # ten options, as the widest common sets have

_MAX_CHARS = 1_000
_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|boxed|fbox)(?![a-zA-Z])|\\[()\[\] ,]|[*$`{}_]")
_LEAD = re.compile(
    r"^(?:(?:the|correct|best|final|right|so|is|are|answers?|options?|choices?|letters?)\b[\s:=]*)+", re.IGNORECASE
)
_TAIL = re.compile(r"\s(?:is|are) (?:the )?(?:correct|right|best)(?: (?:answer|option|choice)s?)?$", re.IGNORECASE)
_ONE = re.compile(rf"[(\[]?\s*([{LETTERS}])\s*[)\]]?", re.IGNORECASE)
_SEPARATOR = re.compile(r"\s*(?:,|;|&|/|\band\b)+\s*(?:\band\b)?\s*", re.IGNORECASE)
_RUN = re.compile(rf"[{LETTERS}]+")
_LETTER_AND_WORDS = re.compile(
    rf"(?:[(\[]\s*([{LETTERS}])\s*[)\]]\s*[.:]?|([{LETTERS}])\s*(?:[).:\]]|\s[-\u2013\u2014](?=\s)))\s*(\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_ANOTHER = re.compile(
    rf"[(\[][{LETTERS}][)\]]|(?:^|[\s,;])(?:or|and)\s+[{LETTERS}](?![\w'])|(?:^|\s)[{LETTERS}][).:](?:\s|$)"
)


@register("choice", default_format="answer_line", where="inline")
def choice(answer: str, prompt: Prompt) -> float:
    """1 if the answer names the gold's options and no other, else 0.

    The gold is one letter or several (``C``, ``A, C``), or the words of an option. ``meta["options"]`` holds the words
    of the options, A's first; without it only letters are read.

    Raises:
        ValueError: the gold names no option.
    """
    options = tuple(str(o) for o in prompt.meta.get("options", ()))
    gold = named(prompt.gold, options)
    if gold is None:
        raise ValueError(f"the gold {prompt.gold!r} names no option of {len(options) or len(LETTERS)}")
    return float(named(answer, options) == gold)


@functools.lru_cache(maxsize=4096)
def named(text: str, options: Sequence[str] = ()) -> frozenset[str] | None:
    """The letters that ``text`` names, None where it names none or contradicts itself."""
    if len(text) > _MAX_CHARS:
        return None
    bare = _TAIL.sub("", _LEAD.sub("", " ".join(_MARKUP.sub(" ", text).split())).strip(" .,:;"))
    letters = _letters(bare)
    by_words = None if letters and len(bare) <= 3 else _by_words(text, options)  # an option may read "FACE", too
    if by_words is not None:
        return by_words
    if letters is None and (match := _LETTER_AND_WORDS.fullmatch(bare)):
        letter, words = (match[1] or match[2]).upper(), match[3]
        if _ANOTHER.search(words) or _by_words(words, options) not in (None, frozenset(letter)):
            return None
        letters = frozenset(letter)
    known = LETTERS[: len(options)] if options else LETTERS
    return letters if letters and letters <= set(known) else None


def _letters(text: str) -> frozenset[str] | None:
    """The letters of ``B``, ``(b)``, ``A, C``, ``A and C``, ``AC``."""
    if _RUN.fullmatch(text) and len(set(text)) == len(text):
        return frozenset(text)
    matches = [_ONE.fullmatch(part) for part in _SEPARATOR.split(text)]
    return frozenset(m[1].upper() for m in matches if m) if all(matches) else None


def _by_words(text: str, options: Sequence[str]) -> frozenset[str] | None:
    """The one option whose words, or whose number, ``text`` repeats."""
    same = [LETTERS[i] for i, option in enumerate(options[: len(LETTERS)]) if _same(option, text)]
    return frozenset(same) if len(same) == 1 else None


def _same(option: str, text: str) -> bool:
    return bool(option.strip()) and math.plainly_equal(option, text)
