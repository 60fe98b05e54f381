"""The math verifier: a table of verdicts, its laws, hostile expressions, and the gold answers of public sets."""

import functools
import itertools
import json
import random
import re
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax import rewards
from brorl_jax.data import sources
from brorl_jax.rewards import Answer, Grader
from brorl_jax.rewards import math as math_verifier
from brorl_jax.rewards.math import guard
from brorl_jax.rewards.math.units import conversion, parse_unit
from brorl_jax.types import Finish, Group, Prompt, Sample, Status
from tests.rewards.math_hostile import HOSTILE
from tests.rewards.math_table import TABLE

SCORE = rewards.get("math").score


def prompt(gold, **meta):
    return Prompt(f"s/{gold}", np.zeros(1, np.int32), "", gold, "math", "s", meta)


def group(gold, answers):
    nothing = np.zeros(0, np.float32)
    samples = [Sample(i, i, nothing, nothing, Finish.STOP, 0, rf"\boxed{{{a}}}") for i, a in enumerate(answers)]
    return Group(prompt(gold), samples)


@functools.cache
def verdict(gold, answer):
    return SCORE(Answer(answer), prompt(gold)) == 1.0


@pytest.mark.parametrize(("kind", "gold", "answer", "expected"), TABLE)
def test_table(kind, gold, answer, expected):
    assert verdict(gold, answer) == (expected == "=")


def test_table_is_long_has_both_verdicts_and_no_row_twice():
    assert len(TABLE) == len({row[1:3] for row in TABLE}) >= 150
    kinds = {kind: {row[3] for row in TABLE if row[0] == kind} for kind, *_ in TABLE}
    assert all(found == {"=", "!"} for found in kinds.values())


@pytest.mark.parametrize(("kind", "gold", "answer", "expected"), [row for row in TABLE if row[2]])
def test_who_is_gold_does_not_matter(kind, gold, answer, expected):
    assert verdict(answer, gold) == verdict(gold, answer)


def test_cheap_path_decides_most_rows_and_never_otherwise():
    decided = 0
    for _, gold, answer, _ in TABLE:
        score = math_verifier.cheap(answer, prompt(gold))
        decided += score is not None
        assert score in (None, float(verdict(gold, answer)))
    assert decided > len(TABLE) / 2


def test_rows_have_the_same_verdict_in_a_thread_and_in_worker_processes():
    """P01: nothing depends on signals or on the main thread."""
    rows = [row for row in TABLE if row[2] and math_verifier.cheap(row[2], prompt(row[1])) is None][:50]
    here = [float(verdict(gold, answer)) for _, gold, answer, _ in rows]
    assert 0 < sum(here) < len(rows) == 50
    in_thread = []
    thread = threading.Thread(
        target=lambda: in_thread.extend(SCORE(Answer(answer), prompt(gold)) for _, gold, answer, _ in rows)
    )
    thread.start()
    thread.join()
    assert in_thread == here
    groups = [group(gold, [answer]) for _, gold, answer, _ in rows]
    with Grader(workers=2, deadline_factor=10) as grader:
        grader.grade(groups)
    assert [g.samples[0].reward for g in groups] == here


def test_tolerances():
    assert SCORE(Answer("4.3"), prompt("4.2")) == 0.0
    assert SCORE(Answer("4.3"), prompt("4.2", tolerance=0.1)) == 1.0
    assert SCORE(Answer("4.31"), prompt("4.2", tolerance=0.1)) == 0.0
    assert SCORE(Answer(r"\sqrt{18}"), prompt("4.2", tolerance=0.1)) == 1.0  # 4.2426
    assert SCORE(Answer(r"\sqrt{19}"), prompt("4.2", tolerance=0.1)) == 0.0  # 4.3589
    assert SCORE(Answer("101"), prompt("100", relative=0.01)) == 1.0
    assert SCORE(Answer("102"), prompt("100", relative=0.01)) == 0.0


def test_empty_gold_is_the_graders_failure():
    with pytest.raises(ValueError, match="gold answer is empty"):
        SCORE(Answer("5"), prompt(" "))


NUMBERS = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=1_000)


@given(NUMBERS, NUMBERS)
@settings(deadline=None)
def test_fractions_are_equal_when_their_values_are(x, y):
    for a, b in ((x, y), (x, x)):
        forms = [f"{b.numerator}/{b.denominator}", rf"$\dfrac{{{b.numerator}}}{{{b.denominator}}}$"]
        if (whole := abs(b).__floor__()) and b.denominator > 1:
            part = abs(b) - whole
            forms.append(f"{'-' * (b < 0)}{whole}\\frac{{{part.numerator}}}{{{part.denominator}}}")
        for form in forms:
            assert verdict(rf"\frac{{{a.numerator}}}{{{a.denominator}}}", form) == (a == b)


@settings(deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.lists(st.integers(-99, 99), min_size=2, max_size=6))
def test_sets_lists_and_tuples_of_integers(x, y):
    for other in (y, x[::-1], x):
        a, b = ", ".join(map(str, x)), ", ".join(map(str, other))
        assert verdict(rf"\{{{a}\}}", rf"\left\{{{b}\right\}}") == (set(x) == set(other))
        assert verdict(a, b) == (sorted(x) == sorted(other))
        assert verdict(f"({a})", f"({b})") == (x == other)


@given(
    st.text(alphabet=r"\{}()[]^_$&,;=<>|+-*/!.%' 0123x" + "fracsqtpi", max_size=40), st.sampled_from(["5", r"\{1,2\}"])
)
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_verdict_at_once_or_is_undecided(text, gold):
    assert math_verifier.cheap(text, prompt(gold)) in (None, 0.0, 1.0)
    if text.strip():
        assert math_verifier.cheap(text, prompt(text)) == 1.0


