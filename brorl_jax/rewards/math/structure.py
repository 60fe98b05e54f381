r"""What kind of thing an answer is: a tree of lists, sets, tuples, intervals, matrices, equations over expressions.

``(1, 2)`` is a pair (or an open interval), ``\{1, 2\}`` and ``1, 2`` are collections without order, ``[1, 2]`` is an
interval, ``x = 5`` names a value. Expressions themselves stay text here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re

from brorl_jax.rewards.math.normal import FUNCTIONS, canonical, compact, is_prose, words
from brorl_jax.rewards.math.units import parse_unit


class Kind(enum.IntEnum):
    """In the order in which :func:`~brorl_jax.rewards.math.compare.equal` wants a pair."""

    LIST = enum.auto()  # items without order, as written with commas, "and", "or", \pm
    SET = enum.auto()  # items without order or repetition
    EQUATION = enum.auto()  # items: the members of a = b = c; text: the signs between them, "=" or "~"
    RELATION = enum.auto()  # items: the members; text: the signs between them, separated by spaces
    UNION = enum.auto()  # items: intervals, sets, relations
    DIFFERENCE = enum.auto()  # items: a set and what is taken out of it
    MATRIX = enum.auto()  # items: rows, each a TUPLE
    INTERVAL = enum.auto()  # two items; text: its brackets
    TUPLE = enum.auto()  # items in order; text: its brackets
    QUANTITY = enum.auto()  # one item, the value; text: the unit
    BASED = enum.auto()  # digits in a named base: source is digits_base, text the digits
    TEXT = enum.auto()  # words
    EXPRESSION = enum.auto()  # anything to be compared by value


@dataclasses.dataclass(frozen=True)
class Node:
    """One part of an answer; ``source`` is its compact text: equal sources are equal answers."""

    kind: Kind
    source: str
    text: str = ""
    items: tuple[Node, ...] = ()


_MAX_DEPTH = 12
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(
    r"\\begin\s*\{[a-z*]+\}|\\end\s*\{[a-z*]+\}|\\text\{[^{}]*\}|\\langle|\\rangle|\\[{}|]|\\\\|\\[a-zA-Z]+|\\.|."
)
_AND_OR = re.compile(r"\\text\{\s*(?:,?\s*(?:and|or),?)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_SIGNS = {"=": "=", r"\approx": "~", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="}
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


def flip(sign: str) -> str:
    """The sign of the same relation read from right to left."""
    return _FLIP[sign]


_LETTER = r"(?:[a-zA-Z]|\\(?!frac|sqrt|pi(?![a-zA-Z])|sin|cos|tan|log|ln|exp|int|sum|prod)[a-zA-Z]+)"
_INDEX = r"(?:_(?:\w|\{[^{}]*\}))?'*"
_NAME = re.compile(
    rf"(?:\\text\{{[^{{}}]*\}}|(?:\\(?:angle|triangle|overline|bar|widehat)\s*\{{?)?[A-Z]{{2,4}}\}}?|{_LETTER}){_INDEX}(?:\([^()]*\))?"
    rf"|\|[A-Z]{{2}}\||\\(?:max|min|gcd|lim_\{{[^{{}}]*\}})\s*\S{{0,30}}"
)
_FUNCTION = re.compile(r"\\(?:" + "|".join(FUNCTIONS) + r")(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\s*\{([pbB]?matrix|array|smallmatrix)\}\s*(?:\{[lcr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_BASED = re.compile(r"([0-9A-Fa-f.]*\d[0-9A-Fa-f.]*|[A-F]+)\s*_\s*\{?\s*(?:\\text\{\s*)?(?:base\s*)?(\w+)\s*\}?\s*\}?")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)")
_UNIT_TAIL = re.compile(
    r"(?P<value>.*?[\d)}a-z])\s*(?P<unit>\\%|\^\\circ(?:\s*(?:\\text\{\s*)?[CF]\b\s*\}?)?|(?:/\s*)?\\text\{[^{}]*\}.*"
    r"|(?<=[\d}])\s+(?:(?!and|or)[a-zA-Z](?:/?[a-zA-Z]|\^\d)[ /^*a-zA-Z\d-]*|[a-zA-Z])"
    r"|(?<=\d)[a-zA-Z]/?[a-zA-Z][/^*a-zA-Z\d-]*)"
)


@functools.lru_cache(maxsize=8192)
def parse(text: str) -> Node:
    """The tree of an answer as it came (any spelling)."""
    return _parse(canonical(text), 0)


def readings(node: Node) -> tuple[Node, ...]:
    """The tree, and for ``1,234`` also the list of 1 and 234 that it may be."""
    if node.kind is Kind.EXPRESSION and _THOUSANDS.fullmatch(node.source):
        items = tuple(_parse(part, 1) for part in node.source.split(","))
        return (node, Node(Kind.LIST, node.source, items=items))
    return (node,)


def _parse(text: str, depth: int) -> Node:
    text = text.strip()
    if depth > _MAX_DEPTH:
        return Node(Kind.EXPRESSION, compact(text))
    for attempt in _FORMS:
        node = attempt(text, depth)
        if node is not None:
            return node
    return Node(Kind.EXPRESSION, compact(text))


def tokens(text: str) -> list[tuple[str, int]]:
    """The tokens with the bracket depth at which each stands (a bracket stands outside of itself).

    Any opening bracket is closed by any closing one, for ``[0, 1)``.
    """
    out: list[tuple[str, int]] = []
    depth = 0
    for token in _TOKEN.findall(text):
        if token in ("(", "[", "{", r"\{", r"\langle") or token.startswith(r"\begin"):
            out.append((token, depth))
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\rangle") or token.startswith(r"\end"):
            depth = max(depth - 1, 0)
            out.append((token, depth))
        else:
            out.append((token, depth))
    return out


def split(text: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The parts between the separators that stand outside of all brackets, and those separators."""
    parts, found = [""], []
    for token, depth in tokens(text):
        if depth == 0 and token in separators:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [p.strip() for p in parts], found


