"""Answer formats: where a response states its final answer, and how a gold answer is written in that place.

An answer counts only in its agreed place. Nothing falls back to "any number in the text": a policy learns such a
shortcut within a few hundred steps. Truncated responses are held to the same rule: with a closed last delimiter and
nothing opened after it there is an answer, an unclosed one never resurrects an earlier answer, and formats without a
closing delimiter have no answer at all, since the cut may have fallen inside it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

_BOX = re.compile(r"\\boxed\s*\{")
_HASH = re.compile(r"^[ \t]*####[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Format:
    """How an answer is marked in a response.

    Attributes:
        name: Registered name, the part after the colon of a verifier's name.
        find: ``(response, truncated) -> answer text | None``.
        render: ``gold -> response`` that states exactly that answer.
    """

    name: str
    find: Callable[[str, bool], str | None]
    render: Callable[[str], str]


def _boxed(response: str, truncated: bool) -> str | None:
    """Content of the last closed ``\\boxed{...}``; escaped braces don't count."""
    last: str | None = None
    unclosed = _ends_inside(response, "\\boxed{")
    for match in _BOX.finditer(response):
        end = _closing_brace(response, match.end())
        if end is None:
            unclosed = True
        else:
            last, unclosed = response[match.end() : end], _ends_inside(response, "\\boxed{")
    return None if truncated and unclosed else last


def _closing_brace(text: str, start: int) -> int | None:
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def _tag(response: str, truncated: bool) -> str | None:
    """Content of the last closed ``<answer>...</answer>``."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    reopened = response.find("<answer>", max(end, 0)) >= 0 or _ends_inside(response, "<answer>")
    if start < 0 or (truncated and reopened):
        return None
    content = response[start + len("<answer>") : end]
    return None if "</answer>" in content else content


def _ends_inside(response: str, opening: str) -> bool:
    """Whether the response breaks off within the opening delimiter."""
    return any(response.endswith(opening[:n]) for n in range(1, len(opening)))


def _hash(response: str, truncated: bool) -> str | None:
    """Rest of the last line that begins with ``####``."""
    found = _HASH.findall(response)
    return found[-1] if found and not truncated else None


def _last_line(response: str, truncated: bool) -> str | None:
    lines = response.strip().splitlines()
    return lines[-1] if lines and not truncated else None


def _whole(response: str, truncated: bool) -> str | None:
    return None if truncated else response


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("boxed", _boxed, lambda gold: f"\\boxed{{{gold}}}"),
        Format("tag", _tag, lambda gold: f"<answer>{gold}</answer>"),
        Format("hash", _hash, lambda gold: f"#### {gold}"),
        Format("last_line", _last_line, lambda gold: gold),
        Format("whole", _whole, lambda gold: gold),
    )
}
