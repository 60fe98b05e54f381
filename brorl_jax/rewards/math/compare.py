r"""Whether two answers are equal, in three values: yes, no, and "needs algebra" (None).

The verdict is symmetric: a pair is put in a fixed order before any rule looks at it. The rules only take answers
apart; values are compared by an :class:`Oracle`. With :class:`Plain` this costs microseconds and needs no library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

from brorl_jax.rewards.math import estimate, structure
from brorl_jax.rewards.math.number import MAX_EXPONENT, parse_number
from brorl_jax.rewards.math.structure import Kind, Node
from brorl_jax.rewards.math.units import conversion, parse_unit

Verdict = bool | None
_SPARE = 8  # spellings of its elements that a set may have beyond twice as many as the other: no one writes so many
SIGNIFICANT = 6  # digits from which a decimal may stand for a value that has no finite decimal expansion
_SHORT_UNIT = re.compile(r"(?P<value>-?[\d.,]+(?:\\times10\^(?:\{-?\d+\}|\d))?)(?P<unit>[a-zA-Z]+(?:[/^][a-zA-Z\d]+)*)")
_DECIMAL = re.compile(r"[+-]?([\d,]+)(?:\.(\d+))?(?:(?:\\times|\\cdot)10\^(?:\{(-?\d+)\}|(\d)))?", re.ASCII)
_SETS = (Kind.UNION, Kind.DIFFERENCE, Kind.INTERVAL)


class Oracle(Protocol):
    """Compares what the rules can't take apart any further."""

    def value(self, a: Node, b: Node) -> Verdict:
        """Two expressions by value."""
        ...

    def equation(self, a: Node, b: Node) -> Verdict:
        """Two equations, or two inequalities, by what they say."""
        ...

    def sets(self, a: Node, b: Node) -> Verdict:
        """Two subsets of the real line."""
        ...

    def near(self, exact: Node, shown: Node) -> Verdict:
        """Whether ``shown`` is ``exact``, or a decimal cut or rounded from it at whatever digit."""
        ...


class Plain:
    """Compares numbers exactly; of anything else it may tell that it differs.

    Args:
        absolute: Largest difference between numbers that are equal.
        relative: The same as a share of either.
    """

    def __init__(self, absolute: float = 0.0, relative: float = 0.0) -> None:
        self._absolute, self._relative = Fraction(str(absolute)), Fraction(str(relative))

    def value(self, a: Node, b: Node) -> Verdict:
        x, y = number(a.source), number(b.source)
        if x is None or y is None:
            exact = not self._absolute and not self._relative
            return False if exact and estimate.differ(a.source, b.source) else None
        return x == y or abs(x - y) <= max(self._absolute, self._relative * max(abs(x), abs(y))) or rounded(a, b, x, y)

    def equation(self, a: Node, b: Node) -> Verdict:
        return None

    def sets(self, a: Node, b: Node) -> Verdict:
        return None

    def near(self, exact: Node, shown: Node) -> Verdict:
        x, y = number(exact.source), number(shown.source)
        return None if x is None or y is None else x == y or cut_or_rounded(y, x, last_place(shown.source))


@functools.lru_cache(maxsize=16_384)
def number(text: str) -> Fraction | None:
    """The exact value of a plain number."""
    text = text.removeprefix("{").removesuffix("}") if text.startswith("{") else text
    signs = re.match(r"^[+-]*", text)
    flips = signs[0].count("-") if signs and len(signs[0]) > 1 else 0
    value = parse_number(text.lstrip("+-") if flips else text)
    return -value if value is not None and flips % 2 else value


def rounded(a: Node, b: Node, x: Fraction, y: Fraction) -> bool:
    """Whether one is the other cut or rounded to at least six significant digits, as 0.333333 is of 1/3."""
    return any(
        cut_or_rounded(shown, exact, last_place(text, SIGNIFICANT))
        for text, shown, exact in ((a.source, x, y), (b.source, y, x))
        if not _terminates(exact)
    )


