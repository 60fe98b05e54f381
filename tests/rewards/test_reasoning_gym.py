"""reasoning-gym's scorers, wrapped."""

from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest

from brorl_jax import rewards
from brorl_jax.rewards import Answer, reasoning_gym
from brorl_jax.types import Prompt

pytest.importorskip("reasoning_gym")


def prompt(task, verifier="reasoning_gym:tag", index=0, **params):
    meta = {"task": task, "params": params, "seed": 7, "size": 100, "index": index}
    gold = reasoning_gym.entry(meta)["answer"]
    return Prompt(f"{task}/{index}", np.zeros(1, np.int32), "", gold or "", verifier, task, meta)


def test_partial_credit_and_strict():
    p = prompt("chain_sum", min_terms=2, max_terms=2, min_digits=3, max_digits=3)
    partial = f"about {p.gold}"
    loose, strict = rewards.get("reasoning_gym"), rewards.get("reasoning_gym_strict")
    # the package's default scorer: len(oracle) / len(answer) when contained
    assert loose.score(Answer(partial), p) == len(p.gold) / len(partial)
    assert loose.score(Answer(f"1{p.gold}"), p) == loose.score(Answer(f"{p.gold}.5"), p) == 0.0  # another number
    assert strict.score(Answer(partial), p) == 0.0
    assert loose.score(Answer(p.gold), p) == strict.score(Answer(p.gold), p) == 1.0
    assert loose.extract(f"it is {p.gold}", truncated=False) is None


def test_scorer_reads_the_configuration_of_the_prompt():
    """decimal_arithmetic forgives one unit of its last configured place: 1e-1 here, 1e-3 by default."""
    coarse = prompt("decimal_arithmetic", min_num_decimal_places=1, max_num_decimal_places=1)
    default = prompt("decimal_arithmetic")
    score = rewards.get("reasoning_gym_strict").score
    assert score(Answer(str(Decimal(coarse.gold) + Decimal("0.05"))), coarse) == 1.0
    assert score(Answer(str(Decimal(default.gold) + Decimal("0.05"))), default) == 0.0


def test_an_unreadable_answer_is_wrong_but_a_broken_scorer_is_a_grader_error(monkeypatch):
    """boxnet's scorer raises on JSON that is no list; that counts as wrong, unless it raises on anything."""
    p = prompt("boxnet")
    data = reasoning_gym.dataset("boxnet", {}, 7, 100)
    with pytest.raises(TypeError):
        data.score_answer("0", reasoning_gym.entry(p.meta))
    score = rewards.get("reasoning_gym").score
    assert score(Answer("0"), p) == 0.0
    monkeypatch.setattr(type(data), "score_answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(Answer("0"), p)


def test_task_without_a_single_gold_is_not_self_tested():
    p = prompt("graph_color", num_colors=3)
    assert rewards.get("reasoning_gym").render(p) is None
    assert rewards.self_test([p]) == 0


@pytest.mark.parametrize("task", sorted(reasoning_gym.LEFT_OUT))
def test_tasks_that_are_left_out_are_refused(task):
    with pytest.raises(ValueError, match="can't be used"):
        reasoning_gym.dataset(task, {}, 0, 10)


def test_hash_dependent_tasks_need_a_fixed_hash_seed(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "sys", SimpleNamespace(flags=SimpleNamespace(hash_randomization=1)))
    for task in reasoning_gym.HASH_DEPENDENT:
        with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
            reasoning_gym.check_task(task)
    monkeypatch.setattr(reasoning_gym, "sys", SimpleNamespace(flags=SimpleNamespace(hash_randomization=0)))
    for task in reasoning_gym.HASH_DEPENDENT:
        reasoning_gym.check_task(task)


def test_unknown_task_and_parameter():
    with pytest.raises(ValueError, match="no task 'chain_sums'; similar: chain_sum"):
        reasoning_gym.dataset("chain_sums", {}, 0, 10)
    with pytest.raises(ValueError, match="does not take"):
        reasoning_gym.dataset("chain_sum", {"terms": 2}, 0, 10)
