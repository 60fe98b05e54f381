"""Whether a program's output is the expected one. Runs in the grader's own process, on text from hostile hands: linear
in the length of what is expected, and blind to anything but plain data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-6  # absolute below 1, relative above; the usual one of programming contests
_INTEGER = re.compile(r"[+-]?\d{1,400}", re.ASCII)
_REAL = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][+-]?\d{1,3})?", re.ASCII)
_SLACK = 1 << 16  # bytes a right output may have beyond four times what is expected


def same_output(got: bytes, expected: str | Sequence[str]) -> bool:
    """Whether standard output is (one of) the expected text: the same words whatever the white space between them.

    A word that is expected to be a real number may differ by ``TOLERANCE``; an integer must be the same integer (``3``
    and ``3.0`` are the same, ``3`` and ``3.0000001`` are not).
    """
    if not isinstance(expected, str):
        return any(same_output(got, one) for one in expected)
    if len(got) > _SLACK + 4 * len(expected):
        return False
    words, right = got.decode("utf-8", "replace").split(), expected.split()
    return len(words) == len(right) and all(map(_same_word, words, right))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not _REAL.fullmatch(got) or not _REAL.fullmatch(expected):
        return False
    if _INTEGER.fullmatch(expected):
        if _INTEGER.fullmatch(got):
            return int(got) == int(expected)
        whole, _, rest = got.partition(".")
        return not rest.strip("0") and bool(_INTEGER.fullmatch(whole)) and int(whole) == int(expected)
    return close(float(got), float(expected))


def close(a: float, b: float) -> bool:
    """Whether ``a`` is ``b`` up to ``TOLERANCE``; NaN is not close to anything."""
    return a == b or (math.isfinite(a) and abs(a - b) <= TOLERANCE * max(1.0, abs(b)))


def same_value(reply: bytes, expected: Any) -> bool:
    """Whether a returned value (as ``guest.values`` describes it) is ``expected``, a value from JSON.

    Tuples count as lists, keys of dictionaries as text, and a set as a list of its elements in any order. The reply is
    compared as it lies there: nothing that it describes is built, so a set of colliding keys costs nothing.
    """
    if len(reply) > 1024 + 8 * len(json.dumps(expected)):
        return False  # no writing of an equal value is that long
    try:
        return _same(json.loads(reply), expected)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return False  # not written by the runner


def _same(node: Any, expected: Any) -> bool:
    tag, content = _open(node)
    if tag in ("l", "t"):
        if not isinstance(expected, list) or len(content) != len(expected):
            return False
        return all(map(_same, content, expected))
    if tag in ("s", "f"):
        return isinstance(expected, list) and _keys(content) == sorted(map(_key, expected))
    if tag == "d":
        pairs = {_text(k): v for k, v in content}
        return (
            isinstance(expected, dict)
            and len(pairs) == len(content)
            and pairs.keys() == expected.keys()
            and all(_same(v, expected[k]) for k, v in pairs.items())
        )
    if tag is not None:
        return False
    if isinstance(content, float) and isinstance(expected, int | float) and not isinstance(expected, bool):
        return close(content, expected)
    if isinstance(content, int) and isinstance(expected, float):
        return close(content, expected)
    if isinstance(content, bool) != isinstance(expected, bool):
        return False
    return type(content) is type(expected) and content == expected


def _open(node: Any) -> tuple[str | None, Any]:
    """The tag and content of a container, (None, value) of a plain value."""
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise TypeError("not written by the encoder")
        return None, node
    tag, *rest = node
    if tag == "i":
        return None, int(rest[0], 16)
    return str(tag), rest[0]


def _keys(nodes: list[Any]) -> list[str]:
    return sorted(_key(_plain(node)) for node in nodes)


def _plain(node: Any) -> Any:
    tag, content = _open(node)
    if tag is None:
        return content
    if tag not in ("l", "t"):
        raise TypeError(f"a {tag} within a set")
    return [_plain(item) for item in content]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _text(node: Any) -> str:
    """A dictionary's key as JSON would write it."""
    value = _plain(node)
    return value if isinstance(value, str) else json.dumps(value)
