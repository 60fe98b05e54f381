r"""Equality of expressions by algebra: math-verify's LaTeX parser and comparison, with what they get wrong taken out.

Runs in a worker that is killed at its deadline. Plain arithmetic is read here, anything else by the library's parser,
which takes ten times as long. An expression is first evaluated at a few points to thirty digits:
different values settle most wrong answers, equal values at all points settle most right ones, and what can't be
evaluated (sums, integrals, unknown functions) is left to ``math_verify.verify``, asked in both directions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import re
from fractions import Fraction
from typing import Any

from brorl_jax.rewards.math import arithmetic, guard, structure
from brorl_jax.rewards.math.compare import SIGNIFICANT, Plain, Verdict, cut_or_rounded, last_place, number
from brorl_jax.rewards.math.structure import Kind, Node

_DIGITS = 30
_TOLERANCE = 1e-20
_POINTS = 3
_MAX_SYMBOLS = 16
_MAX_EXPONENT = 25_000  # decimal digits before the point up to which values are compared digit by digit
_WRITTEN = 300  # decimal digits of a power that is read as one integer
_MAX_LOG = 1e5  # decimal digits of the largest number that is evaluated
_TURN = 1.4  # log10 of e^pi: what a power may grow by with each unit of its exponent's imaginary part
_MAX_EXPONENT_LOG = 100  # the same of an exponent, whose value is looked at
_REWRITES = (
    (re.compile(r"(?<=[\^_])([a-zA-Z\d])"), r"{\1}"),
    (re.compile(r"(?<=[\d}])\s*\("), r"\\cdot ("),  # 2(3) is read as 2 + 3 otherwise
    (
        re.compile(r"\)\s*(?=[\d\\(a-zA-Z])(?!\\cdot|\\times|\\le|\\ge|\\right|\\}|\\rfloor|\\rceil|\\rangle)"),
        r")\\cdot ",
    ),
    (re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\s*\^\\circ"), r"(\1\\cdot\\frac{\\pi}{180})"),
    (re.compile(r"(?<![a-zA-Z])([a-zA-Z])('+)"), lambda m: f"{m[1]}_{{{'pr' * len(m[2])}}}"),
    (re.compile(r"\\text\{([^{}]*)\}"), lambda m: r"\text{" + re.sub(r"\W", "", m[1]) + "}"),
    (re.compile(r"\\(?:Re|Im|operatorname)(?![a-zA-Z])"), " "),
)
_CAPITAL = re.compile(r"\\[a-zA-Z]+|\{[a-zA-Z]{2,}\}|([A-Z])(?:_(?:\{(\w+)\}|(\w)))?(?!\()")
_UNREADABLE = re.compile(r"!\s*!|\\dots|\\(?:overline|bar|dot|ddot|underline|bmod|pmod|mod|equiv)(?![a-zA-Z])")
_INTEGERS = re.compile(r"[nkmjN](?:_.*)?")


class Algebra(Plain):
    """The oracle that needs sympy; sees two expressions that are not plain numbers."""

    def value(self, a: Node, b: Node) -> Verdict:
        plain = super().value(a, b)
        if plain is not None:
            return plain
        if any(guard.too_large(n.source) for n in (a, b)):
            return False
        logs = (r"\log", r"\ln") if r"\log" in a.source + b.source else (r"\log",)
        return any(self._value(a.source, b.source, log) for log in logs)

    def _value(self, a: str, b: str, log: str) -> bool:
        x, y = expression(a, log), expression(b, log)
        if x is None or y is None:
            return False
        if x == y:
            return True
        if x.is_Rational and y.is_Rational:
            return self._approximate(a, b, x, y)
        return self._approximate(a, b, x, y) or same_value(x, y)

    def _approximate(self, a: str, b: str, x: Any, y: Any) -> bool:
        """A decimal of six digits or more for an irrational value; any numbers within the tolerances."""
        u, v = _real_value(x), _real_value(y)
        if u is None or v is None:
            return False
        room = max(self._absolute, self._relative * max(abs(u), abs(v)))
        if room and abs(u - v) <= room:
            return True
        pairs = ((a, u, v), (b, v, u))
        return any(cut_or_rounded(s, e, last_place(t, SIGNIFICANT)) for t, s, e in pairs if number(t) is not None)

    def near(self, exact: Node, shown: Node) -> Verdict:
        place = last_place(shown.source)
        x, y = (_real_value(expression(n.source, r"\log")) for n in (exact, shown))
        close = x is not None and y is not None and cut_or_rounded(y, x, place)
        return close or self.value(exact, shown)

    def equation(self, a: Node, b: Node) -> Verdict:
        signs = [n.text.replace("~", "=").split() for n in (a, b)]
        if any(len(n.items) != 2 for n in (a, b)):
            return False
        flipped = signs[0] != signs[1]
        if flipped and signs[0] != [structure.flip(signs[1][0])]:
            return False
        read = [expression(i.source, r"\log") if i.kind is Kind.EXPRESSION else None for n in (a, b) for i in n.items]
        sides = [s for s in read if s is not None]
        if len(sides) < len(read):
            return False
        first, second = sides[0] - sides[1], sides[3] - sides[2] if flipped else sides[2] - sides[3]
        if first.free_symbols != second.free_symbols or not first.free_symbols:
            return False
        return _proportional(first, second, positive=signs[0] != ["="] and signs[0] != ["!="])

    def sets(self, a: Node, b: Node) -> Verdict:
        import sympy

        x, y = _real_set(a), _real_set(b)
        if x is None or y is None:
            return False
        return x == y or sympy.SymmetricDifference(x, y) == sympy.S.EmptySet


def _real_value(e: Any) -> Fraction | None:
    """The value of a real number: exact where it is rational, else to thirty digits."""
    if e is not None and e.is_Rational:
        return Fraction(int(e.p), int(e.q))
    value = None if e is None or e.free_symbols else evaluate(e)
    return Fraction(str(value)) if value is not None and value.is_real and value.is_finite else None


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """latex2sympy and math-verify, imported in the worker only; they log through the root otherwise."""
    for noisy in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    from latex2sympy2_extended import latex2sympy2
    from math_verify import verify

    config = latex2sympy2.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    )

    def read(text: str) -> Any:
        normal = latex2sympy2.normalize_latex(text, config)
        return latex2sympy2.latex2sympy(normal, is_real=True, convert_degrees=False, normalization_config=None)

    return read, verify


@functools.lru_cache(maxsize=8192)
def expression(text: str, log: str) -> Any:
    r"""The sympy expression of ``text`` with ``\log`` read as ``log``; None where it can't be read or is too large.

    The parser folds capitals, drops primes, rounds decimals to 53 bits and takes ``i`` for a name: letters are renamed
    before, decimals made exact and ``i`` the imaginary unit after.
    """
    import sympy

    if _UNREADABLE.search(text) or not text.strip():
        return None
    with contextlib.suppress(arithmetic.UnreadError):
        return arithmetic.read(text, _Sympy())
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _CAPITAL.sub(_marked, re.sub(r"\\log(?![a-zA-Z_])", lambda _: log, text))
    try:
        result = _library()[0](text)
        if not isinstance(result, sympy.Expr):
            return None
        result = result.replace(lambda e: isinstance(e, sympy.Float), lambda e: sympy.Rational(repr(float(e))))
        result = result.subs({s: sympy.I for s in result.free_symbols if s.name == "i"})
        return result if _size(result) < _MAX_LOG else None
    except Exception:  # RecursionError too; the parser raises bare Exception on what is no LaTeX
        return None


class _Sympy:
    """:class:`~brorl_jax.rewards.math.arithmetic.Values` as the library's parser would make them."""

    def __init__(self) -> None:
        import sympy

        self._sympy = sympy

    def number(self, text: str) -> Any:
        return self._sympy.Rational(text)

    def letter(self, name: str) -> Any:
        return self._sympy.Symbol(_CAPITAL.sub(_marked, name) if len(name) == 1 else name[1:], real=True)

    def constant(self, name: str) -> Any:
        return self._sympy.E if name == "e" else self._sympy.pi

    def function(self, name: str, x: Any) -> Any:
        if name == r"\ln" and x.is_zero:
            raise arithmetic.UnreadError
        s = self._sympy
        return {r"\sin": s.sin, r"\cos": s.cos, r"\tan": s.tan, r"\ln": s.log}[name](x)

    def negative(self, x: Any) -> Any:
        return -x

    def sum(self, x: Any, y: Any) -> Any:
        return x + y

    def product(self, x: Any, y: Any) -> Any:
        return x * y

    def quotient(self, x: Any, y: Any) -> Any:
        if y.is_zero:
            raise arithmetic.UnreadError
        return x / y

    def power(self, x: Any, y: Any) -> Any:
        if x.is_zero or (x.is_number and y.is_number and not (_size(y) < 9 and _size(x) * abs(y.evalf(5)) < _WRITTEN)):
            raise arithmetic.UnreadError  # sympy would write it out
        return x**y


