"""Instruction following against the verdicts of the published IFEval checkers."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax import rewards
from brorl_jax.rewards import ifeval
from brorl_jax.types import Prompt

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "ifeval_input_data.jsonl"
needs_shared = pytest.mark.skipif(not SHARED.is_file(), reason="IFEval's prompt file is not beside the repository")
VERDICTS = Path(__file__).with_name("ifeval_verdicts.json.xz")  # made by make_ifeval_verdicts.py, which says how


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in SHARED.read_text().splitlines()]


@pytest.fixture(scope="module")
def published():
    return json.loads(lzma.open(VERDICTS, "rt", encoding="utf-8").read())


def _jobs(rows, published):
    """Every distinct question once: {text: {(kind, arguments, loose): published verdict}}."""
    jobs = {}
    for row in rows:
        key = str(row["key"])
        texts = [text.strip() for text in published["common"] + published["own"][key]]  # as the published entry does
        for text, verdicts in zip(texts, published["verdicts"][key], strict=True):
            for loose, flags in enumerate(verdicts):
                flags = flags or "0" * len(row["kwargs"])  # nothing to judge
                for kind, arguments, flag in zip(row["instruction_id_list"], row["kwargs"], flags, strict=True):
                    jobs.setdefault(text, {})[kind, json.dumps(arguments), loose] = flag == "1"
    return jobs


def _deviates(text, kind, arguments, loose):
    """Where this project differs on purpose, see docs/instruction_following.md."""
    if kind == "keywords:letter_frequency":
        return not arguments["letter"].isalpha()  # the original counts a random letter instead
    if kind == "language:response_language":  # the original takes text without a letter for any language
        return not any(c.isalpha() for c in text) or (loose and not all(map(_has_letters, text.split("\n"))))
    return False


def _has_letters(line):
    return any(c.isalpha() for c in line)


@needs_shared
def test_verdicts_are_those_of_the_published_checkers(rows, published):
    """541 prompts; 48 common responses and up to 4 of their own each, every instruction strict and loose."""
    assert {kind for row in rows for kind in row["instruction_id_list"]} == set(ifeval.KINDS)
    assert len(ifeval.KINDS) == 25
    compared, positive, wrong = 0, set(), []
    for text, asked in _jobs(rows, published).items():
        for (kind, arguments, loose), expected in asked.items():
            arguments = json.loads(arguments)
            if _deviates(text, kind, arguments, loose):
                continue
            compared += 1
            positive |= {(kind, loose)} if expected else set()
            if ifeval.judge(text, [kind], [arguments], loose=bool(loose)) != [expected]:
                wrong.append((kind, arguments, bool(loose), text[:80], expected))
    assert not wrong
    assert compared > 40_000
    assert positive == {(kind, loose) for kind in ifeval.KINDS for loose in (0, 1)}  # every kind is seen to be followed


@needs_shared
def test_prompt_and_instruction_level(rows, published):
    """The published verdicts of the first own response of each prompt, averaged by hand."""
    judged, prompts, followed, total = [], 0, 0, 0
    for row in rows:
        own, flags = published["own"][str(row["key"])], published["verdicts"][str(row["key"])]
        if own and "keywords:letter_frequency" not in row["instruction_id_list"]:
            judged.append(ifeval.judge(own[1].strip(), row["instruction_id_list"], row["kwargs"]))
            strict = flags[len(published["common"]) + 1][0] or "0" * len(row["kwargs"])
            prompts += "0" not in strict
            followed += strict.count("1")
            total += len(strict)
    assert ifeval.accuracies(judged) == pytest.approx((prompts / len(judged), followed / total), abs=1e-12)
    assert ifeval.accuracies([[True, False], [True]]) == (0.5, 2 / 3)
    with pytest.raises(ValueError, match="no verdicts"):
        ifeval.accuracies([])


@needs_shared
def test_rendered_responses_follow_their_instructions(rows):
    """By our checkers, and through the verifiers' self-test; five prompts contradict themselves."""
    impossible = {row["key"] for row in rows if ifeval.render(row["instruction_id_list"], row["kwargs"]) is None}
    assert impossible == {374, 1627, 3369, 3371, 3718}
    prompts = [_prompt(row["instruction_id_list"], row["kwargs"], key=row["key"]) for row in rows]
    assert rewards.self_test(prompts, required=1.0) == len(rows) - len(impossible)


def _prompt(kinds, kwargs, verifier="ifeval", key=0):
    meta = {"instruction_id_list": kinds, "kwargs": kwargs}
    return Prompt(f"ifeval/{key}", np.zeros(1, np.int32), "", "", verifier, "ifeval", meta)


THREE = ["punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"], [{}, {}, {}]


