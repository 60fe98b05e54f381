"""Counting sentences, words and capital words, and guessing the language: what the IFEval kinds are defined by.

Everything runs offline and in time linear in the text: the policy writes it, and a regular expression that is quadratic
in a line of ``[[[[`` would be found by it sooner or later.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_WORD = re.compile(r"\w+")

# Marks that stand alone as tokens in Penn Treebank tokenization, which IFEval counts capital words by.
_ALONE = re.compile(r"[\"«»“”‘’„`()\[\]{}<>;@#$%&?!*\u2012-\u2015]|--|\.{2,}|''")
_COLON_OR_COMMA = re.compile(r"([:,])(?!\d)")
_OPENING_APOSTROPHE = re.compile(r"(?<!\w)'(?!(?:re|ve|ll|[mtsdn])\b)(?=\w)", re.IGNORECASE)
_CLITIC = re.compile(r"(?<=[^' ])('[smd]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T|'[SMD]|')(?= )")
_JOINED = re.compile(
    r"(?i)\b(can)(not)\b|\b(gim|lem)(me)\b|\b(gon|wan)(na)\b|\b(got)(ta)\b|\b(d)('ye)\b|\b(more)('n)\b"
)


def sentences(text: str) -> int:
    """Number of sentences by the English Punkt model (Kiss & Strunk 2006), which IFEval uses."""
    return len(models().PUNKT.tokenize(text))


def words(text: str) -> int:
    """Number of runs of letters, digits and underscores."""
    return len(_WORD.findall(text))


def capital_words(text: str) -> int:
    """Number of Treebank tokens in capitals: at least one cased letter and none in lower case.

    Clitics count for themselves, as in the original: ``I'M`` and ``CAN'T`` are two tokens each.
    """
    text = _OPENING_APOSTROPHE.sub("' ", _COLON_OR_COMMA.sub(r" \1 ", _ALONE.sub(r" \g<0> ", text)))
    text = _JOINED.sub(_spaced, _CLITIC.sub(r" \1", " ".join(["", *text.split(), ""])))
    return sum(token.isupper() for token in text.split())


def _spaced(match: re.Match[str]) -> str:
    return " ".join(group for group in match.groups() if group)


def language(text: str) -> str | None:
    """ISO 639-1 code of the text's language by langdetect with a fixed seed; None where it sees no features."""
    return models().language(text)


@functools.cache
def models() -> Any:
    from brorl_jax.rewards.ifeval import language  # about a second: its models

    return language
