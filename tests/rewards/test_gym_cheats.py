"""No answer that ignores the question earns more than chance, on any task of reasoning-gym; nothing runs an answer.

Chance is the share of items with the commonest right answer: what somebody earns who knows the task, but not the
question. It is 0 for tasks whose items have no single right answer.
"""

import json
import re
from collections import Counter

import numpy as np
import pytest

from brorl_jax import rewards
from brorl_jax.rewards import Answer, reasoning_gym
from brorl_jax.types import Prompt

pytest.importorskip("reasoning_gym")

SLOW = {
    "futoshiki",
    "intermediate_integration",
    "knight_swap",
    "puzzle24",
    "rearc",
    "sokoban",
    "sudoku",
    "zebra_puzzles",
}
SLOW |= {"arc_agi", "polynomial_multiplication", "rubiks_cube", "simple_integration"}
HASHED = set(reasoning_gym.HASH_DEPENDENT)
TASKS = sorted({task for tasks in reasoning_gym.CATEGORIES.values() for task in tasks} | HASHED | {"coin_flip"})
ITEMS = 16
ALLOWED = 0.06  # above chance: credit for a part by luck, on so few items

SQUARE = [[1] * 4] * 4
CONSTANTS = [
    *(
        "0",
        "1",
        "2",
        "3",
        "5",
        "-1",
        "10",
        "50",
        "100",
        "0.5",
        "1/2",
        "0.0",
        "1e999",
        "nan",
        "inf",
        "-inf",
        "1_0",
        "3 days",
    ),
    *(
        "True",
        "False",
        "Yes",
        "No",
        "None",
        "True False",
        "Yes No",
        "infeasible",
        "impossible",
        "A",
        "a",
        "x",
        "C",
        "Monday",
    ),
    *("0123456789", "0 1 2 3 4 5 6 7 8 9", "12:00", "12:00:00", "50 days, 12:00", "6+6+6+6", "1*2*3*4", "x**2", "0*x"),
    *(
        "[]",
        "{}",
        "[[]]",
        "[[0]]",
        "()",
        '{"a": 1}',
        "[0]",
        "[1, 2, 3]",
        "(P ∨ ¬P)",
        "P",
        "(P ∨ Q)",
        "nan+nanj",
        "2 × 3",
    ),
    *(
        "F F'",
        "U99999999999",
        "hello world",
        "a" * 300,
        "1 " * 300,
        "((((",
        "\\boxed{1}",
        "٣",
        "\x00",
        "A B C",
        "[" * 5000,
    ),
    *(json.dumps([[v] * n for _ in range(n)]) for v in (0, 1) for n in (3, 10)),
    *("\n".join([" ".join(str(1 + (i + r) % n) for i in range(n)) for r in range(n)]) for n in (4, 5, 9)),
    *(json.dumps([float("nan")] * n) for n in (3, 5, 7, 10)),
]


def _prompts(task, items, monkeypatch):
    # Whether items are the same in every process does not matter here.
    monkeypatch.setattr(reasoning_gym, "HASH_DEPENDENT", ())
    prompts = []
    for index in range(items):
        meta = {"task": task, "params": {}, "seed": 5_000, "size": 1000, "index": index}
        gold = reasoning_gym.entry(meta)["answer"]
        prompts.append(Prompt(f"{task}/{index}", np.zeros(1, np.int32), "", gold or "", "reasoning_gym", task, meta))
    return prompts


def _of(tasks):
    return [pytest.param(task, marks=[pytest.mark.slow] if task in SLOW else []) for task in tasks]


@pytest.mark.parametrize("task", _of(TASKS))
def test_no_constant_answer_earns_more_than_chance(task, monkeypatch, tmp_path):
    items = 8 if task in SLOW else ITEMS
    prompts = _prompts(task, items, monkeypatch)
    score = rewards.get("reasoning_gym").score
    golds = Counter(p.gold.strip().lower() for p in prompts if p.gold)
    chance = max(golds.values(), default=0) / items
    for p in prompts:
        if gold := rewards.get("reasoning_gym").rules.gold(p):
            assert score(Answer(gold.strip()), p) == 1.0
    program = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).write_text('x')"
    for constant in [*CONSTANTS, program, f"[{program}]", *list(golds)[:4]]:
        earned = np.mean([score(Answer(constant), p) for p in prompts])
        assert earned <= chance + ALLOWED, f"{constant[:60]!r} earns {earned:.3f}, chance is {chance:.3f}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("task", "cheat", "rest"),
    [
        # what needs no thought, as a function of the item
        ("prime_factorization", lambda e: str(e["metadata"]["number"]), 0.2),
        ("number_sorting", lambda e: json.dumps([float("nan")] * len(eval(e["answer"]))), 0.0),
        ("puzzle24", lambda e: "6 + 6 + 6 + 6", 0.0),
        ("game_of_life", lambda e: re.findall(r"\[\[.*?\]\]", e["question"], re.DOTALL)[-1], 0.0),
        ("game_of_life", lambda e: re.sub("1", "0", e["answer"]), 0.2),
        ("mini_sudoku", lambda e: "\n".join(" ".join(map(str, row)) for row in e["metadata"]["puzzle"]), 0.0),
        ("mini_sudoku", lambda e: "1 1 1 1\n" * 4, 0.0),
        ("simple_integration", lambda e: "Integral({integrand}, {variable})".format(**e["metadata"]), 0.0),
        ("simple_integration", lambda e: "integrate({integrand}, {variable})".format(**e["metadata"]), 0.0),
        ("polynomial_multiplication", lambda e: e["metadata"]["polynomial_expr"], 0.25),
        ("countdown", lambda e: f"{e['metadata']['target']} # " + " ".join(map(str, e["metadata"]["numbers"])), 0.0),
        ("fraction_simplification", lambda e: "{numerator}/{denominator}".format(**e["metadata"]), 0.0),
        ("rubiks_cube", lambda e: "F F'", 0.0),
    ],
)
def test_cheats_that_look_at_the_question(task, cheat, rest, monkeypatch):
    prompts = _prompts(task, 8, monkeypatch)
    score = rewards.get("reasoning_gym").score
    assert np.mean([score(Answer(cheat(reasoning_gym.entry(p.meta)).strip()), p) for p in prompts]) <= rest