def _marked(match: re.Match[str]) -> str:
    """A capital letter as a name of its own: the parser makes no difference between ``A`` and ``a``."""
    if match[1] is None:
        return match[0]
    return f"z_{{cap{match[1].lower()}{match[2] or match[3] or ''}}}"


def _size(e: Any) -> float:
    """An upper bound of log10 |e|, symbols taken as 10; stops early, and infinite, at numbers no one can write out."""
    import sympy

    if e.is_Integer or e.is_Rational:
        return max(abs(int(e.p)).bit_length(), int(e.q).bit_length()) * 0.302 + 1
    parts = [_size(a) for a in e.args if isinstance(a, sympy.Basic)]
    if any(p >= _MAX_LOG for p in parts):
        return float("inf")
    if isinstance(e, sympy.Pow | sympy.exp):
        exponent = parts[-1]
        base = parts[0] if isinstance(e, sympy.Pow) else 1.0
        power = e.args[-1]
        if not isinstance(power, sympy.Expr) or not power.is_number:
            return max(base, exponent, 1.0) * 10
        if exponent > _MAX_EXPONENT_LOG:
            return float("inf")
        z = complex(power.evalf(5))  # |b^z| is at most |b|^|Re z| e^(pi |Im z|)
        return base * abs(z.real) + _TURN * abs(z.imag)
    if isinstance(e, sympy.factorial | sympy.gamma | sympy.binomial):
        return 10 ** min(max(parts), 12.0) if e.is_number else max(parts) + 2
    if isinstance(e, sympy.Mul):
        return sum(parts)
    return max(parts, default=1.0) + 1


