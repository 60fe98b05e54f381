"""Statuses and rewards of samples: what failed must not look like a wrong answer."""

import math
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from brorl_jax import rewards
from brorl_jax.rewards import Answer, grade, registry, self_test
from brorl_jax.types import Finish, Group, Prompt, Sample, Status


def prompt(key="0", gold="5", verifier="numeric:boxed", **meta):
    return Prompt(f"s/{key}", np.zeros(1, np.int32), "", gold, verifier, "s", meta)


def group(responses, prompt=None, **kw):
    samples = [
        Sample(i, i, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), finish, 0, text)
        for i, (text, finish) in enumerate(responses)
    ]
    return Group(prompt or globals()["prompt"](**kw), samples)


@pytest.fixture
def scorer():
    """A scorer whose behaviour the answer chooses, and the list of answers it was asked about."""
    calls = []

    def score(answer, prompt):
        calls.append((prompt.id, answer))
        if answer == "raise":
            raise KeyError("inside a library")
        return float(answer)

    rewards.register("chosen", default_format="whole", where="inline")(score)
    yield calls
    del registry._SCORERS["chosen"]
    rewards.get.cache_clear()


def test_statuses_and_rewards():
    g = group(
        [
            (r"\boxed{5}", Finish.STOP),
            (r"\boxed{6}", Finish.STOP),
            ("5", Finish.STOP),
            (r"\boxed{5}", Finish.LENGTH),
            (r"\boxed{5} or \boxed{", Finish.LENGTH),
            (r"\boxed{5}", Finish.ABORT),
        ]
    )
    tokens = [s.tokens for s in g.samples]
    stats = grade([g])
    assert [s.status for s in g.samples] == ["ok", "ok", "ok", "truncated", "truncated", "aborted"]
    assert [s.reward for s in g.samples[:5]] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert math.isnan(g.samples[5].reward)
    assert [s.index for s in g.scored] == [0, 1, 2, 3, 4]
    assert stats.statuses == {Status.OK: 3, Status.TRUNCATED: 2, Status.ABORTED: 1}
    assert stats.unanswered == 2
    assert all(s.tokens is t for s, t in zip(g.samples, tokens, strict=True))


@pytest.mark.parametrize("answer", ["raise", "nan", "1.5", "-0.1", "inf", "word"])
def test_failing_grader_is_an_error_never_a_zero(scorer, answer):
    g = group([(answer, Finish.STOP), ("1", Finish.STOP), (answer, Finish.LENGTH)], verifier="chosen:tag")
    for s in g.samples:
        s.text = f"<answer>{s.text}</answer>"
    stats = grade([g])
    assert [s.status for s in g.samples] == [Status.GRADER_ERROR, Status.OK, Status.GRADER_ERROR]
    assert math.isnan(g.samples[0].reward) and g.samples[1].reward == 1.0 and math.isnan(g.samples[2].reward)
    assert stats.statuses[Status.GRADER_ERROR] == 2
    assert len(stats.errors) == 1 and stats.errors[0].startswith("s/0: ")


def test_rewards_stay_with_their_samples_around_an_error(scorer):
    """P07: an error in the middle does not shift its neighbours."""
    texts = ["0.1", "raise", "0.3", "0.4", "raise", "0.6"]
    g = group([(t, Finish.STOP) for t in texts], verifier="chosen")
    grade([g])
    assert [s.reward for s in g.samples if s.text != "raise"] == [0.1, 0.3, 0.4, 0.6]
    assert [s.status.scored for s in g.samples] == [t != "raise" for t in texts]


def test_equal_answers_are_scored_once_per_prompt(scorer):
    one = group([("1", Finish.STOP), (" 1\n", Finish.STOP), ("0", Finish.STOP)], key="a", verifier="chosen")
    two = group([("1", Finish.STOP)] * 4, key="b", verifier="chosen")
    assert grade([one, two]).scored == 3
    assert scorer == [("s/a", "1"), ("s/a", "0"), ("s/b", "1")]
    assert [s.reward for s in two.samples] == [1.0] * 4


