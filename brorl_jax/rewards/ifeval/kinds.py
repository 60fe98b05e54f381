"""The 25 kinds of verifiable instruction of IFEval (Zhou et al. 2023, arXiv 2311.07911), strict and loose.

Each kind is a predicate ``(text, **kwargs) -> bool`` under IFEval's own name and with its own keyword arguments, so
that its prompt files are read as they are. Written from the published definitions; where the published code departs
from what its instruction says, this file follows the code, so that scores compare, except in what
``docs/instruction_following.md`` lists as deviations (marked "deviation" below).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.rewards.ifeval import text as measure

Predicate = Callable[..., bool]

KINDS: dict[str, Predicate] = {}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _kind(name: str) -> Callable[[Predicate], Predicate]:
    def add(predicate: Predicate) -> Predicate:
        KINDS[name] = predicate
        return predicate

    return add


def judge(
    response: str, kinds: Sequence[str], kwargs: Sequence[Mapping[str, Any]], *, loose: bool = False
) -> list[bool]:
    """Whether the response follows each instruction.

    Args:
        response: What the user sees: no reasoning.
        kinds: IFEval's ``instruction_id_list``.
        kwargs: Its ``kwargs``, one mapping per instruction; entries that are None count as absent.
        loose: Accept an instruction if any of the eight variants of the response follows it: the response without its
            first line, without its last, without both, or whole, each with and without asterisks.

    Raises:
        ValueError: unknown kind, or missing or unusable arguments (:func:`check_instructions` finds them beforehand).
    """
    texts = [t for t in (_variants(response) if loose else [response]) if t.strip()]
    followed = []
    for predicate, arguments in check_instructions(kinds, kwargs):
        followed.append(any(predicate(t, **arguments) for t in texts))
    return followed


def check_instructions(
    kinds: Sequence[str], kwargs: Sequence[Mapping[str, Any]]
) -> list[tuple[Predicate, dict[str, Any]]]:
    """The predicate and the arguments of each instruction.

    Raises:
        ValueError: unknown kind, or missing, surplus or unusable arguments; says which.
    """
    if not kinds or len(kinds) != len(kwargs):
        raise ValueError(f"{len(kinds)} instructions with {len(kwargs)} sets of arguments; there must be one set each")
    found = []
    for kind, given in zip(kinds, kwargs, strict=True):
        if kind not in KINDS:
            raise ValueError(f"unknown instruction {kind!r}; known: {', '.join(KINDS)}")
        arguments = {key: value for key, value in given.items() if value is not None}
        wanted = list(inspect.signature(KINDS[kind]).parameters)[1:]
        if set(arguments) != set(wanted):
            raise ValueError(f"instruction {kind!r} takes {wanted or 'no arguments'}, got {sorted(arguments)}")
        for key, value in arguments.items():
            if key.endswith("relation") and value not in ("less than", "at least"):
                raise ValueError(f"instruction {kind!r}: {key} must be 'less than' or 'at least', got {value!r}")
        found.append((KINDS[kind], arguments))
    return found


def accuracies(judged: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """IFEval's two figures over many prompts: (prompt level, instruction level).

    Prompt level is the share of prompts with every instruction followed, instruction level the share of all
    instructions. Give it strict or loose verdicts of :func:`judge`.
    """
    flat = [followed for one in judged for followed in one]
    if not flat:
        raise ValueError("no verdicts to average")
    return sum(all(one) for one in judged) / len(judged), sum(flat) / len(flat)


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cuts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cuts, *(cut.replace("*", "") for cut in cuts)]))


def _compare(count: float, relation: str, bound: float) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _occurrences(word: str, text: str) -> int:
    # Literally (deviation: the original reads keywords as regular expressions; none of its prompts has a special sign).
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


# --- keywords ----------------------------------------------------------------------------------------------------


@_kind("keywords:existence")
def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(_occurrences(word, text) for word in keywords)


@_kind("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_occurrences(keyword.strip(), text), relation, frequency)


@_kind("keywords:forbidden_words")
def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


@_kind("keywords:letter_frequency")
def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    # Any sign (deviation: the original replaces one that is no letter, "#" or "!", by a random letter).
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


# --- language and case ---------------------------------------------------------------------------------------------


@_kind("language:response_language")
def _response_language(text: str, language: str) -> bool:
    # Deviation: text in no recognisable language ("1234") is not in this one; the original accepts it.
    return measure.language(text) == language


@_kind("change_case:english_capital")
def _english_capital(text: str) -> bool:
    return text.isupper() and measure.language(text) in ("en", None)


@_kind("change_case:english_lowercase")
def _english_lowercase(text: str) -> bool:
    return text.islower() and measure.language(text) in ("en", None)


@_kind("change_case:capital_word_frequency")
def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(measure.capital_words(text), capital_relation, capital_frequency)


# --- length --------------------------------------------------------------------------------------------------------


@_kind("length_constraints:number_sentences")
def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(measure.sentences(text), relation, num_sentences)


@_kind("length_constraints:number_words")
def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(measure.words(text), relation, num_words)


@_kind("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs parted by ``***``; only the first and the last part may be empty."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


@_kind("length_constraints:nth_paragraph_first_word")
def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs parted by two line ends. Empty ones don't count, but do shift the n-th (as in the original)."""
    parts = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, parts)) != num_paragraphs or nth_paragraph > num_paragraphs or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


# --- content and format --------------------------------------------------------------------------------------------


@_kind("detectable_content:number_placeholders")
def _number_placeholders(text: str, num_placeholders: int) -> bool:
    """``[...]`` within one line."""
    count = 0
    for line in text.split("\n"):
        position = line.find("[")
        while position >= 0 and (end := line.find("]", position)) >= 0:
            count += 1
            position = line.find("[", end)
    return count >= num_placeholders


@_kind("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


@_kind("detectable_format:number_bullet_lists")
def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with ``-`` or with a single ``*``."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


@_kind("detectable_format:constrained_response")
def _constrained_response(text: str) -> bool:
    return any(option in text for option in OPTIONS)


@_kind("detectable_format:number_highlighted_sections")
def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """``*...*`` within one line; ``**...**`` is counted by a pass of its own."""
    single = [found.strip("*").strip() for found in re.findall(r"\*[^\n*]*\*", text)]
    double = [found[2:-2].strip() for found in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, [*single, *double])) >= num_highlights


@_kind("detectable_format:multiple_sections")
def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections


@_kind("detectable_format:json_format")
def _json_format(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):  # nested too deeply to read
        return False
    return True


@_kind("detectable_format:title")
def _title(text: str) -> bool:
    """``<<...>>`` within one line, with something in it."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and start + 3 <= end and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


# --- the response as a whole ---------------------------------------------------------------------------------------


@_kind("combination:two_responses")
def _two_responses(text: str) -> bool:
    """Two different responses parted by ``******``; only the first and the last part may be empty."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


@_kind("combination:repeat_prompt")
def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_kind("startend:end_checker")
def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_kind("startend:quotation")
def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_kind("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text