def test_what_is_beyond_the_limits_is_told_by_its_text():
    for text in ("1" * 301, "x" * 1_501, "(" * 25, "{" * 25):
        assert guard.too_long(text)
    for text in (
        r"10^{10^{10}}",
        "9^{9^9}",
        "2**2**2**2**2**2",
        "1000000!",
        "5!!!!",
        r"\binom{999999}{5}",
        "10^ {20001}",
    ):
        assert guard.too_large(text), text
    for text in ("10^{20000}", "2^{2^{4}}", "100!", r"\binom{100}{50}", r"\sum_{n=1}^{100} n", "x^{x^{x}}"):
        assert not (guard.too_long(text) or guard.too_large(text)), text


@pytest.mark.slow
@pytest.mark.parametrize("gold", ["5", r"x+\sqrt{2}", r"\{1,\sqrt{2}\}", r"(-\infty,3)\cup(4,\sqrt{17})", r"x^2+y^2=4"])
def test_hostile_expressions_are_wrong_answers_and_cost_no_worker(gold):
    """Each has its verdict within the deadline: none is a timeout or an error, and the workers live on."""
    bad = group(gold, HOSTILE)
    with Grader(workers=2) as grader:
        first = group(r"\sqrt{8}", [rf"{k}\sqrt{{2}}" for k in range(1, 5)])
        grader.grade([first])
        team = [worker.pid for worker in grader._pool._team]
        stats = grader.grade([bad])
        assert stats.statuses == {Status.OK: len(HOSTILE)}, stats.errors
        assert [s.text for s in bad.samples if s.reward] == []
        assert [worker.pid for worker in grader._pool._team] == team
    assert [s.reward for s in first.samples] == [0, 1, 0, 0]


# --- units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "factor"),
    [
        ("km", "m", 1000),
        ("cm^2", "m^2", Fraction(1, 10_000)),
        ("km/h", "m/s", Fraction(5, 18)),
        ("kilometers per hour", "mph", Fraction(1_000_000, 1_609_344)),
        ("kg m/s^2", "N", 1),
        (r"\text{kg}\cdot\text{m}^{-3}", "g/cm^3", Fraction(1, 1000)),
        ("square feet", "in^2", 144),
        ("kWh", "MJ", None),  # written kW h
        ("kW h", "MJ", Fraction(36, 10)),
        ("min", "s", 60),  # not milli-inches
        ("ms", "s", Fraction(1, 1000)),
        ("mV", "V", Fraction(1, 1000)),
        (r"\mu m", "nm", 1000),
        ("erg", "J", Fraction(1, 10**7)),
        ("L", "cm^3", 1000),
        ("m", "s", None),
        ("apples", "m", None),
    ],
)
def test_conversion(source, target, factor):
    assert conversion(source, target) == factor
    if factor:
        assert conversion(target, source) == 1 / Fraction(factor)


def test_no_unit():
    assert [u for u in ("", "/", "x", "m/", "apples", "m^", "m" * 100, "the") if parse_unit(u)] == []


# --- gold answers of public sets ---------------------------------------------------------------------------------

SETS = [
    ("gsm8k", "gsm8k_test.jsonl", 1319),
    ("gsm8k", "gsm8k_train.jsonl", 7473),
    ("math500", "math500.jsonl", 500),
    ("aime", "aime24.jsonl", 30),
    ("aime", "aime25.jsonl", 30),
    ("amc23", "amc23.jsonl", 40),
    ("minerva", "minerva_math.jsonl", 272),
    ("olympiadbench", "olympiadbench_oe_to_maths_en.jsonl", 675),
]


def load(shared_data, preset, file):
    source = sources.load(preset, {"kind": "jsonl", "preset": preset, "path": str(shared_data / file)})
    return [source[i] for i in range(len(source))]


def spelled_anew(gold):
    r"""The same answer as another hand writes it, so that text alone does not decide: ``\dfrac``, dollars."""
    gold = gold.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "")
    return "$ " + re.sub(r"(?<=[^\\])([=+])", r" \1 ", gold.strip("$")) + r" $"


@pytest.mark.parametrize(("preset", "file", "rows"), SETS)
def test_golds_agree_with_themselves(shared_data, preset, file, rows):
    """In the answer format, as they stand and spelled anew: every row, none left out."""
    records = load(shared_data, preset, file)
    assert len(records) == rows
    verifier = rewards.get("math:boxed")
    for record in records:
        own = prompt(record.gold, **record.meta)
        for text in (record.gold, spelled_anew(record.gold)):
            answer = verifier.extract(verifier.format.render(text), truncated=False)
            assert verifier.score(answer, own) == 1.0, (record.key, record.gold, text)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "file"), [("math500", "math500.jsonl"), ("minerva", "minerva_math.jsonl")])
def test_a_gold_with_another_digit_is_wrong(shared_data, preset, file):
    rng = random.Random(0)
    for record in load(shared_data, preset, file):
        places = [m.start() for m in re.finditer(r"(?<![_\d])[1-9](?!\d*!)", record.gold)]
        if not places:
            continue
        at = rng.choice(places)
        other = record.gold[:at] + str(int(record.gold[at]) % 9 + 1) + record.gold[at + 1 :]
        assert not verdict(record.gold, other), (record.key, record.gold, other)


@pytest.mark.slow
def test_golds_of_different_questions_differ(shared_data):
    """Neighbours of one set against each other: equal only where their text or their number is."""
    golds = sorted({r.gold for r in load(shared_data, "math500", "math500.jsonl") if "\\" in r.gold})
    equal = {(a, b) for a, b in itertools.pairwise(golds) if verdict(a, b)}
    assert {(json.dumps(a), json.dumps(b)) for a, b in equal} == set()