def evaluate(e: Any, point: dict[Any, Any] | None = None, digits: int = _DIGITS) -> Any:
    """The value to that many digits, None where there is none."""
    import sympy

    if e.has(sympy.Sum, sympy.Integral, sympy.Limit, sympy.Product, sympy.Derivative):
        return None
    try:
        value = e.evalf(digits, subs=point, maxn=max(400, 2 * digits))
    except Exception:  # evalf raises whatever its functions raise
        return None
    if value in (sympy.oo, -sympy.oo):
        return value
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def same_value(x: Any, y: Any) -> bool:
    """Whether two expressions agree wherever both are defined."""
    x, y = _plain_functions(x), _plain_functions(y)
    names = sorted(x.free_symbols | y.free_symbols, key=str)
    if len(names) > _MAX_SYMBOLS:
        return False
    if not names:
        verdict = _agree(x, y, None)
        return _by_library(x, y) if verdict is None else verdict
    positive = [_agree(x, y, p) for p in _points(names, signed=False)]
    if False in positive:
        return _integer_identity(x, y, names)
    signed = [_agree(x, y, p) for p in _points(names, signed=True)]
    if True in positive and False not in signed:
        return True
    return _by_library(x, y)


def _agree(x: Any, y: Any, point: dict[Any, Any] | None) -> Verdict:
    a, b = evaluate(x, point), evaluate(y, point)
    if a is None or b is None:
        return None
    if not (a.is_finite and b.is_finite):
        return a == b
    size = max(_exponent(a), _exponent(b))
    if size > _MAX_EXPONENT:
        return False
    if size > _DIGITS // 3:  # 2^{100} + 1 is not 2^{100}
        a, b = evaluate(x, point, size + _DIGITS), evaluate(y, point, size + _DIGITS)
        return None if a is None or b is None else bool(abs(a - b) <= _TOLERANCE)
    return bool(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))) or (_is_zero(a) and _is_zero(b))


def _exponent(value: Any) -> int:
    """Decimal digits before the point."""
    parts = [part._mpf_ for part in value.as_real_imag() if part.is_Float and part]
    return max((int((exponent + bits) * 0.30103) for _, _, exponent, bits in parts), default=0)