def _score(response, verifier, kinds_and_kwargs=THREE):
    prompt = _prompt(*kinds_and_kwargs, verifier)
    answer = rewards.get(verifier).extract(response, truncated=False)
    return rewards.get(verifier).score(answer, prompt)


def test_scores_of_the_three_verifiers():
    half_right = "Sure, here it is:\nthe weather is nice today and the children play in the garden"
    assert _score(half_right, "ifeval") == 0.0
    assert _score(half_right, "ifeval_loose") == pytest.approx(2 / 3)  # without the first line
    assert _score(half_right, "ifeval_all") == 0.0
    right = '"the weather is nice today and the children play in the garden"'
    assert _score(right, "ifeval") == _score(right, "ifeval_loose") == _score(right, "ifeval_all") == 1.0


def test_only_what_follows_the_reasoning_is_judged():
    shown = '"the weather is nice today and the children play in the garden"'
    assert _score(f"<think>Commas, CAPITALS.</think>\n{shown}", "ifeval_all") == 1.0
    assert _score(f"<think>{shown}</think>\nCommas, CAPITALS.", "ifeval") == 0.0
    for verifier in ("ifeval", "ifeval_loose", "ifeval_all"):
        assert rewards.get(verifier).extract(f"<think>{shown}", truncated=False) is None
        assert rewards.get(verifier).extract(f"<think>x</think>{shown}", truncated=True) is None


@pytest.mark.parametrize(
    ("text", "kind", "kwargs", "followed"),
    [
        ("###", "keywords:letter_frequency", {"letter": "#", "let_frequency": 3, "let_relation": "at least"}, True),
        ("##", "keywords:letter_frequency", {"letter": "#", "let_frequency": 3, "let_relation": "at least"}, False),
        ("1234", "language:response_language", {"language": "hi"}, False),
        ("a+b", "keywords:existence", {"keywords": ["a+b"]}, True),
        ("aab", "keywords:existence", {"keywords": ["a+b"]}, False),
        ("[" * 100_000, "detectable_format:json_format", {}, False),
    ],
)
def test_where_the_original_is_not_followed(text, kind, kwargs, followed):
    assert ifeval.judge(text, [kind], [kwargs]) == [followed]


def test_instructions_that_can_not_be_judged_are_refused():
    words = "length_constraints:number_words"
    for kinds, kwargs, message in [
        ([], [], "one set each"),
        ([words], [], "1 instructions with 0"),
        (["length:words"], [{}], "unknown instruction 'length:words'"),
        ([words], [{"num_words": 3}], r"takes \['num_words', 'relation'\], got \['num_words'\]"),
        (["punctuation:no_comma"], [{"num_words": 3}], "takes no arguments"),
        ([words], [{"num_words": 3, "relation": "more than"}], "'less than' or 'at least', got 'more than'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ifeval.check_instructions(kinds, kwargs)
    absent = {"num_words": 3, "relation": "at least", "letter": None}  # how a table with one column per argument reads
    assert ifeval.judge("a b c", [words], [absent]) == [True]


@given(st.text(max_size=200), st.sampled_from(["", "*", "\n", "***", "\n\n", "<<", "]"]))
def test_judging_is_total_and_loose_forgives(text, mark):
    """On any text at all: no exception, and what is followed strictly is followed loosely."""
    text = mark.join(text)
    kinds = ["detectable_format:title", "detectable_format:number_highlighted_sections", "startend:quotation"]
    kinds += ["detectable_format:json_format", "combination:two_responses", "length_constraints:number_sentences"]
    kwargs = [{}, {"num_highlights": 1}, {}, {}, {}, {"num_sentences": 2, "relation": "at least"}]
    strict, loose = (ifeval.judge(text, kinds, kwargs, loose=flag) for flag in (False, True))
    assert all(b or not a for a, b in zip(strict, loose, strict=True))


def test_four_figures_of_a_file_of_responses(tmp_path, capsys):
    """Two prompts, three responses; counted by hand."""
    from brorl_jax.rewards.ifeval.__main__ import main

    prompts = [
        {"prompt": "p", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]},
        {"prompt": "q", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]},
    ]
    responses = [
        {"prompt": "p", "response": '<think>a, b</think>"fine"'},  # both
        {"prompt": "p", "response": 'Here, look:\n"fine"'},  # strictly none, loosely (without the first line) both
        {"prompt": "q", "response": "no"},  # none
    ]
    files = []
    for name, rows in (("prompts", prompts), ("responses", responses)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(file) for file in files])
    printed = {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()}
    assert printed == {
        "strict/prompt": 33.33,
        "strict/instruction": 40.0,
        "loose/prompt": 66.67,
        "loose/instruction": 80.0,
    }
    files[1].write_text(json.dumps(responses[0]) + "\n")
    with pytest.raises(SystemExit, match="1 of 2 prompts have no response"):
        main([str(file) for file in files])