def test_grading_again_gives_the_same(scorer):
    g = group([("1", Finish.STOP), ("raise", Finish.STOP), ("0.25", Finish.STOP)], verifier="chosen")
    grade([g])
    first = [(s.status, repr(s.reward)) for s in g.samples]
    grade([g])
    assert [(s.status, repr(s.reward)) for s in g.samples] == first


def test_two_samples_with_one_index_are_refused():
    g = group([(r"\boxed{5}", Finish.STOP)] * 2)
    g.samples[1].index = 0
    with pytest.raises(ValueError, match="same index"):
        grade([g])


def test_extraction_can_not_be_applied_twice():
    """P05: an answer is not a response, and a response is not an answer."""
    verifier = rewards.get("exact:whole")
    answer = verifier.extract("5", truncated=False)
    assert answer is not None
    with pytest.raises(TypeError, match="extracted twice"):
        verifier.extract(answer, truncated=False)
    with pytest.raises(TypeError, match="needs an Answer"):
        verifier.score("5", prompt())


def test_self_test_passes_and_skips_prompts_without_a_gold():
    assert self_test([prompt(str(i), gold=str(i)) for i in range(20)]) == 20
    assert self_test([prompt(gold="", verifier="exact")]) == 0


def test_self_test_names_the_rows_that_fail():
    """P05: a verifier that does not suit the data is refused before training."""
    good = [prompt(str(i), gold=str(i)) for i in range(98)]
    bad = [prompt("bad", gold=r"\sqrt{3}"), prompt("worse", gold="x")]
    with pytest.raises(ValueError, match=r"refuses 2 of 100 gold answers") as caught:
        self_test(good + bad)
    assert "s/bad" in str(caught.value) and r"\boxed{\sqrt{3}}" in str(caught.value)
    assert self_test([*good, prompt("99"), bad[0]]) == 100


def test_self_test_shows_a_row_once_however_often_it_was_asked():
    with pytest.raises(ValueError, match="refuses 64 of 64") as caught:
        self_test([prompt("bad", gold="x")] * 64)
    assert str(caught.value).count("s/bad, numeric:boxed") == 1


@pytest.mark.parametrize("verifier", ["ifeval", "reasoning_gym"])
def test_a_prompt_without_what_the_gold_is_found_by_is_named(verifier):
    with pytest.raises(ValueError, match=f"s/7: verifier '{verifier}:.*finds no gold answer .*KeyError.*source 's'"):
        self_test([prompt("7", verifier=verifier)])


def test_self_test_catches_a_format_that_can_not_carry_the_gold():
    with pytest.raises(ValueError, match="exact:last_line, gold response line one"):
        self_test([prompt(gold="line one\nline two", verifier="exact:last_line")])


def test_names_are_checked():
    assert {"exact", "numeric", "reasoning_gym", "reasoning_gym_strict"} <= set(rewards.names())
    with pytest.raises(ValueError, match=r"unknown verifier 'numerik' \(did you mean 'numeric'\?\)"):
        rewards.get("numerik")
    with pytest.raises(ValueError, match="unknown answer format 'box'"):
        rewards.get("numeric:box")
    with pytest.raises(ValueError, match="twice"):
        rewards.register("numeric", default_format="boxed")(lambda a, p: 0.0)
    assert rewards.get("numeric").name == "numeric:boxed"


def _scores(_=None):
    g = group([(rf"so \boxed{{{i}/2}}", Finish.STOP) for i in range(50)], gold="8.5")
    grade([g])
    return [(str(s.status), s.reward) for s in g.samples]


def test_same_scores_from_thread_and_process():
    """P01: nothing in grading depends on being the main thread."""
    here = _scores()
    assert sum(r for _, r in here) == 1.0 and here[17] == ("ok", 1.0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_scores).result() == here
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(_scores).result() == here


def test_answer_is_hashable_and_compares_by_text():
    assert {Answer("5"): 1}[Answer("5")] == 1