def cut_or_rounded(shown: Fraction, exact: Fraction, place: Fraction | None) -> bool:
    """Whether ``shown`` is ``exact`` cut or rounded at a digit worth ``place``; False where that is None."""
    if place is None:
        return False
    cut = shown * exact >= 0 and 0 <= abs(exact) - abs(shown) < place
    return cut or abs(shown - exact) <= place / 2


def last_place(text: str, significant: int = 1) -> Fraction | None:
    """The worth of the last digit of a decimal with at least that many significant digits; None for anything else."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or len((decimal[1] + (decimal[2] or "")).replace(",", "").lstrip("0")) < significant:
        return None
    exponent = int(decimal[3] or decimal[4] or 0)
    return Fraction(10) ** (exponent - len(decimal[2] or "")) if abs(exponent) < MAX_EXPONENT else None


def _terminates(value: Fraction) -> bool:
    d = value.denominator
    for p in (2, 5):
        while d % p == 0:
            d //= p
    return d == 1


def equal(a: Node, b: Node, oracle: Oracle) -> Verdict:
    """Whether the two answers are equal under any of their readings."""
    return _any(_equal(x, y, oracle) for x in structure.readings(a) for y in structure.readings(b))


def _equal(a: Node, b: Node, oracle: Oracle) -> Verdict:
    if a.source and a.source == b.source:
        return True
    if a.kind > b.kind:
        a, b = b, a
    return _RULES[a.kind](a, b, oracle)


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    return False if False in verdicts else None if None in verdicts else True


def _any(verdicts: object) -> Verdict:
    seen = list(verdicts)  # type: ignore[call-overload]
    return True if True in seen else None if None in seen else False


def _in_order(a: Sequence[Node], b: Sequence[Node], oracle: Oracle) -> Verdict:
    if len(a) != len(b):
        return False
    verdicts: list[Verdict] = []
    for x, y in zip(a, b, strict=True):
        verdicts.append(_equal(x, y, oracle))
        if verdicts[-1] is False:
            break
    return _all(verdicts)


def _in_any_order(a: Sequence[Node], b: Sequence[Node], oracle: Oracle) -> Verdict:
    """Pairs the items greedily, which is enough where equality is an equivalence."""
    if len(a) != len(b):
        return False
    left = list(b)
    open_items: list[Node] = []
    for x in a:
        same = next((y for y in left if x.source and x.source == y.source), None)
        if same is None:
            open_items.append(x)
        else:
            left.remove(same)
    unsure = False
    for x in open_items:
        verdicts: list[Verdict] = []
        for y in left:
            verdicts.append(_equal(x, y, oracle))
            if verdicts[-1]:
                break
        if True in verdicts:
            left.pop(len(verdicts) - 1)
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _distinct(items: Sequence[Node], oracle: Oracle) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_equal(item, k, oracle) for k in kept):
            kept.append(item)
    return kept


def _list(a: Node, b: Node, oracle: Oracle) -> Verdict:
    if b.kind is Kind.SET:
        return _set(b, a, oracle)
    if b.kind is Kind.LIST:
        bare = [[n.kind is not Kind.EQUATION for n in node.items] for node in (a, b)]
        names = [{structure.name(n) for n in node.items if n.kind is Kind.EQUATION} for node in (a, b)]
        if {all(bare[0]), all(bare[1])} == {True, False} and len(names[0] | names[1]) > 1:
            return _in_order(a.items, b.items, oracle)  # x = 1, y = 2 against 1, 2
        return _in_any_order(a.items, b.items, oracle)
    if b.kind is Kind.TUPLE and all(n.kind is Kind.EQUATION for n in a.items):
        return _in_order(a.items, b.items, oracle)  # x = 1, y = 2 against (1, 2)
    if b.kind in _SETS and all(n.kind in (Kind.RELATION, Kind.INTERVAL) for n in a.items):
        return _equal(Node(Kind.UNION, "", items=a.items), b, oracle)
    return False


def _set(a: Node, b: Node, oracle: Oracle) -> Verdict:
    if b.kind in (Kind.SET, Kind.LIST):
        few, many = sorted(len({n.source for n in node.items}) for node in (a, b))
        if many > 2 * few + _SPARE:
            return False
        return _in_any_order(_distinct(a.items, oracle), _distinct(b.items, oracle), oracle)
    if b.kind in _SETS:
        return _sets(b, a, oracle)
    return _equal(a.items[0], b, oracle) if len(a.items) == 1 and b.source != r"\emptyset" else False


def _equation(a: Node, b: Node, oracle: Oracle) -> Verdict:
    named = structure.name(a)
    if b.kind is Kind.EQUATION and (other := structure.name(b)):
        if named == other:
            return _equal(structure.tail(a), structure.tail(b), oracle)
        if named and all(number(n.items[-1].source) is not None for n in (a, b)):
            return False  # x = 5 against y = 5
        return oracle.equation(a, b)
    if named:
        return oracle.equation(a, b) if b.kind is Kind.EQUATION else _equal(structure.tail(a), b, oracle)
    if b.kind is Kind.EQUATION and len(a.items) == len(b.items) == 2 and (same := oracle.equation(a, b)) is not False:
        return same
    # An answer with its derivation: 1 + 2 = 3, 1/3 \approx 0.33, 0.56 = 56\%. What is false states nothing.
    return _all((_true(a, oracle), _any(_equal(n, b, oracle) for n in a.items)))


def _true(equation: Node, oracle: Oracle) -> Verdict:
    """Whether each member of an equation is equal, or where it says so nearly equal, to the next."""
    pairs = zip(equation.items, equation.items[1:], equation.text, strict=False)
    return _all([_equal(x, y, oracle) if sign == "=" else _near(x, y, oracle) for x, y, sign in pairs])


def _near(x: Node, y: Node, oracle: Oracle) -> Verdict:
    if x.kind is y.kind is Kind.QUANTITY and x.text == y.text:
        x, y = x.items[0], y.items[0]
    return oracle.near(x, y) if x.kind is y.kind is Kind.EXPRESSION else _equal(x, y, oracle)


def _relation(a: Node, b: Node, oracle: Oracle) -> Verdict:
    mine = structure.as_interval(a)
    if b.kind is Kind.RELATION:
        other = structure.as_interval(b)
        if mine and other:
            return _equal(mine[1], other[1], oracle) if mine[0] == other[0] else False
        return oracle.equation(a, b)
    if mine is None:
        return False
    return _equal(mine[1], b, oracle) if b.kind in (*_SETS, Kind.TUPLE, Kind.SET) else False


def _sets(a: Node, b: Node, oracle: Oracle) -> Verdict:
    """Subsets of the real line, one of them a union, difference or interval."""
    if a.kind is Kind.INTERVAL and b.kind is Kind.INTERVAL:
        return _in_order(a.items, b.items, oracle) if a.text == b.text else False
    if a.kind is Kind.INTERVAL and b.kind is Kind.TUPLE:
        return _in_order(a.items, b.items, oracle) if a.text == b.text == "()" else False
    if b.kind not in (*_SETS, Kind.SET, Kind.TUPLE):
        return False
    if a.kind is Kind.UNION and b.kind is Kind.UNION and _in_any_order(a.items, b.items, oracle):
        return True
    return oracle.sets(a, b)


def _matrix(a: Node, b: Node, oracle: Oracle) -> Verdict:
    if b.kind is Kind.MATRIX:
        return _in_order(a.items, b.items, oracle)
    if b.kind is Kind.TUPLE and b.text == "()":  # a vector and its coordinates
        cells = [c for row in a.items for c in row.items]
        return _in_order(cells, b.items, oracle) if 1 in (len(a.items), len(a.items[0].items)) else False
    if b.kind in (Kind.TUPLE, Kind.INTERVAL) and all(row.kind in (Kind.TUPLE, Kind.INTERVAL) for row in b.items):
        rows = [Node(Kind.TUPLE, "", "()", row.items) for row in b.items if row.text == "[]"]  # [[1, 2], [3, 4]]
        return _in_order(a.items, rows, oracle)
    return False


def _tuple(a: Node, b: Node, oracle: Oracle) -> Verdict:
    return _in_order(a.items, b.items, oracle) if b.kind is Kind.TUPLE and a.text == b.text else False


def _quantity(a: Node, b: Node, oracle: Oracle) -> Verdict:
    if b.kind is Kind.QUANTITY:
        return _two_quantities(a, b, oracle)
    if b.kind is not Kind.EXPRESSION:
        return False
    value = a.items[0]
    if a.text == "%":
        return _any((_equal(_scaled(value, r"\frac{%s}{100}"), b, oracle), _without_percent(value, b, oracle)))
    if a.text == "deg":
        turned = _equal(_scaled(value, r"\frac{(%s)\pi}{180}"), b, oracle) if r"\pi" in b.source else False
        return _any((_equal(value, b, oracle), turned))
    short = _SHORT_UNIT.fullmatch(b.source)
    if short and parse_unit(a.text) and parse_unit(short["unit"]):  # 5 m beside a quantity: no product of 5 and m
        value_of_b = Node(Kind.EXPRESSION, short["value"])
        return _two_quantities(a, Node(Kind.QUANTITY, b.source, short["unit"], (value_of_b,)), oracle)
    product = len(a.text) == 1 and oracle.value(Node(Kind.EXPRESSION, a.source), b)  # 2 m may be twice m
    return _any((_equal(value, b, oracle), product))


def _without_percent(value: Node, bare: Node, oracle: Oracle) -> Verdict:
    """25% is answered by 25 as well; 0.5% by 0.5 is not, since that is how 50% is written."""
    n = number(value.source)
    return _equal(value, bare, oracle) if n is not None and abs(n) > 1 else False


def _scaled(value: Node, form: str) -> Node:
    n = number(value.source)
    if n is not None and form.endswith("{100}"):
        n /= 100
        return Node(Kind.EXPRESSION, f"{n.numerator}/{n.denominator}")
    return Node(Kind.EXPRESSION, form % value.source)


def _two_quantities(a: Node, b: Node, oracle: Oracle) -> Verdict:
    x, y = a.items[0], b.items[0]
    if a.text.casefold() == b.text.casefold():
        return _equal(x, y, oracle)
    factor = conversion(b.text, a.text)
    if factor is not None:
        n, m = number(x.source), number(y.source)
        if n is None or m is None:
            return _equal(x, y, oracle) if factor == 1 else None
        m *= factor
        return abs(n - m) <= Fraction(1, 10**12) * abs(m) or oracle.value(_exact(n), _exact(m))
    if "%" in (a.text, b.text) or (parse_unit(a.text) and parse_unit(b.text)):
        return False
    return _equal(x, y, oracle) if _words(a.text) & _words(b.text) else False


def _exact(value: Fraction) -> Node:
    return Node(Kind.EXPRESSION, f"{value.numerator}/{value.denominator}")


def _words(unit: str) -> set[str]:
    return {w.casefold().removesuffix("s") for w in re.findall(r"[A-Za-z]{3,}", unit)}


def _based(a: Node, b: Node, oracle: Oracle) -> Verdict:
    return a.text == b.source  # the digits alone: the question names the base


def _text(a: Node, b: Node, oracle: Oracle) -> Verdict:
    return False


def _expression(a: Node, b: Node, oracle: Oracle) -> Verdict:
    return oracle.value(a, b)


_RULES: dict[Kind, Callable[[Node, Node, Oracle], Verdict]] = {
    Kind.LIST: _list,
    Kind.SET: _set,
    Kind.EQUATION: _equation,
    Kind.RELATION: _relation,
    Kind.UNION: _sets,
    Kind.DIFFERENCE: _sets,
    Kind.MATRIX: _matrix,
    Kind.INTERVAL: _sets,
    Kind.TUPLE: _tuple,
    Kind.QUANTITY: _quantity,
    Kind.BASED: _based,
    Kind.TEXT: _text,
    Kind.EXPRESSION: _expression,
}
