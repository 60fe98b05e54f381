"""Where an answer may stand, and where it may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax import rewards
from brorl_jax.rewards import FORMATS, Answer

CASES = [
    # format, response, answer if it ended by itself, answer if truncated
    ("boxed", r"so \boxed{5}", "5", "5"),
    ("boxed", r"first \boxed{4}, no: \boxed{5}.", "5", "5"),
    ("boxed", r"\boxed{4} hmm \boxed{5", "4", None),
    ("boxed", r"\boxed{4} hmm \box", "4", None),
    ("boxed", r"\boxed{5", None, None),
    ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}", r"\{1, 2\}"),
    ("boxed", r"\boxed{\boxed{7}}", "7", "7"),
    ("boxed", r"\boxed {8}", "8", "8"),
    ("boxed", r"\boxed{}", None, None),
    ("boxed", r"\boxed{ }", None, None),
    ("boxed", "the answer is 5", None, None),
    ("boxed", r"\fbox{6} then \boxed{5}", "5", "5"),
    ("boxed", r"\boxed{5} then \fbox {6}", "6", "6"),
    ("boxed", r"\boxed{5} then \fbo", "5", None),
    ("boxed", r"\boxed{x=\boxed{5}", "5", None),
    ("boxed", r"{ \boxed{5}", "5", "5"),
    ("boxed", r"} \boxed{5} }", "5", "5"),
    ("boxed", r"\boxed{a\}", None, None),
    ("boxed", r"\boxed{5} \boxed{}", None, None),
    ("answer_line", "so\nAnswer: B", "B", None),
    ("answer_line", "Answer: A\nno\n**Final answer:** (B) 3.2 m\n", "(B) 3.2 m", None),
    ("answer_line", "the answer: B", None, None),
    ("answer_line", "Answer:\nB", None, None),
    ("boxed", "", None, None),
    ("tag", "<answer> 5 </answer> done", "5", "5"),
    ("tag", "<answer>4</answer><answer>5</answer>", "5", "5"),
    ("tag", "<answer>4</answer> no <answer>5", "4", None),
    ("tag", "<answer>4</answer> no <ans", "4", None),
    ("tag", "<answer>a\nb</answer>", "a\nb", "a\nb"),
    ("tag", "5</answer>", None, None),
    ("tag", "<answer>4</answer> 5</answer>", None, None),
    ("tag", "<answer>5", None, None),
    ("hash", "2+3=5\n#### 5", "5", None),
    ("hash", "#### 4\n#### 1,080 \n", "1,080", None),
    ("hash", "it is #### 5", None, None),
    ("hash", "####", None, None),
    ("code", "so\n```python\nx = 1\n```\n", "x = 1", "x = 1"),
    ("code", "```\nx = 1\n```", "x = 1", "x = 1"),
    ("code", "```py\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2", "x = 2"),
    ("code", "```\nx = 1\n```\n```text\n2\n```", "x = 1", "x = 1"),
    ("code", "```\nx = 1\n```\nor\n```\nx = 2", "x = 1", None),
    ("code", "```\nx = 1\n```\nor\n``", "x = 1", None),
    ("code", "```\nx = 1", None, None),
    ("code", "```\nx = 1\n``", None, None),
    ("code", '```\ns = """\n  ```text\n"""\n```', 's = """\n  ```text\n"""', 's = """\n  ```text\n"""'),
    ("code", "````python\n```\n````", "```", "```"),
    ("code", "x = 1 or ```x = 2```", None, None),
    ("code", "```x = 2```", None, None),
    ("code", "```\n```", None, None),
    ("last_line", "thus\n5\n\n", "5", None),
    ("last_line", "\n", None, None),
    ("whole", " 5\n", "5", None),
    ("whole", "", None, None),
    ("final", "no reasoning", "no reasoning", None),
    ("final", "<think>so</think>\n\nshown\n", "shown", None),
    ("final", "begun in the prompt</think>shown", "shown", None),
    ("final", "<think>a</think>shown</think>too", "shown</think>too", None),
    ("final", "<think>never ends", None, None),
    ("final", "<think>nothing shown</think> \n", None, None),
]


@pytest.mark.parametrize(("form", "response", "stopped", "truncated"), CASES)
def test_extraction(form, response, stopped, truncated):
    verifier = rewards.get(f"exact:{form}")
    for flag, expected in ((False, stopped), (True, truncated)):
        answer = verifier.extract(response, truncated=flag)
        assert answer == (None if expected is None else Answer(expected))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_rendered_answer_is_found_again(form):
    for gold in ("5", "-1/2", r"\frac{1}{2}", "a b", "1,080"):
        assert rewards.get(f"exact:{form}").extract(FORMATS[form].render(gold), truncated=False) == Answer(gold)


DELIMITED = st.sampled_from(["boxed", "tag", "hash", "code"])
PROSE = st.text(alphabet="abx 0123456789.,-=\n$(){}[]/>é日", max_size=60)


@given(DELIMITED, st.integers(-999, 999), PROSE, PROSE, st.booleans())
def test_gold_outside_the_final_answer_is_worth_nothing(form, gold, before, after, truncated):
    """P03: no delimiter, no answer, whatever the text mentions."""
    response = f"{before} the answer is {gold} {after}"
    assert rewards.get(f"numeric:{form}").extract(response, truncated=truncated) is None


@given(st.sampled_from(["boxed", "tag"]), st.integers(0, 999), st.integers(0, 999), PROSE)
def test_wrong_final_answer_is_not_rescued_by_an_earlier_mention(form, gold, other, prose):
    render = FORMATS[form].render
    answer = rewards.get(f"numeric:{form}").extract(
        f"{render(str(gold))} {prose} {render(str(other))}", truncated=False
    )
    assert answer == Answer(str(other))


@given(st.sampled_from(["boxed", "tag"]), st.integers(0, 999), PROSE, st.data())
def test_truncation_inside_the_last_answer_leaves_none(form, gold, prose, data):
    """P04: cut anywhere within the last answer, an earlier one does not count."""
    first, last = FORMATS[form].render(str(gold)), FORMATS[form].render("12345")
    cut = data.draw(st.integers(1, len(last) - 1))
    response = f"{first} {prose} {last[:cut]}"
    assert rewards.get(f"numeric:{form}").extract(response, truncated=True) is None


@given(st.sampled_from(["hash", "answer_line", "last_line", "whole"]), st.integers(0, 999))
def test_formats_without_an_end_mark_have_no_answer_when_truncated(form, gold):
    assert rewards.get(f"numeric:{form}").extract(FORMATS[form].render(str(gold)), truncated=True) is None


def test_response_full_of_unclosed_boxes_is_read_in_one_pass():
    """32,768 openings: a search for each one's end reads a quarter of a billion characters."""
    response = r"\boxed{" * 32_768
    assert rewards.get("exact:boxed").extract(response, truncated=False) is None
    assert rewards.get("exact:boxed").extract(response + "5}", truncated=False) == Answer("5")
