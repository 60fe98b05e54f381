"""A response that follows given instructions: dull, but right by construction.

It is the "gold answer" of instruction following, for the start-up self-test of the grader and for the tests. Nothing
here looks at the checkers: what an instruction asks for is built, not searched for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.rewards.ifeval.kinds import OPTIONS

# Plain English without commas, capitals other than the first letter, digits or one-letter words.
_FILLER = (
    "The old bridge crosses the river near our village and people walk over it every morning.",
    "Some friends like to meet there when the weather is warm and the market is open.",
    "They talk about their work while children run along the water and feed the ducks.",
    "In winter the stones are wet and everyone moves more slowly than before.",
)
_WORDS = re.findall(r"[a-z]+", " ".join(_FILLER).lower())

# One plain sentence about the weather in each language that IFEval's prompts ask for, and a few more.
LANGUAGES = {
    "ar": "الطقس جميل اليوم والأطفال يلعبون في الحديقة مع أصدقائهم بعد المدرسة.",
    "bg": "Времето днес е хубаво и децата играят в парка с приятелите си след училище.",
    "bn": "আজ আবহাওয়া খুব সুন্দর এবং শিশুরা স্কুলের পরে বন্ধুদের সাথে বাগানে খেলছে।",
    "de": "Das Wetter ist heute schön und die Kinder spielen nach der Schule mit ihren Freunden im Garten.",
    "en": _FILLER[0],
    "es": "Hoy hace buen tiempo y los niños juegan en el jardín con sus amigos después de la escuela.",
    "fa": "امروز هوا خوب است و بچه‌ها بعد از مدرسه با دوستان خود در باغ بازی می‌کنند.",
    "fi": "Sää on tänään kaunis ja lapset leikkivät koulun jälkeen ystäviensä kanssa puutarhassa.",
    "fr": "Il fait beau aujourd'hui et les enfants jouent dans le jardin avec leurs amis après les cours.",
    "gu": "આજે હવામાન સારું છે અને બાળકો શાળા પછી મિત્રો સાથે બગીચામાં રમે છે.",
    "hi": "आज मौसम बहुत अच्छा है और बच्चे स्कूल के बाद अपने दोस्तों के साथ बगीचे में खेल रहे हैं।",
    "it": "Oggi il tempo è bello e i bambini giocano nel giardino con i loro amici dopo la scuola.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ಮಕ್ಕಳು ಶಾಲೆಯ ನಂತರ ಸ್ನೇಹಿತರೊಂದಿಗೆ ತೋಟದಲ್ಲಿ ಆಡುತ್ತಿದ್ದಾರೆ.",
    "ko": "오늘은 날씨가 좋아서 아이들이 학교가 끝난 뒤에 친구들과 공원에서 놀고 있습니다.",
    "mr": "आज हवामान खूप छान आहे आणि मुले शाळेनंतर आपल्या मित्रांसोबत बागेत खेळत आहेत.",
    "ne": "आज मौसम राम्रो छ र केटाकेटीहरू विद्यालयपछि आफ्ना साथीहरूसँग बगैंचामा खेलिरहेका छन्।",
    "pa": "ਅੱਜ ਮੌਸਮ ਬਹੁਤ ਵਧੀਆ ਹੈ ਅਤੇ ਬੱਚੇ ਸਕੂਲ ਤੋਂ ਬਾਅਦ ਦੋਸਤਾਂ ਨਾਲ ਬਾਗ ਵਿੱਚ ਖੇਡ ਰਹੇ ਹਨ।",
    "pt": "Hoje o tempo está bom e as crianças brincam no jardim com os seus amigos depois da escola.",
    "ru": "Сегодня хорошая погода и дети играют в саду со своими друзьями после школы.",
    "sw": "Leo hali ya hewa ni nzuri na watoto wanacheza bustanini pamoja na rafiki zao baada ya shule.",
    "ta": "இன்று வானிலை நன்றாக உள்ளது மற்றும் குழந்தைகள் பள்ளிக்குப் பிறகு நண்பர்களுடன் விளையாடுகிறார்கள்.",
    "te": "ఈ రోజు వాతావరణం చాలా బాగుంది మరియు పిల్లలు పాఠశాల తర్వాత స్నేహితులతో తోటలో ఆడుతున్నారు.",
    "th": "วันนี้อากาศดีและเด็กๆกำลังเล่นกับเพื่อนในสวนหลังเลิกเรียน",
    "ur": "آج موسم بہت اچھا ہے اور بچے اسکول کے بعد اپنے دوستوں کے ساتھ باغ میں کھیل رہے ہیں۔",
    "vi": "Hôm nay thời tiết đẹp và trẻ em chơi trong vườn với bạn bè sau giờ học.",
}


@dataclasses.dataclass
class _Plan:
    """The instructions by kind (each kind at most twice, so a list), and what to avoid."""

    asked: dict[str, list[Mapping[str, Any]]]
    few_letters: str
    forbidden: set[str]
    cased: bool

    def all(self, kind: str) -> list[Mapping[str, Any]]:
        return self.asked.get(kind, [])

    def most(self, kind: str, key: str, relation: str = "") -> int:
        """The largest number asked for by ``kind`` (with relation "at least", where it has one); 0 if none."""
        return max((a[key] for a in self.all(kind) if not relation or a[relation] == "at least"), default=0)


def render(kinds: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> str | None:
    """A response that follows all instructions; None where two of them can't be built together.

    Args:
        kinds: IFEval's ``instruction_id_list``.
        kwargs: One mapping of arguments per instruction, None standing for absent.
    """
    plan = _plan(kinds, kwargs)
    if plan is None:
        return None
    if "detectable_format:constrained_response" in plan.asked:
        return OPTIONS[0]
    if "detectable_format:json_format" in plan.asked:
        return json.dumps({"text": _extras(plan, "") or "yes"}, ensure_ascii=False)
    body = _body(plan)
    if "combination:two_responses" in plan.asked:
        body = f"{body}\n\n******\n\n{_sentence(plan)} {body}"
    return _whole(plan, body)


def _plan(kinds: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> _Plan | None:
    asked: dict[str, list[Mapping[str, Any]]] = {}
    for kind, given in zip(kinds, kwargs, strict=True):
        asked.setdefault(kind, []).append({k: v for k, v in given.items() if v is not None})
    languages = {a["language"] for a in asked.get("language:response_language", [])}
    if len(languages) > 1 or languages - set(LANGUAGES):
        return None
    capital, lower = "change_case:english_capital", "change_case:english_lowercase"
    if capital in asked and (lower in asked or asked.get("change_case:capital_word_frequency")):
        return None
    few = [a for a in asked.get("keywords:letter_frequency", []) if a["let_relation"] == "less than"]
    words = {w.lower() for a in asked.get("keywords:forbidden_words", []) for w in a["forbidden_words"]}
    words |= {a["keyword"].lower() for a in asked.get("keywords:frequency", []) if a["relation"] == "less than"}
    for repeated in (a["prompt_to_repeat"].lower() for a in asked.get("combination:repeat_prompt", [])):
        if any(w in repeated for w in words) or ("," in repeated and "punctuation:no_comma" in asked):
            return None  # the prompt itself breaks the other instruction
    return _Plan(asked, "".join(a["letter"].lower() for a in few), words, capital in asked or lower in asked)


def _sentence(plan: _Plan, index: int = 0) -> str:
    """A sentence in the language asked for, without what is to be avoided."""
    for asked in plan.all("language:response_language"):
        if asked["language"] != "en":
            return LANGUAGES[asked["language"]]
    plain = _FILLER[index % len(_FILLER)]
    bad = re.compile("|".join([*map(re.escape, plan.few_letters), *map(re.escape, plan.forbidden)]) or "(?!)")
    if bad.search(plain.lower()):
        plain = " ".join(w for w in _WORDS if not bad.search(w)) or "1 2 3"
        plain = f"{' '.join(plain.split()[:12]).capitalize()}."
    return plain


def _shorten(sentence: str, words: int) -> str:
    """At most so many words of it, but at least two."""
    kept = sentence.removesuffix(".").split()[: max(words, 2)]
    return f"{' '.join(kept)}."


def _body(plan: _Plan) -> str:
    """Paragraphs, everything that is counted, then sentences and words until there are exactly enough."""
    first = plan.all("length_constraints:nth_paragraph_first_word")
    count = plan.most("length_constraints:number_paragraphs", "num_paragraphs") or 1
    parts = [_sentence(plan, i) for i in range(first[0]["num_paragraphs"] if first else count)]
    for asked in first:
        parts[asked["nth_paragraph"] - 1] = f"{asked['first_word'].capitalize()} is how this begins."
    sentences = plan.most("length_constraints:number_sentences", "num_sentences", "relation")
    if plan.cased or plan.all("combination:repeat_prompt"):
        sentences = max(sentences, 4)  # enough of its language to be recognised
    limits = [a["num_words"] for a in plan.all("length_constraints:number_words") if a["relation"] == "less than"]
    repeated = " ".join(a["prompt_to_repeat"] for a in plan.all("combination:repeat_prompt"))
    room = min(limits, default=100_000) - 1 - len(re.findall(r"\w+", repeated))
    parts[0] = _shorten(parts[0], room // max(sentences, 1))
    for i in range(len(parts), sentences):
        parts[-1] += f" {_shorten(_sentence(plan, i), room // sentences)}"
    parts[-1] = _extras(plan, parts[-1])
    text = ("\n\n" if first else "\n***\n").join(parts)
    missing = plan.most("length_constraints:number_words", "num_words", "relation") - len(re.findall(r"\w+", text))
    if missing > 0:
        vocabulary = re.findall(r"\w+", _sentence(plan).lower())
        text += "\n" + " ".join(vocabulary[i % len(vocabulary)] for i in range(missing))
    return text


def _extras(plan: _Plan, text: str) -> str:
    """``text`` with the keywords, marks and lists that are counted, each on lines of its own."""
    lines = [text] if text else []
    for asked in plan.all("keywords:existence"):
        lines.append(" ".join(asked["keywords"]))
    for asked in plan.all("keywords:frequency"):
        if asked["relation"] == "at least":
            lines.append(" ".join([asked["keyword"]] * asked["frequency"]))
    for asked in plan.all("keywords:letter_frequency"):
        if asked["let_relation"] == "at least":
            lines.append(" ".join([asked["letter"] * 2] * (asked["let_frequency"] // 2 + 1)))
    if n := plan.most("change_case:capital_word_frequency", "capital_frequency", "capital_relation"):
        lines.append(" ".join(["NOTE"] * n))
    for asked in plan.all("detectable_format:multiple_sections"):
        lines += [f"{asked['section_spliter']} {i + 1}" for i in range(asked["num_sections"])]
    if n := plan.most("detectable_content:number_placeholders", "num_placeholders"):
        lines.append(" ".join(["[name]"] * n))
    if n := plan.most("detectable_format:number_highlighted_sections", "num_highlights"):
        lines.append("See " + " ".join(["*this*"] * n))
    if n := plan.most("detectable_format:number_bullet_lists", "num_bullets"):
        lines += ["- this"] * n
    for asked in plan.all("detectable_content:postscript"):
        lines.append(f"{asked['postscript_marker']} that is all")
    return "\n".join(lines)


def _whole(plan: _Plan, body: str) -> str:
    """What concerns the response as a whole: its beginning, its case, its end."""
    if "detectable_format:title" in plan.asked:
        body = f"<<This>>\n{body}"
    for asked in plan.all("combination:repeat_prompt"):
        body = f"{asked['prompt_to_repeat']}\n{body}"
    for asked in plan.all("startend:end_checker"):
        body = f"{body}\n{asked['end_phrase']}"
    if "change_case:english_capital" in plan.asked:
        body = body.upper()
    if "change_case:english_lowercase" in plan.asked:
        body = body.lower()
    return f'"{body}"' if "startend:quotation" in plan.asked else body