def _prose(text: str, depth: int) -> Node | None:
    if text.startswith(r"\text") and is_prose(text):
        return Node(Kind.TEXT, re.sub(r",? and |, ?", ", ", words(text).casefold()))
    return None


def _commas(text: str) -> list[str]:
    """Parts between the commas and semicolons, thousands kept whole: all of ``1,234`` alone or beside spaced commas."""
    if _THOUSANDS.fullmatch(text) or re.search(r",\s", text):
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", "\x00"), text)
    parts, _ = split(text, (",", ";"))
    parts = [p.replace("\x00", ",") for p in parts]
    return parts[:-1] if len(parts) > 1 and not parts[-1] else parts


def _collection(text: str, depth: int) -> Node | None:
    marked = _AND_OR.sub(lambda m: "\x01" if "and" in m[0] else "\x02", text)
    pieces, joints = split(marked, ("\x01", "\x02"))
    pieces = [p.strip(" ,") for p in pieces]
    if not all(pieces):
        return None
    parts = [part for piece in pieces for part in _commas(piece)] if joints else _commas(text)
    if len(parts) < 2 or any(not p for p in parts):
        return None
    nodes = [_parse(part, depth + 1) for part in parts]
    if all(n.kind in (Kind.RELATION, Kind.INTERVAL) for n in nodes) and set(joints) == {"\x02"}:
        return Node(Kind.UNION, compact(text), items=tuple(nodes))
    nodes = _named(nodes)
    items = tuple(item for n in nodes for item in (n.items if n.kind is Kind.LIST else (n,)))
    return Node(Kind.LIST, compact(text), items=items)


def _named(nodes: list[Node]) -> list[Node]:
    """In ``x = 1, 2`` the name holds for both."""
    if nodes[0].kind is Kind.EQUATION and all(n.kind is Kind.EXPRESSION for n in nodes[1:]) and name(nodes[0]):
        head = nodes[0].items[0]
        return [nodes[0], *(equation((head, n), "=") for n in nodes[1:])]
    return nodes


def _membership(text: str, depth: int) -> Node | None:
    parts, signs = split(text, (r"\in",))
    return _parse(parts[1], depth + 1) if signs == [r"\in"] and _NAME.fullmatch(parts[0]) else None


def _relations(text: str, depth: int) -> Node | None:
    members, signs = split(text, tuple(_SIGNS))
    if not signs or any(not m for m in members):
        return None
    signs = [_SIGNS[s] for s in signs]
    if set(signs) == {"="} and (pairs := _coordinates(members, depth)):
        return pairs
    items = tuple(_parse(m, depth + 1) for m in members)
    if set(signs) <= {"=", "~"}:
        last = items[-1]
        if last.kind is Kind.LIST:  # x = \pm 2
            each = tuple(equation((*items[:-1], n), "".join(signs)) for n in last.items)
            return Node(Kind.LIST, compact(text), items=each)
        return equation(items, "".join(signs))
    return Node(Kind.RELATION, compact(text), " ".join(signs), items)


def _coordinates(members: list[str], depth: int) -> Node | None:
    """``(x, y) = (1, 2)`` is the tuple; that its coordinates have names adds nothing."""
    if len(members) == 2 and re.fullmatch(r"\(\s*[a-zA-Z](?:_\w)?(?:\s*,\s*[a-zA-Z](?:_\w)?)+\s*\)", members[0]):
        value = _parse(members[1], depth + 1)
        return value if value.kind is Kind.TUPLE else None
    return None


