r"""Numbers as people write them, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction

# Beyond these a "number" is an attack on the grader's memory (1e999999999 is exact here).
_MAX_CHARS = 200
MAX_EXPONENT = 1_000

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?{_DECIMAL}"
_EXPONENT = r"(?:[eE](?P<e>[+-]?\d+)|\*10\^\{?(?P<p>[+-]?\d+)\}?)"
_NUMBER = re.compile(rf"(?P<m>{_SIGNED}){_EXPONENT}?(?P<percent>%)?", re.ASCII)
_FRACTION = re.compile(rf"(?P<n>{_SIGNED})/(?P<d>{_SIGNED})(?P<percent>%)?", re.ASCII)
_LATEX_FRACTION = re.compile(r"([+-]?)\\[dt]?frac(?:\{([^{}]*)\}|(\d))(?:\{([^{}]*)\}|(\d))", re.ASCII)
_ENCLOSED = re.compile(r"\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_REWRITES = (
    (re.compile(r"[\u2212\u2013]"), "-"),  # Unicode minus and the en dash that stands in for it
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))"), ","),
    (re.compile(r"^([+-]?)\s*\\?\$\s*"), r"\1"),  # currency
    (re.compile(r"^([+-])\s+"), r"\1"),
    (re.compile(r"\s*\\?%$"), "%"),
    (re.compile(r"\s*(?:\\times|\\cdot|\u00d7|\*)\s*(?=10\^)"), "*"),
    (re.compile(r"\s*/\s*"), "/"),
)


def parse_number(text: str) -> Fraction | None:
    """The exact value of text that is a number and nothing else, or None.

    Integers, decimals, thousands commas, ``a/b`` and ``\\frac{a}{b}``, percent (``25%`` is 1/4), scientific notation
    (``1.5e3``, ``1.5 \\times 10^{3}``), an enclosing ``$...$``, a leading currency ``$`` and one final full stop. A
    number with words or units around it is not a number.
    """
    if len(text) > _MAX_CHARS:
        return None
    text = text.strip().removesuffix(".").strip()
    if enclosed := _ENCLOSED.fullmatch(text):
        text = next(inner for inner in enclosed.groups() if inner is not None).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if latex := _LATEX_FRACTION.fullmatch(text):
        sign, top, top1, bottom, bottom1 = latex.groups()
        text = f"{sign}{(top or top1 or '').strip()}/{(bottom or bottom1 or '').strip()}"
    if match := _FRACTION.fullmatch(text):
        denominator = _decimal(match["d"])
        value = _decimal(match["n"]) / denominator if denominator else None
    elif match := _NUMBER.fullmatch(text):
        exponent = int(match["e"] or match["p"] or 0)
        value = _decimal(match["m"]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    else:
        return None
    return value / 100 if value is not None and match["percent"] else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
