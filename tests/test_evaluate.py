"""Held-out evaluation with an engine made of plain Python."""

import json
import math

import numpy as np
import pytest

from brorl_jax import evaluate
from brorl_jax.rewards import Grader
from brorl_jax.rollout.api import Sampling, sample_seed
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

GREEDY = Sampling(temperature=0.0, max_tokens=5)


def prompt(source, i, gold="1", verifier="exact:whole"):
    return Prompt(f"{source}/{i}", np.array([3], np.int32), "q", gold, verifier, source)


class Tokens:
    """Decodes an id as its number."""

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


class Scripted:
    """Answers by prompt id: a list of texts; None aborts, "cut" is truncated."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def generate(self, requests, sampling):
        self.asked.append((requests, sampling))
        for r in reversed(requests):
            yield Group(r.prompt, [self.sample(r, i) for i in range(len(r.seeds))])

    def sample(self, r, i):
        answer = self.answers[r.prompt.id][i]
        if answer is None:
            return Sample(i, r.seeds[i], np.zeros(0, np.int32), np.zeros(0, np.float32), Finish.ABORT, 0)
        ids = [5] * 5 if answer == "cut" else [int(t) for t in answer.split()] + [0]
        finish = Finish.LENGTH if answer == "cut" else Finish.STOP
        return Sample(i, r.seeds[i], np.array(ids, np.int32), np.zeros(len(ids), np.float32), finish, 0)


ANSWERS = {"a/0": ["1", "1", "2 2 2"], "a/1": ["1", None, None], "a/2": [None] * 3, "b/0": ["7", "cut", "1"]}
PROMPTS = {"a": [prompt("a", i) for i in range(3)], "b": [prompt("b", 0)]}


def run(answers=ANSWERS, prompts=PROMPTS, samples=3):
    engine = Scripted(answers)
    metrics, groups = evaluate.evaluate(
        engine, Tokens(), prompts, samples=samples, sampling=GREEDY, grader=Grader(), seed=4
    )
    return engine, metrics, groups


def test_pass_at_1_by_hand():
    _, metrics, _ = run()
    expected = {
        "eval/a/pass@1": (2 / 3 + 1) / 2,  # per prompt first; aborted samples and a/2 count neither way
        "eval/a/length": (2 + 2 + 4 + 2) / 4,
        "eval/a/truncated_rate": 0.0,
        "eval/b/pass@1": 1 / 3,  # a truncated response is wrong, not absent
        "eval/b/length": (2 + 5 + 2) / 3,
        "eval/b/truncated_rate": 1 / 3,
        "eval/pass@1": ((2 / 3 + 1) / 2 + 1 / 3) / 2,  # over sources, whatever their sizes
        "eval/length": (10 / 4 + 9 / 3) / 2,
    }
    assert metrics == pytest.approx(expected)


def test_a_grader_that_fails_counts_neither_way():
    prompts = {"a": [prompt("a", 0, gold="none", verifier="numeric:whole"), prompt("a", 1)]}
    _, metrics, groups = run({"a/0": ["1"] * 3, "a/1": ["1", "1", "2"]}, prompts)
    assert {s.status for s in groups["a"][0].samples} == {Status.GRADER_ERROR}
    assert metrics["eval/a/pass@1"] == pytest.approx(2 / 3)


def test_nothing_scored_is_nan_and_not_zero():
    _, metrics, _ = run({"a/0": [None] * 3}, {"a": [prompt("a", 0)]})
    assert math.isnan(metrics["eval/a/pass@1"]) and math.isnan(metrics["eval/pass@1"])


def test_every_evaluation_draws_the_same_and_none_is_a_training_draw():
    engine, first, groups = run()
    again, second, _ = run()
    seeds = [[r.seeds for r in requests] for requests, _ in engine.asked]
    assert seeds == [[r.seeds for r in requests] for requests, _ in again.asked] and first == second
    assert seeds[1] == [tuple(sample_seed(4, evaluate.EVAL_STEP, "b/0", i) for i in range(3))]
    assert evaluate.EVAL_STEP < 0  # no step of training
    assert all(sampling is GREEDY for _, sampling in engine.asked)
    assert [g.prompt.id for g in groups["a"]] == ["a/0", "a/1", "a/2"]  # although they ended in another order


def test_file_holds_every_prompt_and_survives_a_rewrite(tmp_path):
    _, metrics, groups = run()
    path = evaluate.write(tmp_path, 12, metrics, groups)
    assert path == tmp_path / "eval" / "step_000012.json"
    assert evaluate.write(tmp_path, 12, metrics, groups) == path
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left
    content = json.loads(path.read_text())
    assert content["step"] == 12 and content["metrics"] == metrics
    assert content["prompts"][0] == {
        "prompt_id": "a/0",
        "source": "a",
        "rewards": [1.0, 1.0, 0.0],
        "lengths": [2, 2, 4],
        "finish": ["stop", "stop", "stop"],
    }
    assert content["prompts"][1]["rewards"] == [1.0, None, None]
    assert content["prompts"][3]["finish"] == ["stop", "length", "stop"]
    assert len(content["prompts"]) == 4


def test_a_file_with_nothing_scored_is_still_json(tmp_path):
    _, metrics, groups = run({"a/0": [None] * 3}, {"a": [prompt("a", 0)]})
    text = evaluate.write(tmp_path, 0, metrics, groups).read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["metrics"]["eval/pass@1"] is None


def test_check_can_end_an_evaluation():
    class Told(Exception):
        pass

    def check():
        raise Told

    with pytest.raises(Told):
        evaluate.evaluate(
            Scripted(ANSWERS), Tokens(), PROMPTS, samples=3, sampling=GREEDY, grader=Grader(), seed=4, check=check
        )