def _sets(text: str, depth: int) -> Node | None:
    parts, signs = split(text, (r"\cup",))
    if signs and all(parts):
        return Node(Kind.UNION, compact(text), items=tuple(_parse(p, depth + 1) for p in parts))
    parts, signs = split(text, (r"\backslash",))
    if len(signs) == 1 and all(parts):
        return Node(Kind.DIFFERENCE, compact(text), items=tuple(_parse(p, depth + 1) for p in parts))
    if text == r"\mathbb{R}":
        return interval("()", Node(Kind.EXPRESSION, r"-\infty"), Node(Kind.EXPRESSION, r"\infty"))
    return None


def interval(brackets: str, low: Node, high: Node) -> Node:
    """An interval; an infinite end is always open."""
    left = "(" if low.source == r"-\infty" else brackets[0]
    right = ")" if high.source in (r"\infty", r"+\infty") else brackets[1]
    return Node(Kind.INTERVAL, f"{left}{low.source},{high.source}{right}", left + right, (low, high))


def _enclosed(text: str, depth: int) -> Node | None:
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(text, matrix[2], depth)
    inside = tokens(text)
    if len(inside) < 2 or inside[-1][1] or any(d == 0 for _, d in inside[1:-1]):
        return None
    left, right = inside[0][0], inside[-1][0]
    inner = "".join(t for t, _ in inside[1:-1]).strip()
    if (left, right) == (r"\{", r"\}"):
        return _set(text, inner, depth)
    if (left, right) == ("{", "}"):
        return _parse(inner, depth + 1)
    if left not in ("(", "[", r"\langle") or right not in (")", "]", r"\rangle"):
        return None
    parts, _ = split(inner, (",", ";"))
    if len(parts) == 1:
        return _parse(inner, depth + 1) if left + right in ("()", "[]") else None
    if not all(parts):
        return None
    items = tuple(_parse(p, depth + 1) for p in (_commas(inner) if re.search(r",\s", inner) else parts))
    infinite = any(i.source in (r"\infty", r"-\infty", r"+\infty") for i in items)
    if len(items) == 2 and left != r"\langle" and (left + right != "()" or infinite):
        return interval(left + right, *items)
    return Node(Kind.TUPLE, compact(text), "()" if left == r"\langle" else left + right, items)


def _set(text: str, inner: str, depth: int) -> Node:
    if not inner:
        return Node(Kind.EXPRESSION, r"\emptyset")
    for bar in ("|", r"\mid", ":"):
        parts, signs = split(inner, (bar,))
        if len(signs) == 1 and _NAME.fullmatch(parts[0].split(r"\in")[0].strip()):
            return _parse(parts[1], depth + 1)
    items = tuple(i for part in _commas(inner) for i in _flat(_parse(part, depth + 1)))
    return Node(Kind.SET, compact(text), items=items)


def _flat(node: Node) -> tuple[Node, ...]:
    return node.items if node.kind is Kind.LIST else (node,)


def _matrix(text: str, body: str, depth: int) -> Node:
    rows = [r for r in split(body.replace(r"\hline", ""), (r"\\",))[0] if r]
    cells = [tuple(_parse(c, depth + 1) for c in split(row, ("&",))[0]) for row in rows]
    return Node(Kind.MATRIX, compact(text), items=tuple(Node(Kind.TUPLE, "", "()", row) for row in cells))


def _ratio(text: str, depth: int) -> Node | None:
    """``2:4:6`` as (1, 2, 3): each part over the first. Of two parts it is left a quotient."""
    parts, signs = split(text, (":",))
    if len(signs) < 2 or not all(parts):
        return None
    over = tuple(Node(Kind.EXPRESSION, rf"\frac{{{compact(p)}}}{{{compact(parts[0])}}}") for p in parts)
    return Node(Kind.TUPLE, compact(text), ":", over)


def _plus_minus(text: str, depth: int) -> Node | None:
    if r"\pm" not in text and r"\mp" not in text:
        return None
    both = []
    for plus, minus in (("+", "-"), ("-", "+")):
        signed = re.sub(r"\\pm(?![a-zA-Z])", plus, re.sub(r"\\mp(?![a-zA-Z])", minus, text)).strip()
        both.append(_parse(signed.removeprefix("+"), depth + 1))
    return Node(Kind.LIST, compact(text), items=tuple(both))


