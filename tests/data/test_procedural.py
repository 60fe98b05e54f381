"""Sources that make their questions: pure functions of seed and position, disjoint where their seeds are."""

import json
import re

import numpy as np
import pytest

from brorl_jax import config as config_lib
from brorl_jax import rewards
from brorl_jax.config import ConfigError, source
from brorl_jax.data import instructions, sources
from brorl_jax.rewards import Answer, ifeval, reasoning_gym
from brorl_jax.types import Prompt


def test_a_category_takes_its_tasks_in_turn():
    pytest.importorskip("reasoning_gym")
    tasks = reasoning_gym.CATEGORIES["geometry"]
    kind = {"kind": "reasoning_gym_category", "category": "geometry", "seed": 40, "size": 1000}
    made = sources.load("g", kind)
    for index in (0, 1, 2, 3, 999):
        record = made[index]
        task, each = tasks[index % 2], index // 2
        assert record.key == f"{task}.{each}"
        assert record.meta["task"] == task
        alone = sources.load("t", {"kind": "reasoning_gym", "task": task, "seed": 40 + each, "size": 1})[0]
        assert record.question == alone.question and record.gold == alone.gold
        prompt = Prompt(record.key, np.zeros(1, np.int32), "", record.gold, "reasoning_gym:tag", "g", record.meta)
        assert rewards.get("reasoning_gym:tag").score(Answer(record.gold), prompt) == 1.0
    assert made.content_hash() == sources.load("g", kind).content_hash()
    assert made.content_hash() != sources.load("g", {**kind, "seed": 41}).content_hash()


def test_a_category_passes_parameters_to_its_tasks():
    pytest.importorskip("reasoning_gym")
    params = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    kind = {"kind": "reasoning_gym_category", "category": "arithmetic", "params": params, "size": 1000}
    index = reasoning_gym.CATEGORIES["arithmetic"].index("chain_sum")
    question = sources.load("a", kind)[index].question
    a, sign, b = re.search(r"(\d) ([+-]) (\d) =", question).groups()
    assert int(sources.load("a", kind)[index].gold) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
    with pytest.raises(ValueError, match="unknown category 'maths'; known: algebra"):
        sources.check("a", {**kind, "category": "maths"})
    with pytest.raises(ValueError, match=r"params name \['bf'\]"):
        sources.check("a", {**kind, "params": {"bf": {}}})


def test_every_instruction_prompt_can_be_followed():
    """By the response that is built for it, for kinds, arguments and combinations of 400 seeds; all 25 kinds occur."""
    seen = set()
    for seed in range(400):
        prompt = instructions.make(seed, instructions.MOST)
        assert 1 <= len(prompt.kinds) <= instructions.MOST
        assert len(set(prompt.kinds)) == len(prompt.kinds)
        text = ifeval.render(prompt.kinds, json.loads(json.dumps(prompt.kwargs)))
        assert all(ifeval.judge(text, prompt.kinds, prompt.kwargs)), prompt
        seen |= set(prompt.kinds)
    assert seen == set(ifeval.KINDS)


def test_instruction_prompts_say_what_is_judged():
    """Every argument stands in the prompt: numbers, words, phrases, relations."""
    for seed in range(300):
        prompt = instructions.make(seed, 3)
        for kind, kwargs in zip(prompt.kinds, prompt.kwargs, strict=True):
            for key, value in kwargs.items():
                for part in value if isinstance(value, list) else [value]:
                    said = instructions.NAMES[part] if key == "language" else str(part)
                    assert said in prompt.text, (kind, key, prompt.text)


def test_instruction_source_is_a_function_of_seed_and_position():
    made = sources.load("i", {"kind": "instructions", "seed": 10, "size": 10**9})
    later = sources.load("i", {"kind": "instructions", "seed": 13, "size": 50})
    assert [made[i + 3].question for i in range(20)] == [later[i].question for i in range(20)]
    assert len({made[i].question for i in range(500)}) > 495
    record = made[10**9 - 1]
    assert sources.verifier_name({"kind": "instructions"}, record) == "ifeval:final"
    with pytest.raises(ValueError, match="most must lie between 1 and 5, got 6"):
        sources.check("i", {"kind": "instructions", "most": 6})


LOGIC = source("reasoning_gym_category", category="logic", seed=0, size=10)


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (source("instructions", seed=100, size=100), source("instructions", seed=199, size=5), "eval.held.seed = 199"),
        (source("instructions", seed=100, size=100), source("instructions", seed=200, size=5), None),
        # logic has 6 tasks: 10 items of the category are items 0 and 1 of each
        (LOGIC, source("reasoning_gym_category", category="logic", seed=1, size=10), "items 1 to 2 of aiw with data.t"),
        (LOGIC, source("reasoning_gym_category", category="logic", seed=2, size=10), None),
        (LOGIC, source("reasoning_gym_category", category="graphs", seed=1, size=10), None),
        (LOGIC, source("reasoning_gym", task="aiw", seed=1, size=10), "eval.held.seed = 1: shares items 1 to 2 of aiw"),
        (LOGIC, source("reasoning_gym", task="aiw", seed=2, size=10), None),
        (LOGIC, source("reasoning_gym", task="chain_sum", seed=1, size=10), None),
        (source("reasoning_gym", task="aiw", seed=0, size=2), LOGIC, "eval.held.seed = 0: shares items 0 to 2 of aiw"),
        (
            source("reasoning_gym_category", category="logic", params={"aiw": {"max_entities": 9}}, size=10),
            source("reasoning_gym", task="aiw", params={"max_entities": 9}, size=10),
            "shares items 0 to 2 of aiw",
        ),
        (
            source("reasoning_gym_category", category="logic", params={"aiw": {"max_entities": 9}}, size=10),
            source("reasoning_gym", task="aiw", size=10),
            None,
        ),
        (source("reasoning_gym_category", category="logik"), LOGIC, "unknown category; did you mean 'logic'"),
        (source("reasoning_gym_category", seed=0), source("instructions"), "name a reasoning-gym category"),
        (source("instructions", size=0), source("instructions"), "say how many prompts make an epoch"),
    ],
)
def test_validation_sets_must_be_disjoint_by_seed(train, held_out, message):
    config = config_lib.default()
    config.data.train.all = train
    config.data.eval.held = held_out
    config.algo.updates_per_step = 1
    if message is None:
        config_lib.validate(config)
    else:
        with pytest.raises(ConfigError, match=re.escape(message)):
            config_lib.validate(config)