def _is_zero(value: Any) -> bool:
    """Whether sympy found no digit of the value that is certain, as of ``\\sin^2 1 + \\cos^2 1 - 1``."""
    return all(part == 0 or part._prec == 1 for part in value.as_real_imag())


def _points(names: list[Any], *, signed: bool) -> list[dict[Any, Any]]:
    """Fixed points off every lattice, so that equal values there are no accident."""
    import sympy

    draw = random.Random(f"{signed}")
    points = []
    for _ in range(_POINTS):
        values = (sympy.Rational(draw.randrange(3_001, 29_989), 10_007) for _ in names)
        points.append({n: v * (draw.choice((-1, 1)) if signed else 1) for n, v in zip(names, values, strict=True)})
    return points


def _integer_identity(x: Any, y: Any, names: list[Any]) -> bool:
    r"""``\cos n\pi`` is ``(-1)^n``: letters that stand for integers are tried at integers too."""
    import sympy

    if not all(_INTEGERS.fullmatch(n.name) for n in names) or not any(
        e.has(sympy.cos, sympy.sin, sympy.floor, sympy.ceiling) or e.has(sympy.Pow(-1, n))
        for e in (x, y)
        for n in names
    ):
        return False
    points = [
        dict(zip(names, p, strict=True))
        for p in itertools.islice(itertools.product(range(2, 9), repeat=len(names)), 49)
    ]
    return all(_agree(x, y, p) for p in points)


def _plain_functions(e: Any) -> Any:
    """Unknown functions such as ``u(t)`` as names, so that the rest can be evaluated."""
    import sympy
    from sympy.core.function import AppliedUndef

    return e.replace(lambda f: isinstance(f, AppliedUndef), lambda f: sympy.Symbol(f"{f.func.__name__}_of_{f.args}"))


def _by_library(x: Any, y: Any) -> bool:
    """math-verify's verdict, in both directions; not of integrals, limits and double sums, which cost it minutes."""
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits

    for e in (x, y):
        if e.has(sympy.Integral, sympy.Limit) or sum(len(part.limits) for part in e.atoms(ExprWithLimits)) > 1:
            return False
    verify = _library()[1]
    return all(verify(a, b, timeout_seconds=None) for a, b in ((x, y), (y, x)))


def _proportional(x: Any, y: Any, *, positive: bool) -> bool:
    """Whether x / y is one constant (above zero where asked) at all points."""
    import sympy

    names = sorted(x.free_symbols, key=str)
    ratios = []
    for point in [*_points(names, signed=False), *_points(names, signed=True)]:
        a, b = evaluate(x, point), evaluate(y, point)
        if a is None or b is None or not (a.is_finite and b.is_finite):
            continue
        if b == 0 or a == 0:
            return False
        ratios.append(a / b)
    if len(ratios) < _POINTS:
        return False
    same = all(bool(abs(r - ratios[0]) <= _TOLERANCE * abs(ratios[0])) for r in ratios)
    return same and (not positive or bool(sympy.re(ratios[0]) > 0))


def _real_set(node: Node) -> Any:
    """A sympy set of a structure over the real line, None where it is none."""
    import sympy

    if node.kind is Kind.RELATION and (bound := structure.as_interval(node)):
        node = bound[1]
    if node.kind is Kind.EXPRESSION and node.source == r"\emptyset":
        return sympy.S.EmptySet
    if node.kind in (Kind.UNION, Kind.DIFFERENCE):
        parts = [_real_set(i) for i in node.items]
        if any(p is None for p in parts):
            return None
        return sympy.Union(*parts) if node.kind is Kind.UNION else sympy.Complement(*parts)
    if node.kind not in (Kind.INTERVAL, Kind.SET) and not (node.kind is Kind.TUPLE and len(node.items) == 2):
        return None
    ends = [expression(i.source, r"\log") if i.kind is Kind.EXPRESSION else None for i in node.items]
    if any(e is None or e.free_symbols or not e.is_extended_real for e in ends):
        return None
    if node.kind is Kind.SET:
        return sympy.FiniteSet(*ends)
    return sympy.Interval(ends[0], ends[1], node.text[0] == "(", node.text[1] == ")")
