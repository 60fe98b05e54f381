"""Prompts for instruction following, made from a seed: a writing task and some of IFEval's verifiable instructions.

All 25 kinds occur, in wordings of our own, with arguments drawn for each prompt. Instructions that contradict each
other are never drawn together: :func:`brorl_jax.rewards.ifeval.render` can follow every prompt. Nothing is downloaded,
and no text is shared with IFEval's own prompts.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

from brorl_jax.rewards.ifeval import LANGUAGES, OPTIONS

MOST = 5

TASKS = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write a letter to a friend about {}.",
    "Write a blog post about {}.",
    "Write a speech about {}.",
    "Write a dialogue between two neighbours about {}.",
    "Write an advertisement that has to do with {}.",
    "Explain {} to a ten-year-old child.",
    "Describe {} to somebody who has never heard of it.",
    "Give advice to a beginner who is interested in {}.",
    "Summarise what most people get wrong about {}.",
    "Plan a school lesson about {}.",
    "Make up a riddle whose answer is {}.",
    "Discuss what is good and what is bad about {}.",
    "Imagine how {} will look in a hundred years.",
)
TOPICS = re.split(
    r";\s+",
    """growing tomatoes on a balcony; a lighthouse in a storm; learning to juggle; the history of bread; night
    trains; a lost umbrella; how bees find flowers; moving to a smaller town; a broken bicycle; the first snow
    of the year; solar eclipses; an old piano; saving electricity at home; street musicians; a mountain hut; how
    glass is made; a chess club for children; rivers that change their course; repairing shoes; a very slow
    elevator; whales; keeping a diary; the invention of the zip; a market in the morning; learning sign
    language; volcanoes; a museum of ordinary things; sleeping in a tent; how clouds form; a family recipe;
    public libraries; sailing alone; an argument about a fence; robots in the kitchen; the colour blue;
    migrating birds; the last day of school; an island without cars; sleep and memory; old maps; a choir that
    cannot sing; how bridges carry weight; wind turbines; a dog that fears water; planting a hedge; the smell of
    rain; a night shift at a bakery; learning to swim as an adult; deserts; a letter that arrived too late; how
    vaccines work; puppet theatre""",
)
WORDS = re.findall(
    r"\w+",
    """window garden engine letter silver winter market teacher mirror ladder harbor candle journey shadow thunder
    pocket village ticket blanket copper meadow signal lantern bottle""",
)
FIRST_WORDS = ("today", "finally", "nobody", "perhaps", "yesterday", "imagine", "sometimes", "everything")
ENDINGS = (
    "That is all there is to say.",
    "Let me know what you think.",
    "And nobody ever spoke of it again.",
    "Thank you for reading this far.",
)
NAMES = {
    **{"ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "de": "German", "es": "Spanish", "fa": "Persian"},
    **{"fi": "Finnish", "fr": "French", "gu": "Gujarati", "hi": "Hindi", "it": "Italian", "kn": "Kannada"},
    **{"ko": "Korean", "mr": "Marathi", "ne": "Nepali", "pa": "Punjabi", "pt": "Portuguese", "ru": "Russian"},
    **{"sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "ur": "Urdu", "vi": "Vietnamese"},
}
assert set(NAMES) | {"en"} == set(LANGUAGES)


@dataclasses.dataclass(frozen=True)
class Instructed:
    """A prompt and the instructions in it, as :func:`brorl_jax.rewards.ifeval.judge` takes them."""

    text: str
    kinds: list[str]
    kwargs: list[dict[str, Any]]


@dataclasses.dataclass
class _Draw:
    """What the instructions of one prompt are drawn from: no word is used twice."""

    rng: random.Random
    task: str
    words: list[str]

    def relation(self) -> str:
        return self.rng.choice(["at least", "less than"])


Maker = Callable[[_Draw], tuple[dict[str, Any], list[str]]]
_MAKERS: dict[str, Maker] = {}


def _kind(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        _MAKERS[name] = maker
        return maker

    return add


def make(seed: int, most: int = 3) -> Instructed:
    """The prompt of a seed, with 1 to ``most`` instructions of different kinds; a pure function of both."""
    rng = random.Random(f"instructions/{seed}")
    topic = rng.choice(TOPICS)
    task = rng.choice(TASKS).format(topic)
    draw = _Draw(rng, task, rng.sample(WORDS, len(WORDS)))
    wanted, kinds = rng.randint(1, most), []
    for kind in rng.sample(sorted(_MAKERS), len(_MAKERS)):
        if len(kinds) < wanted and all(_agree(kind, other) for other in kinds):
            kinds.append(kind)
    made = [_MAKERS[kind](draw) for kind in kinds]
    parts = [task, *(rng.choice(wordings) for _, wordings in made)]
    if "detectable_format:constrained_response" in kinds:
        parts[0] = f"Would you read a long book about {topic}?"
    return Instructed(rng.choice([" ", "\n"]).join(parts), kinds, [kwargs for kwargs, _ in made])


# --- what goes together ----------------------------------------------------------------------------------------------

_WORDED = {"keywords:existence", "keywords:forbidden_words"}
_CASES = {"change_case:english_capital", "change_case:english_lowercase", "change_case:capital_word_frequency"}
_ONLY_WITH = {  # kinds that shape the whole response, and all that they leave room for
    "detectable_format:constrained_response": set(),
    "detectable_format:json_format": {*_WORDED, "keywords:frequency"},
    "combination:two_responses": {*_WORDED, "punctuation:no_comma"},
    "combination:repeat_prompt": {
        *("length_constraints:number_sentences", "length_constraints:number_paragraphs", "startend:end_checker"),
        *("detectable_format:number_bullet_lists", "detectable_format:number_highlighted_sections"),
        *("detectable_content:postscript", "detectable_content:number_placeholders"),
    },
    "language:response_language": {
        *("length_constraints:number_paragraphs", "punctuation:no_comma", "startend:quotation"),
    },
}
_APART = [  # no two of a set together
    _CASES,
    {"length_constraints:number_sentences", "length_constraints:number_words"},
    {"length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word"},
    {"keywords:letter_frequency", "keywords:frequency"},
    *({case, "detectable_format:multiple_sections"} for case in sorted(_CASES)),
    *({"length_constraints:nth_paragraph_first_word", other} for other in ("detectable_format:title",)),
]


def _agree(a: str, b: str) -> bool:
    alone = all(other in _ONLY_WITH[kind] for kind, other in ((a, b), (b, a)) if kind in _ONLY_WITH)
    return alone and not any({a, b} <= group for group in _APART)


# --- the kinds -------------------------------------------------------------------------------------------------------


@_kind("keywords:existence")
def _existence(draw: _Draw):
    words = [draw.words.pop() for _ in range(draw.rng.randint(1, 3))]
    listed = ", ".join(words)
    return {"keywords": words}, [f"Use these words: {listed}.", f"Somewhere in your text, mention: {listed}."]


@_kind("keywords:frequency")
def _frequency(draw: _Draw):
    word, n, relation = draw.words.pop(), draw.rng.randint(2, 4), draw.relation()
    kwargs = {"keyword": word, "frequency": n, "relation": relation}
    return kwargs, [f'The word "{word}" must occur {relation} {n} times.', f'Use "{word}" {relation} {n} times.']


@_kind("keywords:forbidden_words")
def _forbidden_words(draw: _Draw):
    words = [draw.words.pop() for _ in range(draw.rng.randint(1, 4))]
    listed = ", ".join(words)
    return {"forbidden_words": words}, [f"Avoid these words: {listed}.", f"None of these words may occur: {listed}."]


@_kind("keywords:letter_frequency")
def _letter_frequency(draw: _Draw):
    relation = draw.relation()
    letter, n = draw.rng.choice("jqxz" if relation == "less than" else "abcdefghklmoprstuvw"), draw.rng.randint(4, 20)
    kwargs = {"letter": letter, "let_frequency": n, "let_relation": relation}
    return kwargs, [
        f"The letter {letter} must occur {relation} {n} times.",
        f"Write the letter {letter} {relation} {n} times in all.",
    ]


@_kind("language:response_language")
def _response_language(draw: _Draw):
    code = draw.rng.choice(sorted(NAMES))
    return {"language": code}, [f"Answer in {NAMES[code]} only.", f"Your whole text must be in {NAMES[code]}."]


@_kind("change_case:english_capital")
def _english_capital(draw: _Draw):
    return {}, ["Write in English and in capital letters only.", "Use English, and no letter in lower case."]


@_kind("change_case:english_lowercase")
def _english_lowercase(draw: _Draw):
    return {}, ["Write in English and in lower case only.", "Use English, and no capital letter at all."]


@_kind("change_case:capital_word_frequency")
def _capital_word_frequency(draw: _Draw):
    n, relation = draw.rng.randint(2, 10), draw.relation()
    kwargs = {"capital_frequency": n, "capital_relation": relation}
    return kwargs, [
        f"Write {relation} {n} words in capital letters.",
        f"The number of words all in capitals must be {relation} {n}.",
    ]


@_kind("length_constraints:number_sentences")
def _number_sentences(draw: _Draw):
    n, relation = draw.rng.randint(6, 15), draw.relation()
    return {"num_sentences": n, "relation": relation}, [
        f"Use {relation} {n} sentences.",
        f"Write {relation} {n} sentences.",
    ]


@_kind("length_constraints:number_words")
def _number_words(draw: _Draw):
    relation = draw.relation()
    n = 10 * draw.rng.randint(15, 40) if relation == "less than" else 10 * draw.rng.randint(5, 30)
    return {"num_words": n, "relation": relation}, [f"Use {relation} {n} words.", f"Write {relation} {n} words."]


@_kind("length_constraints:number_paragraphs")
def _number_paragraphs(draw: _Draw):
    n = draw.rng.randint(2, 5)
    return {"num_paragraphs": n}, [
        f"Write {n} paragraphs and separate them with the line ***",
        f"There must be exactly {n} paragraphs, divided by three asterisks: ***",
    ]


@_kind("length_constraints:nth_paragraph_first_word")
def _nth_paragraph_first_word(draw: _Draw):
    n = draw.rng.randint(2, 5)
    nth, word = draw.rng.randint(1, n), draw.rng.choice(FIRST_WORDS)
    kwargs = {"num_paragraphs": n, "nth_paragraph": nth, "first_word": word}
    return kwargs, [
        f"Write {n} paragraphs with one empty line between each two; paragraph {nth} must begin with the word {word}.",
        f"Your text has {n} paragraphs, separated by empty lines. The first word of paragraph {nth} is {word}.",
    ]


@_kind("detectable_content:number_placeholders")
def _number_placeholders(draw: _Draw):
    n = draw.rng.randint(1, 6)
    return {"num_placeholders": n}, [
        f"Leave at least {n} placeholders in square brackets, like [date].",
        f"There must be {n} or more placeholders such as [place], in square brackets.",
    ]


@_kind("detectable_content:postscript")
def _postscript(draw: _Draw):
    marker = draw.rng.choice(["P.S.", "P.P.S"])
    return {"postscript_marker": marker}, [
        f"Add a postscript that begins with {marker}",
        f"After the end, put a postscript starting with {marker}",
    ]


@_kind("detectable_format:number_bullet_lists")
def _number_bullet_lists(draw: _Draw):
    n = draw.rng.randint(2, 7)
    return {"num_bullets": n}, [
        f"Include exactly {n} bullet points in Markdown, like:\n* This is a point",
        f"Your text has exactly {n} Markdown bullet points, each a line that begins with * or -",
    ]


@_kind("detectable_format:constrained_response")
def _constrained_response(draw: _Draw):
    listed = " / ".join(OPTIONS)
    return {}, [f"Choose one of these answers: {listed}", f"Your answer must be one of: {listed}"]


@_kind("detectable_format:number_highlighted_sections")
def _number_highlighted_sections(draw: _Draw):
    n = draw.rng.randint(1, 5)
    return {"num_highlights": n}, [
        f"Highlight at least {n} parts with Markdown asterisks, *like this*.",
        f"At least {n} phrases must be highlighted in Markdown, as in *a phrase*.",
    ]


@_kind("detectable_format:multiple_sections")
def _multiple_sections(draw: _Draw):
    n, word = draw.rng.randint(2, 5), draw.rng.choice(["Section", "Part", "Chapter"])
    kwargs = {"section_spliter": word, "num_sections": n}
    return kwargs, [
        f"Divide the text into at least {n} sections headed {word} 1, {word} 2 and so on.",
        f"Use {n} or more sections; begin each with {word} and its number, such as {word} 1.",
    ]


@_kind("detectable_format:json_format")
def _json_format(draw: _Draw):
    return {}, ["Put the whole answer into JSON.", "The whole output must be valid JSON; Markdown ticks are allowed."]


@_kind("detectable_format:title")
def _title(draw: _Draw):
    return {}, ["Give it a title in double angular brackets, such as <<a title>>.", "Put a <<title>> in such brackets."]


@_kind("combination:two_responses")
def _two_responses(draw: _Draw):
    return {}, [
        "Give two different responses, with six asterisks and nothing else between them: ******",
        "Answer twice, in two different ways; separate the two only by ******",
    ]


@_kind("combination:repeat_prompt")
def _repeat_prompt(draw: _Draw):
    return {"prompt_to_repeat": draw.task}, [
        f'Repeat "{draw.task}" word for word, saying nothing before it; then answer.',
        f'Begin by repeating exactly "{draw.task}" and then do what it asks.',
    ]


@_kind("startend:end_checker")
def _end_checker(draw: _Draw):
    phrase = draw.rng.choice(ENDINGS)
    return {"end_phrase": phrase}, [
        f'Finish with exactly this sentence: "{phrase}" Nothing may follow it.',
        f'The very last words must be "{phrase}"',
    ]


@_kind("startend:quotation")
def _quotation(draw: _Draw):
    return {}, ["Put your whole answer in double quotation marks.", 'Begin and end your answer with the sign ".']


@_kind("punctuation:no_comma")
def _no_comma(draw: _Draw):
    return {}, ["Do not use any comma.", "There must be no comma in your text."]
