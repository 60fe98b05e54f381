"""Answers that would cost the grader its memory or its deadline, told by their text before any algebra sees them."""

from __future__ import annotations

import re

MAX_CHARS = 1_500
MAX_DIGITS = 300
MAX_DEPTH = 24
MAX_ALGEBRA_DEPTH = 10  # evaluation may double its work with every level; golds of the public sets reach 3
MAX_EXPONENT = 20_000  # of an integer power: 10^20000 is compared in microseconds, 10^(10^10) is not
MAX_FACTORIAL = 3_000  # competitions like the factorial of their year

_DIGITS = re.compile(r"\d[\d,]*")
_GROUPED_NUMBER = re.compile(r"[({]\s*(\d+)\s*[)}]")
_POWER = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*(?:\^|\*\*)\s*(\d+)(?!\s*(?:\^|\*\*|[\d.]))")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[({]*\s*-?\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*[)}]*\s*!|!\s*[)}]*\s*!\s*[)}]*\s*!")
_EVALUATED = re.compile(r"\\(?:[dt]?binom|Gamma|gamma|prod|sum|gcd|lcm|lfloor|lceil|floor|ceil|bmod|mod)(?![a-zA-Z])")


def too_long(text: str) -> str | None:
    """Why ``text`` is not even taken apart, None if it may be."""
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if any(len(run) > MAX_DIGITS for run in _DIGITS.findall(text)):
        return f"a number of more than {MAX_DIGITS} digits"
    if max(_depth(text), text.count(r"\sqrt") // 2, text.count("^") // 2) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    return None


def too_large(text: str) -> str | None:
    """Why ``text`` gets no algebra: deep nesting; powers and factorials of numbers that no one can write out."""
    if _depth(text) > MAX_ALGEBRA_DEPTH:
        return f"nested more than {MAX_ALGEBRA_DEPTH} deep"
    text = " ".join(text.split())
    for match in _FACTORIAL.finditer(text):
        if match[1] is None or int(match[1]) > MAX_FACTORIAL:
            return f"a factorial above {MAX_FACTORIAL}!, or a factorial of a factorial of a factorial"
    if _EVALUATED.search(text) and re.search(r"\d{6}", text):
        return "a sum, product, binomial or rounding function over numbers of more than five digits"
    for _ in range(MAX_DEPTH):
        if any(int(m[1]) > MAX_EXPONENT for m in _EXPONENT.finditer(text)):
            return f"an exponent above {MAX_EXPONENT}"
        reduced = _GROUPED_NUMBER.sub(r" \1 ", text)
        reduced = _POWER.sub(_value, reduced)
        if reduced == text:
            break
        text = reduced
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def _value(match: re.Match[str]) -> str:
    """The integer value of a small power, or a number above every limit."""
    base, exponent = float(match[1]), int(match[2])
    if exponent > 64 or base > 1e9:
        return str(MAX_EXPONENT + 1) if base > 1 and exponent > 1 else "1"
    value = base**exponent if base <= 1e4 else float("inf")
    return str(int(value)) if value < 1e15 else "9" * 16