@pytest.mark.parametrize(
    ("task", "metadata", "answer", "expected"),
    [
        ("countdown", {"numbers": [3, 5, 7], "target": 22}, "(3 * 5) + 7", 1.0),
        ("countdown", {"numbers": [3, 5, 7], "target": 22}, "15 + 7", 0.0),
        ("countdown", {"numbers": [3, 5, 7], "target": 15}, "3 * 5", 0.0),  # each number once
        ("countdown", {"numbers": [3, 5, 7], "target": 15}, "3 * 5 + 7 * 0", 0.0),
        ("puzzle24", {"numbers": [1, 3, 4, 6]}, "6 / (1 - 3 / 4)", 1.0),  # exact, through a fraction
        ("puzzle24", {"numbers": [1, 3, 4, 6]}, "6 / (1 - 4 / 4)", 0.0),
        ("puzzle24", {"numbers": [0, 3, 4, 6]}, "6 / 0 + 3 + 4", 0.0),
        ("prime_factorization", {"number": 12, "factors": [2, 2, 3]}, "3 × 2 × 2", 1.0),
        ("prime_factorization", {"number": 12, "factors": [2, 2, 3]}, "4 × 3", 0.5),
        ("prime_factorization", {"number": 12, "factors": [2, 2, 3]}, "12 × 1", 0.0),
        ("polynomial_equations", {"real_solutions": [-2.0, 3.5]}, "3.5, -2", 1.0),
        ("polynomial_equations", {"real_solutions": [-2.0, 3.5]}, "-2", 0.0),
        ("polynomial_equations", {"real_solutions": [-2.0, 3.5]}, "-2, 3.5, nan", 0.0),
    ],
)
def test_rescored_by_hand(task, metadata, answer, expected):
    assert reasoning_gym.rescored.RESCORED[task](answer, {"metadata": metadata}, None) == expected


def test_half_a_sudoku():
    puzzle, solution = [[1, 0], [0, 1]], [[1, 2], [2, 1]]
    entry = {"answer": "1 2\n2 1", "metadata": {"puzzle": puzzle, "solution": solution}}

    class Package:
        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    score = reasoning_gym.rescored.clues_kept
    assert score("1 2\n2 1", entry, Package()) == 1.0
    assert score("1 2\n1 1", entry, Package()) == 0.45  # one of two blanks, times 0.9
    assert score("2 2\n2 1", entry, Package()) == 0.0  # a clue changed


def test_every_task_of_the_package_has_a_category_or_a_reason():
    from reasoning_gym.factory import DATASETS

    listed = [task for tasks in reasoning_gym.CATEGORIES.values() for task in tasks]
    assert len(listed) == len(set(listed))
    aside = {*reasoning_gym.LEFT_OUT, *reasoning_gym.HASH_DEPENDENT, "coin_flip"}
    assert set(listed) | aside == set(DATASETS)
    assert not set(listed) & aside
    for task, (cls, _) in DATASETS.items():
        module = cls.__module__.split(".")[1]
        expected = "other" if task in {"coin_flip", "composite"} else module
        assert task in reasoning_gym.LEFT_OUT or reasoning_gym.category(task) == expected
    assert len(reasoning_gym.CATEGORIES) == 11


def test_acre_items_are_functions_of_their_seed():
    """The package makes them all at once, depending on how many are asked for."""
    items = [
        reasoning_gym.entry({"task": "acre", "params": {}, "seed": seed, "size": size, "index": index})["question"]
        for seed, size, index in [(10, 100, 3), (12, 50, 1), (10, 10**9, 3), (10, 100, 4)]
    ]
    assert items[0] == items[1] == items[2] != items[3]
