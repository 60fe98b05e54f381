"""Held-out evaluation with an engine made of plain Python."""

import json

import numpy as np
import pytest

from brorl_jax import evaluate, scores
from brorl_jax.rewards.service import Grader
from brorl_jax.rollout.api import Sampling, sample_seed
from brorl_jax.types import Finish, Group, Prompt, Sample

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


def run(answers=ANSWERS, prompts=PROMPTS, samples=3, **options):
    engine = Scripted(answers)
    with Grader() as grader:
        rows = list(
            evaluate.evaluate(
                engine, Tokens(), prompts, samples=samples, sampling=GREEDY, grader=grader, seed=4, **options
            )
        )
    return engine, scores.in_order(rows)


def test_a_row_holds_what_the_samples_did():
    _, rows = run()
    assert [r.prompt_id for r in rows] == ["a/0", "a/1", "a/2", "b/0"]
    assert rows[0] == scores.Row("a/0", "a", [1.0, 1.0, 0.0], [2, 2, 4], ["stop"] * 3)
    assert rows[1].rewards == [1.0, None, None]  # aborted samples count neither way
    assert rows[3] == scores.Row("b/0", "b", [0.0, 0.0, 1.0], [2, 5, 2], ["stop", "length", "stop"])


def test_a_grader_that_fails_counts_neither_way():
    prompts = {"a": [prompt("a", 0, gold="none", verifier="numeric:whole"), prompt("a", 1)]}
    _, rows = run({"a/0": ["1"] * 3, "a/1": ["1", "1", "2"]}, prompts)
    assert rows[0].rewards == [None] * 3
    assert scores.metrics(rows, {})["eval/a/pass@1"] == pytest.approx(2 / 3)


def test_every_evaluation_draws_the_same_and_none_is_a_training_draw():
    engine, first = run()
    again, second = run()
    seeds = [[r.seeds for r in requests] for requests, _ in engine.asked]
    assert seeds == [[r.seeds for r in requests] for requests, _ in again.asked] and first == second
    assert seeds[1] == [tuple(sample_seed(4, evaluate.EVAL_STEP, "b/0", i) for i in range(3))]
    assert evaluate.EVAL_STEP < 0  # no step of training
    assert all(sampling is GREEDY for _, sampling in engine.asked)


def test_what_is_done_is_not_asked_for_again():
    engine, rows = run(skip={"a/1", "b/0"})
    assert [r.prompt.id for requests, _ in engine.asked for r in requests] == ["a/0", "a/2"]
    assert [row.prompt_id for row in rows] == ["a/0", "a/2"]


def test_a_file_of_a_training_run_holds_every_prompt_and_is_read_back(tmp_path):
    _, rows = run()
    metrics = scores.metrics(rows, {})
    evaluate.write(tmp_path, 4, {}, rows[:1])
    path = evaluate.write(tmp_path, 12, metrics, rows[::-1])
    assert path == tmp_path / "eval" / "step_000012.json"
    assert evaluate.write(tmp_path, 12, metrics, rows[::-1]) == path
    assert len(list(path.parent.iterdir())) == 2  # no temporary file is left
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["step"] == 12
    assert content["metrics"]["eval/b/pass@1"] == pytest.approx(1 / 3)
    assert evaluate.read(tmp_path) == rows  # of the last evaluation
    with pytest.raises(ValueError, match="holds no evaluation"):
        evaluate.read(tmp_path / "eval")


def test_check_can_end_an_evaluation():
    class Told(Exception):
        pass

    def check():
        raise Told

    with pytest.raises(Told):
        run(check=check)
