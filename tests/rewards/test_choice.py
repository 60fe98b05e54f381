"""Letters of options in every dress, and what names two of them."""

import numpy as np
import pytest

from brorl_jax import rewards
from brorl_jax.rewards import Answer
from brorl_jax.rewards.choice import named
from brorl_jax.types import Prompt

OPTIONS = ("3.2 m/s", "32 m/s", "0.32 m/s", "the speed of sound")
ONE = [
    "B", "b", "(B)", "[B]", "B.", "B)", "**B**", "$B$", r"\text{B}", r"\text{(B)}", r"\boxed{B}", r"\mathrm{B}", "`B`",
    "Option B", "option (b)", "The answer is B", "The correct answer is (B).", "Answer: B", "B is correct",
    "B. 32 m/s", "(B) 32 m/s", "B: 32 m/s", "B - 32 m/s", "**B.** 32 m/s", "32 m/s", "32", "32.0 m/s",
    r"$32\text{ m/s}$", "B) because sound is faster", "115.2 km/h",
]  # fmt: skip
NONE = [
    "", "32 kg", "A or B", "(A) or (B)", "(B) or (C)", "B. or C.", "(B) not (A)", "E", "Z", "(B) 3.2 m/s", "Because",
    "Bright", "A B C D", "the answer", "B" * 2_000, "3.2 m/s or 32 m/s",
]  # fmt: skip


@pytest.mark.parametrize("text", ONE)
def test_one_option(text):
    assert named(text, OPTIONS) == {"B"}


@pytest.mark.parametrize("text", NONE)
def test_no_option(text):
    assert named(text, OPTIONS) in (None, frozenset("ABCD"), frozenset("AB"), frozenset("BC"))
    assert named(text, OPTIONS) != {"B"}


@pytest.mark.parametrize(
    "text", ["A, C", "AC", "CA", "A and C", "(A), (C)", "A; C", "A & C", "a, c", r"\text{A and C}"]
)
def test_several_options(text):
    assert named(text) == {"A", "C"}


def test_words_of_an_option_before_letters_in_a_row_but_after_one_letter():
    assert named("FACE", ("FACE", "x", "y", "z", "u", "v")) == {"A"}
    assert named("FACE", ("w", "x", "y", "z", "u", "v")) == {"A", "C", "E", "F"}
    assert named("C", ("C", "H", "O")) == {"C"}  # the letter, not carbon
    assert named("carbon", ("carbon", "Carbon ", "iron")) is None  # two options read the same
    assert named("The Speed of Sound", OPTIONS) == {"D"}


def prompt(gold, options=()):
    return Prompt("s/0", np.zeros(1, np.int32), "", gold, "choice", "s", {"options": list(options)})


def test_scores():
    verifier = rewards.get("choice")
    assert verifier.name == "choice:answer_line"
    answer = verifier.extract("Sound is slow.\nAnswer: (b) 32 m/s", truncated=False)
    for gold in ("B", "(B)", "32 m/s", "b"):
        assert verifier.score(answer, prompt(gold, OPTIONS)) == 1.0
    assert verifier.score(answer, prompt("C", OPTIONS)) == 0.0
    assert verifier.score(Answer("A, B"), prompt("B", OPTIONS)) == 0.0
    assert verifier.score(Answer("A"), prompt("A, B", OPTIONS)) == 0.0
    assert verifier.score(Answer("B and A"), prompt("AB", OPTIONS)) == 1.0
    for gold in ("E", "nothing", ""):
        with pytest.raises(ValueError, match="names no option of 4"):
            verifier.score(answer, prompt(gold, OPTIONS))