def _based(text: str, depth: int) -> Node | None:
    match = _BASED.fullmatch(text.replace(r"\text{", "").replace("}", "").replace("{", "") if "_" in text else text)
    if match is None:
        return None
    base = _BASES.get(match[2].casefold(), match[2])
    digits = match[1].upper().lstrip("0") or "0"
    return Node(Kind.BASED, f"{digits}_{base}", digits) if base.isdigit() and 2 <= int(base) <= 36 else None


def _quantity(text: str, depth: int) -> Node | None:
    match = _UNIT_TAIL.fullmatch(text)
    if match is None or not re.search(r"\d|\\pi", match["value"]) or not balanced(match["value"]):
        return None
    if match["unit"].startswith(r"^\circ") and _FUNCTION.search(match["value"]):
        return None  # of \sin 30^\circ the unit belongs to the 30
    unit = " ".join(match["unit"].split()).lstrip()
    if not unit.startswith(("\\", "^", "/")):  # bare letters: cm is a unit and "apples" a word, xy a product
        first = re.split(r"[ /^*]", unit)[0]
        if parse_unit(unit) is None and not (len(first) >= 4 and first.isalpha() and first not in FUNCTIONS):
            return None
    value = _parse(match["value"], depth + 1)
    return Node(Kind.QUANTITY, compact(text), unit_text(unit), (value,)) if value.kind is Kind.EXPRESSION else None


_FORMS = (_prose, _collection, _membership, _relations, _sets, _enclosed, _ratio, _plus_minus, _based, _quantity)


def unit_text(unit: str) -> str:
    """The unit without markup: ``cm^2``, ``%``, ``deg``, ``apples``."""
    unit = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", unit).replace(r"\%", "%").replace(r"^\circ", " deg ")
    unit = re.sub(r"deg\s+([CF])\b", r"deg\1", unit)
    unit = re.sub(r"\s*([/^])\s*", r"\1", unit.replace("{", "").replace("}", ""))
    return " ".join(unit.split())


def balanced(text: str) -> bool:
    """Whether every bracket of ``text`` is closed within it."""
    depth = 0
    for token, _ in tokens(text):
        if token in ("(", "[", "{", r"\{", r"\langle") or token.startswith(r"\begin"):
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\rangle") or token.startswith(r"\end"):
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def name(equation: Node) -> str | None:
    """What an equation names: ``x`` of ``x = 5``, ``f(x)``, ``AB``, words; None for ``x + y = 1``."""
    head = equation.items[0]
    return head.source if _is_name(head) else None


def _is_name(node: Node) -> bool:
    return node.kind is Kind.TEXT or _NAME.fullmatch(node.source) is not None


def equation(items: tuple[Node, ...], signs: str) -> Node:
    """An equation of at least two members; ``5 = x`` is turned round, so that a name stands first."""
    if len(items) == 2 and not _is_name(items[0]) and _is_name(items[1]):
        items = items[::-1]
    source = items[0].source + "".join(sign + item.source for sign, item in zip(signs, items[1:], strict=True))
    return Node(Kind.EQUATION, source, signs, items)


def tail(equation: Node) -> Node:
    """What an equation says that its first member is."""
    if len(equation.items) == 2:
        return equation.items[1]
    members, signs = equation.items[1:], equation.text[1:]
    source = members[0].source + "".join(sign + item.source for sign, item in zip(signs, members[1:], strict=True))
    return Node(Kind.EQUATION, source, signs, members)


def as_interval(relation: Node) -> tuple[str, Node] | None:
    """``(variable, set)`` of ``x > 3``, ``1 < x \\le 2``, ``x \\ne 0``; None where it is no bound on one name."""
    signs, items = relation.text.split(), relation.items
    low, high = Node(Kind.EXPRESSION, r"-\infty"), Node(Kind.EXPRESSION, r"\infty")
    if len(items) == 2:
        sign = signs[0]
        if not _NAME.fullmatch(items[0].source):
            items, sign = (items[1], items[0]), _FLIP[sign]
        if not _NAME.fullmatch(items[0].source):
            return None
        variable, bound = items[0].source, items[1]
        if sign == "!=":
            pieces = (interval("()", low, bound), interval("()", bound, high))
            return variable, Node(Kind.UNION, "", items=pieces)
        if sign in ("<", "<="):
            return variable, interval("(" + (")" if sign == "<" else "]"), low, bound)
        return variable, interval(("(" if sign == ">" else "[") + ")", bound, high)
    if len(items) == 3 and _NAME.fullmatch(items[1].source):
        if all(s in (">", ">=") for s in signs):
            items, signs = items[::-1], [_FLIP[s] for s in reversed(signs)]
        if all(s in ("<", "<=") for s in signs):
            brackets = ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")
            return items[1].source, interval(brackets, items[0], items[2])
    return None
