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

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[ \t*_#>]*(?:final[ \t]+)?answer[ \t*_]*:[ \t*_]*(\S.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE
)
_FENCE = re.compile(r" {0,3}(?P<ticks>`{3,})[ \t]*(?P<label>[^\s]*).*")
_PYTHON = ("", "python", "python3", "py", "py3")
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
    """Content of the closed ``\\boxed{...}`` or ``\\fbox{...}`` that begins last; escaped braces don't count.

    One pass, so that a response full of unclosed boxes costs no more than any other. Truncated with a box still open,
    or within the opening of one, there is no answer.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int] = []  # where the content of each begins; negative: a brace that is no box
    for mark in _BRACES.finditer(response):
        if len(mark[0]) == 2:  # an escaped character
            continue
        if mark[0].endswith("{"):
            open_braces.append(mark.end() if len(mark[0]) > 1 else -1)
        elif mark[0] == "}" and open_braces:
            start = open_braces.pop()
            if start >= 0 and (last is None or start > last[0]):
                last = start, mark.start()
    unfinished = any(start >= 0 for start in open_braces) or _ends_inside(response, "\\boxed{", "\\fbox{")
    return None if last is None or (truncated and unfinished) else response[slice(*last)]


def _tag(response: str, truncated: bool) -> str | None:
    """Content of the last closed ``<answer>...</answer>``."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    reopened = response.find("<answer>", max(end, 0)) >= 0 or _ends_inside(response, "<answer>")
    if start < 0 or (truncated and reopened):
        return None
    content = response[start + len("<answer>") : end]
    return None if "</answer>" in content else content


def _ends_inside(response: str, *openings: str) -> bool:
    """Whether the response breaks off within an opening delimiter."""
    return any(response.endswith(opening[:n]) for opening in openings for n in range(1, len(opening)))


def _hash(response: str, truncated: bool) -> str | None:
    """Rest of the last line that begins with ``####``."""
    found = _HASH.findall(response)
    return found[-1] if found and not truncated else None


def _answer_line(response: str, truncated: bool) -> str | None:
    """Rest of the last line that begins with ``Answer:``, in any case and with Markdown around it."""
    found = _ANSWER_LINE.findall(response)
    return found[-1] if found and not truncated else None


def _last_line(response: str, truncated: bool) -> str | None:
    lines = response.strip().splitlines()
    return lines[-1] if lines and not truncated else None


def _whole(response: str, truncated: bool) -> str | None:
    return None if truncated else response


def _code(response: str, truncated: bool) -> str | None:
    """Content of the last closed block between lines of triple backticks that is labelled Python, or not at all.

    Fences as in CommonMark: a block is closed by a line of at least as many backticks as opened it and nothing else.
    """
    last: str | None = None
    fence, label, lines = "", "", []
    for line in response.splitlines():
        match = _FENCE.fullmatch(line)
        if not fence:
            if match and "`" not in match["label"]:
                fence, label, lines = match["ticks"], match["label"].lower(), []
        elif match and not match["label"] and len(match["ticks"]) >= len(fence):
            last = "\n".join(lines) if label in _PYTHON else last
            fence = ""
        else:
            lines.append(line)
    unclosed = fence or response.rpartition("\n")[2].strip() in ("`", "``")
    return None if truncated and unclosed else last


def _code_block(gold: str) -> str:
    """A block whose fence is longer than any within."""
    ticks = max((len(m["ticks"]) + 1 for m in map(_FENCE.fullmatch, gold.splitlines()) if m), default=3)
    return f"{'`' * ticks}python\n{gold}\n{'`' * ticks}"


def _final(response: str, truncated: bool) -> str | None:
    """What a chat shows: the text after the first ``</think>``, the whole response where the model does not reason.

    Reasoning that never ends hides everything. The first end counts, so that nothing shown can be left unjudged.
    """
    reasoning, end, shown = response.partition("</think>")
    return None if truncated or (not end and "<think>" in reasoning) else shown if end else reasoning


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("boxed", _boxed, lambda gold: f"\\boxed{{{gold}}}"),
        Format("tag", _tag, lambda gold: f"<answer>{gold}</answer>"),
        Format("hash", _hash, lambda gold: f"#### {gold}"),
        Format("answer_line", _answer_line, lambda gold: f"Answer: {gold}"),
        Format("code", _code, _code_block),
        Format("last_line", _last_line, lambda gold: gold),
        Format("whole", _whole, lambda gold: gold),
        Format("final", _final, lambda gold: gold),
    )
}
