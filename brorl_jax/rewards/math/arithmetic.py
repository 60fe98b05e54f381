r"""Plain arithmetic, read in tens of microseconds into whatever kind of value the reader is given.

Read are numbers, letters, ``e``, ``\pi``, ``+ - / ^``, products written or not, ``\frac``, ``\sqrt``, ``\sin``,
``\cos``, ``\tan``, ``\ln`` and brackets, where all readers agree what is meant. Anything else (other functions, ``i``,
indices, ``1/2x``, ``f(x)``, ``dx``, ``\sin xy``) is refused, and left to a parser that knows all of LaTeX and takes a
thousand times as long.
"""

from __future__ import annotations

import re
from typing import Generic, Protocol, TypeVar

GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma", "tau", "phi", "omega",
)  # fmt: skip
_LETTERS = "a-df-hj-zA-DF-HJ-Z"  # not e, i and their capitals
_TOKEN = re.compile(
    rf"(?P<number>\d+(?:\.\d+)?)|(?P<name>[{_LETTERS}]|\\(?:{'|'.join(GREEK)})(?![a-zA-Z]))"
    r"|(?P<constant>e|\\pi(?![a-zA-Z]))|(?P<function>\\(?:sin|cos|tan|ln)(?![a-zA-Z]))"
    r"|(?P<dot>\\(?:cdot|times)(?![a-zA-Z]))|(?P<command>\\(?:frac|sqrt))(?![a-zA-Z])|(?P<sign>[-+/^(){}\[\]])| +",
    re.ASCII,
)
_CLOSED_BY = {"(": ")", "{": "}", "[": "]"}
T = TypeVar("T")


class UnreadError(Exception):
    """The text is no plain arithmetic, or has no value of the kind that was asked for."""


class Values(Protocol[T]):
    """A kind of value and its arithmetic. Any method may raise UnreadError."""

    def number(self, text: str) -> T:
        """Of ``12`` or ``1.5``."""
        ...

    def letter(self, name: str) -> T:
        r"""Of ``x`` or ``\theta``."""
        ...

    def constant(self, name: str) -> T:
        r"""Of ``e`` or ``\pi``."""
        ...

    def function(self, name: str, x: T) -> T:
        r"""Of ``\sin``, ``\cos``, ``\tan`` or ``\ln``."""
        ...

    def negative(self, x: T) -> T: ...
    def sum(self, x: T, y: T) -> T: ...
    def product(self, x: T, y: T) -> T: ...
    def quotient(self, x: T, y: T) -> T: ...
    def power(self, x: T, y: T) -> T: ...


def read(text: str, values: Values[T]) -> T:
    """The value of a compact text (:func:`~brorl_jax.rewards.math.normal.compact`).

    Raises:
        UnreadError
    """
    reader = _Reader(_tokens(text), values)
    value = reader.sum()
    if reader.peek()[0] != "end":
        raise UnreadError
    return value


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or (tokens and tokens[-1] == ("name", "d") and match.lastgroup == "name"):
            raise UnreadError  # dx may be a differential
        at = match.end()
        if match.lastgroup:
            tokens.append((match.lastgroup, match[0]))
    return tokens


class _Reader(Generic[T]):
    """Recursive descent."""

    def __init__(self, tokens: list[tuple[str, str]], values: Values[T]):
        self.tokens, self.at, self.values = [*tokens, ("end", "")], 0, values

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at]

    def found(self, *texts: str) -> str:
        """The next token if it is one of these, which is then behind us; else ""."""
        text = self.peek()[1]
        if text not in texts:
            return ""
        self.at += 1
        return text

    def sum(self) -> T:
        sign = self.found("+", "-")
        total = self.product()
        if sign == "-":
            total = self.values.negative(total)
        while sign := self.found("+", "-"):
            term = self.product()
            total = self.values.sum(total, self.values.negative(term) if sign == "-" else term)
        return total

    def product(self) -> T:
        value = self.factor()
        while True:
            kind, text = self.peek()
            before = self.tokens[self.at - 1][0]
            if kind == "dot":
                self.at += 1
                value = self.values.product(value, self.factor())
            elif self.found("/"):
                value = self.values.quotient(value, self.factor())
                if self.begins_factor():
                    raise UnreadError  # 1/2x is one half of x for some
            elif self.begins_factor():
                if kind == "number" or (text == r"\frac" and before == "number"):
                    raise UnreadError  # x2; and 2\frac{1}{2}, which may be mixed
                if text in ("(", "[") and before in ("name", "constant"):
                    raise UnreadError  # f(x)
                value = self.values.product(value, self.factor())
            else:
                return value

    def begins_factor(self) -> bool:
        kind, text = self.peek()
        return kind in ("number", "name", "constant", "command", "function") or text in _CLOSED_BY

    def factor(self) -> T:
        return self.application() if self.peek()[0] == "function" else self.power()

    def application(self) -> T:
        r"""A function of what stands in brackets, or of one number, name or both: ``\sin(x+1)``, ``\cos 2x``."""
        name = self.peek()[1]
        self.at += 1
        if self.found("^"):
            raise UnreadError  # \sin^{-1} is the arc sine, \sin^2 x a square
        if self.peek()[0] == "number":
            x = self.atom()
            if self.peek()[0] in ("name", "constant"):
                x = self.values.product(x, self.atom())
        else:
            x = self.atom()
        if self.peek()[1] in ("^", "/") or (self.begins_factor() and self.peek()[0] != "function"):
            raise UnreadError
        return self.values.function(name, x)

    def power(self) -> T:
        base = self.atom()
        if not self.found("^"):
            return base
        kind, text = self.peek()
        if text != "{" and not (kind in ("number", "name", "constant") and len(text) == 1):
            raise UnreadError  # of x^12 the exponent is 1, or 12
        exponent = self.atom()
        if self.peek()[1] == "^":
            raise UnreadError
        return self.values.power(base, exponent)

    def atom(self) -> T:
        kind, text = self.peek()
        if text in _CLOSED_BY:
            return self.group(text)
        self.at += 1
        if kind == "number":
            return self.values.number(text)
        if kind == "name":
            return self.values.letter(text)
        if kind == "constant":
            return self.values.constant(text)
        if text == r"\frac":
            return self.values.quotient(self.group("{"), self.group("{"))
        if text == r"\sqrt":
            degree = self.group("[") if self.peek()[1] == "[" else self.values.number("2")
            return self.values.power(self.group("{"), self.values.quotient(self.values.number("1"), degree))
        raise UnreadError

    def group(self, opening: str) -> T:
        if not self.found(opening):
            raise UnreadError
        value = self.sum()
        if not self.found(_CLOSED_BY[opening]):
            raise UnreadError
        return value
