r"""Values in floating point, each with a bound on its error: enough to tell that two differ.

Most wrong answers of a policy are expressions such as ``3\sqrt{12}`` and ``6r^2-3r-24``. Comparing one by sympy takes
tens of milliseconds, here it takes tens of microseconds, and two values that lie further apart than rounding explains
are different whatever algebra would say. That two are equal is never concluded here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from brorl_jax.rewards.math.arithmetic import UnreadError, read

_EPS = 2.0**-51  # of one operation, relative
_SURE = 1e6  # how many times the error bound two values must lie apart
_APART = 1e-4  # relative: a decimal of six digits stands for what it is rounded from
_POINTS = 2
_MAX_EXPONENT = 1_000.0
_PERIODIC, _COMMAND = re.compile(r"\\(?:sin|cos|tan)"), re.compile(r"\\[a-zA-Z]+")
_INTEGERS = re.compile(r"[nkmjN]")  # letters that usually stand for whole numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The exact value lies within ``error`` of ``value``."""

    value: float
    error: float


def differ(a: str, b: str) -> bool:
    """Whether the two compact texts certainly have different values, somewhere if they hold letters."""
    xs, ys = estimates(a), estimates(b)
    return xs is not None and ys is not None and any(map(_apart, xs, ys))


def _apart(x: Estimate, y: Estimate) -> bool:
    size = max(abs(x.value), abs(y.value))
    return abs(x.value - y.value) > max(_APART * size, _SURE * (x.error + y.error))


@functools.lru_cache(maxsize=16_384)
def estimates(text: str) -> tuple[Estimate, ...] | None:
    """The values of a compact text at a few fixed points, every letter above zero; None where it has none here."""
    if _PERIODIC.search(text) and _INTEGERS.search(_COMMAND.sub("", text)):
        return None  # \cos(2n\pi) is 1 for whole n
    try:
        return tuple(read(text, Floats(point)) for point in range(_POINTS))
    except (UnreadError, ArithmeticError):
        return None


class Floats:
    """:class:`~brorl_jax.rewards.math.arithmetic.Values`; ``point`` says which value a letter has."""

    def __init__(self, point: int):
        self._point = point

    def number(self, text: str) -> Estimate:
        return _rounded(float(text))

    def letter(self, name: str) -> Estimate:
        return Estimate(letter(name, self._point), 0.0)

    def constant(self, name: str) -> Estimate:
        return _rounded(math.e if name == "e" else math.pi)

    def function(self, name: str, x: Estimate) -> Estimate:
        """Where the argument is known to a thousandth; of a tangent, away from its poles."""
        if abs(x.value) > 1e6 or x.error > 1e-3:
            raise UnreadError
        if name == r"\ln":
            if x.value <= 2 * x.error:
                raise UnreadError
            return _rounded(math.log(x.value), 2 * x.error / x.value + _EPS)
        sine, cosine = (_rounded(f(x.value), x.error + _EPS) for f in (math.sin, math.cos))
        return {r"\sin": sine, r"\cos": cosine}.get(name) or self.quotient(sine, cosine)

    def negative(self, x: Estimate) -> Estimate:
        return Estimate(-x.value, x.error)

    def sum(self, x: Estimate, y: Estimate) -> Estimate:
        return _rounded(x.value + y.value, x.error + y.error)

    def product(self, x: Estimate, y: Estimate) -> Estimate:
        return _rounded(x.value * y.value, abs(x.value) * y.error + abs(y.value) * x.error + x.error * y.error)

    def quotient(self, x: Estimate, y: Estimate) -> Estimate:
        least = abs(y.value) - y.error
        if least <= abs(y.value) / 2:
            raise UnreadError
        value = x.value / y.value
        return _rounded(value, (x.error + abs(value) * y.error) / least)

    def power(self, x: Estimate, y: Estimate) -> Estimate:
        """Real powers only: of a base above zero, or to a whole exponent."""
        n = y.value
        if abs(n) > _MAX_EXPONENT or abs(x.value) <= 2 * x.error:
            raise UnreadError
        if x.value < 0 and (y.error > _EPS * abs(n) or n != round(n)):
            raise UnreadError
        value = math.pow(x.value, n)
        # d(x^n) = n x^(n-1) dx + log(x) x^n dn; twice that covers the curvature as long as both are small
        relative = abs(n) * x.error / abs(x.value) + abs(math.log(abs(x.value))) * y.error
        if relative > 1e-3:
            raise UnreadError
        return _rounded(value, 2 * abs(value) * relative + 4 * _EPS * abs(value))


def _rounded(value: float, error: float = 0.0) -> Estimate:
    if not math.isfinite(value) or not math.isfinite(error):
        raise UnreadError
    return Estimate(value, error + _EPS * abs(value))


@functools.cache
def letter(name: str, point: int) -> float:
    """A number between 1/2 and 5/2 off every lattice, the same in every process."""
    seed = sum(ord(c) * 31**k for k, c in enumerate(name, 1)) + 7 * point
    return 0.5 + 2.0 * math.modf(seed * 0.6180339887498949)[0]
