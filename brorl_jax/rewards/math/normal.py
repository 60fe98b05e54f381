r"""One spelling for what LaTeX, Unicode and plain text write in many ways. No equality is decided here.

Gold and answer go through :func:`canonical` alike. Its output is LaTeX without spacing commands, sizes, styles and
dollar signs; words stand in ``\text{...}``; ``\frac``, ``\le``, ``^\circ``, ``\%``, ``\{`` are the only spellings.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from fractions import Fraction

FUNCTIONS = (
    "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan", "cot", "sec", "csc",
    "log", "ln", "exp",
)  # fmt: skip
_NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_NESTED = r"(?:[^{}]|\{[^{}]*\})*"
_BARE = r"(\d|(?<=\s)[a-zA-Z]|\\pi(?![a-zA-Z]))"  # an argument without braces
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
        "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
        "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ",
        "√": r"\sqrt ", "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "µ": r"\mu ", "μ": r"\mu ",
        "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "′": "'", "’": "'", "Å": r"\text{angstrom}",
    }
)  # fmt: skip
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_ENCLOSURES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_WORDS = {
    "empty": r"\emptyset",
    "no solution": r"\emptyset",
    "no solutions": r"\emptyset",
    "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset",
    "empty set": r"\emptyset",
    "the empty set": r"\emptyset",
    "dne": r"\text{undefined}",
    "does not exist": r"\text{undefined}",
    "infinity": r"\infty",
    "positive infinity": r"\infty",
    "negative infinity": r"-\infty",
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    **{w: str(n) for n, w in enumerate(_NUMBER_WORDS)},
}


def _rules(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_LATEX = _rules(
    (r"\\(?:left|right|middle)(?![a-zA-Z])\s*\.?|\\[bB]igg?[lrm]?(?![a-zA-Z])", ""),
    (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits)(?![a-zA-Z])", ""),
    (r"(?<=\d)(?:\{,\}|,?\\[,!;: ])(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\(?:[,;:!> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|hspace\{[^{}]*\})|(?<!\\)~", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\d?tbinom(?![a-zA-Z])|\\dbinom(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
    (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"\\(?:simeq|approxeq)(?![a-zA-Z])", r"\\approx"),
    (r"(?<!\\)<=", r"\\le "),
    (r"(?<!\\)>=", r"\\ge "),
    (r"!=", r"\\ne "),
    (r"\\(?:lt)(?![a-zA-Z])", "<"),
    (r"\\(?:gt)(?![a-zA-Z])", ">"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
    (r"\\(?:infin|infinity)(?![a-zA-Z])", r"\\infty"),
    (r"\^\s*\{?\s*(?:\\top|\\intercal)(?![a-zA-Z])\s*\}?", "^T"),
    (r"\^\s*\{?\s*(?:\\ast|\\star|\*)(?![a-zA-Z])\s*\}?", r"^{\\star}"),
    (r"(?<!\^\{)\\(?:ast|star|centerdot)(?![a-zA-Z])", r"\\cdot"),
    (r"^\s*\\approx(?![a-zA-Z])", ""),
    (r"\\setminus(?![a-zA-Z])|\\smallsetminus(?![a-zA-Z])", r"\\backslash"),
    (r"\\(?:degree|degrees|deg)(?![a-zA-Z])", r"^\\circ"),
    (r"\^\s*\{\s*\\circ\s*\}|\{\s*\}\s*\^\\circ", r"^\\circ"),
    (r"\^\s*\{?\s*(?:\\prime\s*){2}\}?", "''"),
    (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    (r"\\(?:dots|ldots|cdots|hdots)(?![a-zA-Z])", r"\\dots"),
    (r"\\mathds|\\mathbf(?=\{[RZQNC]\})", r"\\mathbb"),
    (r"\\(?:mathbf|boldsymbol|mathit|mathnormal|bm|vec|overrightarrow|mathsf|hat)\s*\{(" + _NESTED + r")\}", r"\1"),
    (r"\\mathrm\s*\{\s*([deiT])\s*\}", r"\1"),
    (r"\\(?:bf|rm|it|mathrm|vec|mathbf|hat)\s+(?=[a-zA-Z])", ""),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mbox|operatorname\*?|ce|unit|si)(?=\s*\{)", r"\\text"),
    (r"(?<=\d)\s*(?:\\text\s*\{\s*)?([aApP])\.?[mM](?:\.|(?![a-zA-Z]))\s*\}?", r"\\text{\1m}"),
    (r"\\(?:phantom|label|tag\*?|color)\s*\{[^{}]*\}", ""),
    (r"\\text\s*\{\s*\}", ""),
)
_TEXTS = _rules(
    (r"\\text\s*\{\s*(" + "|".join(FUNCTIONS) + r")\s*\}", r"\\\1 "),
)
_PLAIN = _rules(
    (r"\bnp\.|\bmath\.", ""),
    (r"\*\*", "^"),
    (r"(?<![a-zA-Z\\])(" + "|".join((*FUNCTIONS, "sqrt")) + r")(?![a-zA-Z])", r"\\\1"),
    (r"(?<![a-zA-Z\\])(max|min|gcd|lcm|det|lim)(?=\s*[(_{])", r"\\\1"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\(sqrt)\s*\(([^()]*)\)", r"\\\1{\2}"),
    (r"\\exp\s*\{(" + _NESTED + r")\}", r"e^{\1}"),
    (r"\\sqrt\s+(\d+)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*([\da-zA-Z])", r"\\sqrt{\1}"),
    (r"\\(frac|binom)\s*" + _BARE + r"\s*" + _BARE, r"\\\1{\2}{\3}"),
    (r"\\(frac|binom)\s*" + _BARE + r"\s*\{", r"\\\1{\2}{"),
    (r"(\\(?:frac|binom)\s*\{" + _NESTED + r"\})\s*" + _BARE, r"\1{\2}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", r"\1\\times10^{\2}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\^)", r"\\times "),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=\d)\.(?![\d.\\])", ""),
    (r"\*", r"\\cdot "),
    (r"(?<![a-zA-Z\\])inf(?:inity)?(?![a-zA-Z])", r"\\infty "),
    (r"\\log_10(?!\d)", r"\\log_{10}"),
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,^_])[1-9]\d{0,2}(?: \d{3})+(?![\d ])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{\s*(\d+)\s*\}", re.ASCII)
_MIXED = re.compile(
    r"(?<![\w.}^_\\])(-?)\s*(\d+)(?:\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s+(\d+)\s*/\s*(\d+)(?!\d))", re.ASCII
)
_NESTED_TEXT = re.compile(r"\\text\s*\{(" + _NESTED + r")\}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*\)?")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_CURRENCY = re.compile(r"^([+-]?)\s*\\\$\s*(\d[\d,.]*)$")


@functools.lru_cache(maxsize=16_384)
def canonical(text: str) -> str:
    """``text`` in the one spelling; idempotent on its own output as far as equality needs."""
    text = unicodedata.normalize("NFC", text.translate(_UNICODE))
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text)
    text = _unwrap(unicodedata.normalize("NFKC", text))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _NESTED_TEXT.sub(lambda m: rf"\text{{{m[1].replace('{', '').replace('}', '')}}}", text)
    text = " ".join(re.sub(r"(?<!\\)\$", "", text).split())
    text = text.rstrip(" .,;:").removesuffix("\\").strip() if not text.endswith(r"\}") else text
    if money := _CURRENCY.match(text):
        text = f"{money[1]}{money[2]}\\text{{dollars}}"
    text = text.replace(r"\$", "").replace(r"\%", "%").replace("%", r"\%")
    text = re.sub(r"\s*\\text\{\s*(?:percent|per cent|pct)\s*\}|\s+(?:percent|per cent)\b", r"\\%", text)
    text = re.sub(r"\s*\\text\{\s*degrees?\s*\}|(?<=[\d}])\s+degrees?\b", r"^\\circ", text)
    if word := _WORDS.get(words(text).casefold()):
        return word
    if letter := _LETTER.fullmatch(words(text)):
        return letter[1]
    if is_prose(text):
        return rf"\text{{{words(text)}}}"
    return _mathematics(text)


def _unwrap(text: str) -> str:
    """Without the marks that only say "here is mathematics" or "here is the answer" around the whole text."""
    for _ in range(8):
        before, text = text, text.strip()
        for opening, closing in _ENCLOSURES:
            inner = text[len(opening) : len(text) - len(closing)]
            if len(text) >= len(opening) + len(closing) and text == opening + inner + closing and opening not in inner:
                text = inner.strip()
        if (box := _BOXED.fullmatch(text)) and _balanced(box[1]):
            text = box[1].strip()
        if text == before:
            break
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def words(text: str) -> str:
    r"""The words of a text that may stand in ``\text``, without braces and with single spaces."""
    text = _TEXT.sub(r" \1 ", text)
    return " ".join(text.replace("{", " ").replace("}", " ").split()).strip(" .")


_SHORT_WORDS = frozenset(("yes", "no", "odd", "all", "red", "up"))
_PROSE = re.compile(r"[A-Za-z][A-Za-z'\- ]*|[A-Za-z]{3}[A-Za-z'\- ]* \d+")
_JOINED = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])")


def is_prose(text: str) -> bool:
    """Whether ``text`` is words only: ``Evelyn``, ``yes``, ``both A and B``; not ``xy``, which is a product."""
    if re.fullmatch(r"\\text\s*\{[^{}]*\}", text):
        inner = words(text)
        return len(inner) > 1 and not re.search(r"^[\d.]|[=<>+^_\\]", inner)
    bare = words(text)
    if not _PROSE.fullmatch(bare) or _JOINED.search(bare):
        return False
    parts = bare.split()
    if parts[0].casefold() in (*FUNCTIONS, "sqrt"):
        return False
    return max(map(len, parts)) >= 4 or bare.casefold() in _SHORT_WORDS


def _mathematics(text: str) -> str:
    """Plain-text and sloppy spellings of formulas, outside of ``\\text``."""
    pieces = re.split(r"(\\text\s*\{[^{}]*\})", text)
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = rf"\text{{{' '.join(piece[piece.index('{') + 1 : -1].split())}}}"
            for pattern, replacement in _TEXTS:
                pieces[i] = pattern.sub(replacement, pieces[i])
            continue
        for pattern, replacement in _PLAIN:
            piece = pattern.sub(replacement, piece)
        piece = _SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ","), piece)
        piece = _REPEATING.sub(_repeating, piece)
        pieces[i] = _MIXED.sub(_mixed, piece)
    return " ".join("".join(pieces).split())


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, cycle = match.groups()
    if len(match[0]) > 60:
        return match[0]
    nines = int("9" * len(cycle)) * 10 ** len(fixed)
    value = Fraction(int((whole or "0") + fixed + cycle) - int((whole or "0") + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(match: re.Match[str]) -> str:
    """``2\\frac{1}{3}`` and ``2 1/3`` are 7/3; an improper fraction behind a number is a factor and stays."""
    sign, whole, *parts = match.groups()
    top, bottom = (int(p) for p in parts if p is not None)
    if not 0 < top < bottom or len(match[0]) > 60:
        return match[0]
    return rf"{sign}\frac{{{int(whole) * bottom + top}}}{{{bottom}}}"


def compact(text: str) -> str:
    """``canonical`` text without white space, for comparison letter by letter; commands and numbers keep their ends."""
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])|(?<=\d) (?=\d)", "\\1\x00", text).replace(" ", "").replace("\x00", " ")
    return re.sub(r"(?<=[\^_])\{(.)\}", r"\1", text)
