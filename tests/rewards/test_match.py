"""Numbers and text compared."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax import rewards
from brorl_jax.rewards import Answer
from brorl_jax.rewards.math.number import parse_number
from brorl_jax.types import Prompt


def prompt(gold, **meta):
    return Prompt("s/0", np.zeros(1, np.int32), "", gold, "numeric", "s", meta)


NUMBERS = [
    ("5", Fraction(5)),
    ("+5", Fraction(5)),
    ("- 5", Fraction(-5)),
    ("\u22125", Fraction(-5)),
    ("5.", Fraction(5)),
    ("007", Fraction(7)),
    (".5", Fraction(1, 2)),
    ("1,080", Fraction(1080)),
    ("1,234,567.5", Fraction(2469135, 2)),
    ("1{,}234", Fraction(1234)),
    (r"1\,000", Fraction(1000)),
    ("3 / 4", Fraction(3, 4)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"\frac12", Fraction(1, 2)),
    (r"-\dfrac{3}{4}", Fraction(-3, 4)),
    ("25%", Fraction(1, 4)),
    (r"12.5 \%", Fraction(1, 8)),
    ("$18", Fraction(18)),
    (r"-\$18.50", Fraction(-37, 2)),
    ("$7$", Fraction(7)),
    (r"\(7\)", Fraction(7)),
    ("1.5e3", Fraction(1500)),
    ("1E-3", Fraction(1, 1000)),
    (r"1.5 \times 10^{3}", Fraction(1500)),
    ("2*10^-2", Fraction(1, 50)),
]
NOT_NUMBERS = [
    "",
    "$",
    "nan",
    "inf",
    "five",
    "5 apples",
    "5 6",
    "1,23",
    "12,34,567",
    "1/0",
    r"\frac{1}{0}",
    "$5$6$",
    "x=5",
]
NOT_NUMBERS += ["5%%", "1e", "1e999999999", "9" * 300, "1_000", "0x10", "٣", "**5**", "1..2", "--5", "(1,2)", "5,"]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_not_numbers(text):
    assert parse_number(text) is None


@given(st.integers(-(10**12), 10**12))
def test_integers_in_every_dress(n):
    for text in (str(n), f"{n:,}", f"{n}.0", f"${n:,}$", f"{n * 3}/3", f"{n}e0"):
        assert parse_number(text) == n


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_are_exact(n, d):
    assert parse_number(f"{n}/{d}") == parse_number(rf"\frac{{{n}}}{{{d}}}") == Fraction(n, d)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**6), max_value=10**6))
def test_decimals_are_exact(d):
    assert parse_number(str(d)) == Fraction(d)


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_not(text):
    assert parse_number(text) is None or isinstance(parse_number(text), Fraction)


@pytest.mark.parametrize(
    ("gold", "answer", "meta", "score"),
    [
        ("1/10", "0.1", {}, 1),
        ("0.3", "0.30000000000000004", {}, 0),
        ("25", "banana", {}, 0),
        ("5", r"\sqrt{25}", {}, 0),  # that takes algebra: the math verifier's task
        ("1.2", "1.25", {"tolerance": 0.05}, 1),
        ("1.2", "1.26", {"tolerance": 0.05}, 0),
        ("4.5e33", r"4.54 \times 10^{33}", {"relative": 0.01}, 1),
        ("4.5e33", r"4.55 \times 10^{33}", {"relative": 0.01}, 0),
        (r"3.2\text{ m/s}", "3.2", {}, 1),
        (r"3.2\text{ m/s}", r"320\ \mathrm{cm/s}", {}, 1),
        (r"3.2\text{ m/s}", "11.52 km/h", {}, 1),
        (r"3.2\text{ m/s}", "3.2 kg", {}, 0),
        (r"3.2\text{ m/s}", "3.2 km/s", {}, 0),
        (r"3.2\text{ m}", "325 cm", {"tolerance": 0.05}, 1),  # in the gold's unit
        (r"3.2\text{ m}", "326 cm", {"tolerance": 0.05}, 0),
        ("3.2", "3.2 m/s", {}, 1),
        ("18", r"\$18.00", {}, 1),
        ("6.02e23", r"$6.02\times10^{23}\ \mathrm{mol}^{-1}$", {}, 1),
        ("5", "x = 5", {}, 1),
        ("5", "4, 5", {}, 0),
        ("5", "5" + " " * 500 + "m", {}, 0),
    ],
)
def test_numeric(gold, answer, meta, score):
    assert rewards.get("numeric").score(Answer(answer), prompt(gold, **meta)) == score


def test_gold_that_is_no_number_is_the_graders_failure():
    with pytest.raises(ValueError, match="not a number"):
        rewards.get("numeric").score(Answer("5"), prompt("x+1"))


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("Paris", "paris", 1),
        (" a  b ", "a b", 1),
        ("$x+1$.", "x+1", 1),
        ("x + 1", "x+1", 0),
        ("Paris, France", "Paris", 0),
    ],
)
def test_exact(answer, gold, score):
    assert rewards.get("exact").score(Answer(answer), prompt(gold)) == score


def test_without_a_gold_nothing_is_judged():
    for verifier in ("exact", "numeric", "math"):
        with pytest.raises(ValueError, match="gold"):
            rewards.get(verifier).score(Answer("5"), prompt(""))
