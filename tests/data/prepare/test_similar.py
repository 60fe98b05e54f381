"""Repeats and benchmark questions: against every pair compared by brute force, and by hand."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from brorl_jax.data.prepare import similar
from brorl_jax.data.prepare.similar import Match, near_duplicates, overlaps

TEXT = st.lists(st.sampled_from(list("abcde")), max_size=12).map(" ".join)
THRESHOLDS = st.sampled_from([0.3, 0.5, 0.55, 0.7, 0.9, 1.0])


def grams(text, n):
    words = text.split()
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


def jaccard(a, b, n):
    a, b = grams(a, n), grams(b, n)
    return len(a & b) / len(a | b) if a and b else 0.0


@given(texts=st.lists(TEXT, max_size=14), keys=st.lists(st.integers(0, 1), min_size=14), threshold=THRESHOLDS)
@settings(max_examples=150, deadline=None)
def test_every_repeat_of_a_kept_text_is_found_and_nothing_else(texts, keys, threshold):
    keys, kept, expected = keys[: len(texts)], [], []
    for row, text in enumerate(texts):
        scores = [(jaccard(text, texts[o], 2), -o) for o in kept if keys[o] == keys[row]]
        best, other = max(scores, default=(0.0, 0))
        if best >= threshold:
            expected.append(Match(row, -other, best))
        else:
            kept.append(row)
    assert near_duplicates(texts, keys, threshold, n=2) == expected


@given(
    texts=st.lists(TEXT, max_size=8),
    benchmark=st.lists(TEXT, max_size=8),
    threshold=THRESHOLDS,
    near=THRESHOLDS,
    n=st.integers(2, 9),
)
@settings(max_examples=150, deadline=None)
def test_every_text_that_states_a_benchmark_question_is_found_and_nothing_else(texts, benchmark, threshold, near, n):
    found = {m.row: m for m in overlaps(texts, benchmark, threshold, near, n=n)}
    for row, text in enumerate(texts):
        scores = []
        for question in benchmark:
            size = min(n, len(question.split()))
            whole = float(bool(text) and text == question)
            long = len(question.split()) >= similar.LEAST_WORDS and len(text.split()) >= size
            share = len(grams(text, size) & grams(question, size)) / len(grams(question, size)) if long else 0.0
            alike = jaccard(text, question, similar.NGRAM)
            scores.append(max(whole, share if share >= threshold else 0.0, alike if alike >= near else 0.0))
        best = max(scores, default=0.0)
        assert (row in found) == (best > 0)
        if best > 0:
            assert found[row].score == best == scores[found[row].other]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("How many, in 12 days?", "how many in 1 2 days"),
        ("Find $x + 3$.", "find x + 3"),
        (r"\left( \frac{1}{2} \right)", r"( \frac 1 2 )"),
        ("3 + 4", "3 + 4"),
        ("3 - 4", "3 - 4"),
        ("naïve Ünïcode", "naïve ünïcode"),
        ("  ", ""),
    ],
)
def test_words(text, words):
    assert similar.words(text) == words.split()


def test_numbers():
    assert similar.numbers("1,080 apples at 2.50 for 3 days, 10,5") == ("1080", "2.50", "3", "10", "5")


APPLES = "Tom picks {} apples a day and sells each of them for two dollars. How much does he earn in {} days?"


def test_a_name_changed_is_a_repeat_a_number_changed_is_one_only_without_keys():
    texts = [APPLES.format(12, 7), APPLES.format(12, 7).replace("Tom", "Ann"), APPLES.format(17, 7)]
    keys = [similar.numbers(text) for text in texts]
    assert [(m.row, m.other) for m in near_duplicates(texts, keys)] == [(1, 0)]
    assert [(m.row, m.other) for m in near_duplicates(texts, [()] * 3)] == [(1, 0), (2, 0)]


def test_a_benchmark_question_is_found_quoted_reworded_and_with_other_numbers():
    question = APPLES.format(12, 7)
    texts = [
        f"Here is an old exercise that my teacher liked very much. {question} Show every step of your work, please.",
        question.replace("picks", "collects"),
        question.replace("7", "9"),
        "Ann walks to the market, buys five pears for a dollar each and comes home. How much has she spent?",
        "What is 7 + 5?",
    ]
    found = overlaps(texts, [question, "What is 7 + 5", "Is 7 + 5"])
    assert [(m.row, m.other) for m in found] == [(0, 0), (1, 0), (2, 0), (4, 1)]
    assert found[0].score == 1.0
