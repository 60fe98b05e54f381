"""What each family makes of its rows: rows in the shape of the source, items by hand."""

import json

import pytest

from brorl_jax.data.prepare import code, families, generated
from brorl_jax.data.prepare.families import FAMILIES, Item, Skip

ITEMS = {
    "gsm8k": (
        {"question": "How many?", "answer": "He has <<2*540=1080>>1080.\n#### 1,080"},
        Item("How many?", "1,080"),
    ),
    "deepscaler": ({"problem": "P", "answer": "\\frac12", "solution": "s"}, Item("P", "\\frac12")),
    "math": (
        {
            "problem": "P",
            "solution": "So \\boxed{1}, no: $\\boxed{\\frac{1}{2}}$.",
            "level": "Level 5",
            "type": "Algebra",
        },
        Item("P", "\\frac{1}{2}", meta={"level": "Level 5", "type": "Algebra"}),
    ),
    "deepmath": (
        {"question": "P", "final_answer": "0", "difficulty": 4.5, "topic": "T", "r1_solution_1": "..."},
        Item("P", "0", meta={"difficulty": 4.5}),
    ),
    "scp116k": (
        {"problem": "P", "matched_solution": "3 m", "is_qwq_solution_same_with_matched_solution": True},
        Item("P", "3 m"),
    ),
    "nemotron_if": (
        {
            "input": [{"role": "user", "content": "Write. No commas."}],
            "args": {
                "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
                "instruction_kwargs": [{"keywords": None}, {"keywords": ["a"], "num_words": None}],
            },
        },
        Item(
            "Write. No commas.",
            meta={
                "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
                "kwargs": [{}, {"keywords": ["a"]}],
            },
            history=[],
        ),
    ),
    "eurus_code": (
        {
            "data_source": "taco",
            "prompt": [
                {"role": "system", "content": "Use [ASSESS]."},
                {
                    "role": "user",
                    "content": "Add two.\n\nWrite Python code to solve the problem. Present the code in \n```python\n"
                    "Your code\n```\nat the end.",
                },
            ],
            "ability": "code",
            "reward_model": {"ground_truth": '{"inputs": ["1 2\\n", ["3", "4"]], "outputs": ["3\\n", ["7"]]}'},
        },
        Item(
            "Add two.",
            meta={
                "origin": "taco",
                "tests": {"kind": "stdin", "inputs": ["1 2\n", "3\n4"], "outputs": ["3\n", "7"], "time_limit": 0.0},
            },
            said="Add two.",
        ),
    ),
    "mbpp": (
        {
            "task_id": 602,
            "text": "Write a function to add.",
            "code": "def helper(a):\r\n    return a\r\ndef add(a, b):\r\n    return helper(a) + b",
            "test_list": ["assert add(1, 2) == 3", "assert add(len('a'), 0) == 1"],
            "test_setup_code": "",
        },
        Item(
            "Write a function to add.",
            gold="def helper(a):\n    return a\ndef add(a, b):\n    return helper(a) + b",
            key="602",
            meta={
                "tests": {
                    "kind": "assert",
                    "fn": "",
                    "tests": ["assert add(1, 2) == 3", "assert add(len('a'), 0) == 1"],
                    "setup": "",
                }
            },
            said="Write a function to add.\nIt must pass tests such as `assert add(1, 2) == 3`.",
        ),
    ),
    "reasoning_gym": (
        {"question": "Q", "gold": "", "key": "bf-9", "meta": {"task": "bf", "index": 2}},
        Item("Q", key="bf-9", meta={"task": "bf", "index": 2}),
    ),
    "instructions": (
        {"question": "Q", "gold": "", "key": "9", "meta": {"instruction_id_list": []}},
        Item("Q", key="9", meta={"instruction_id_list": []}),
    ),
    "prepared": (
        {
            "id": "b-7",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Say x. Box it."},
            ],
            "gold": "x",
            "verifier": "exact:boxed",
            "source": "b",
            "meta": {"question": "Say x."},
        },
        Item(
            "Say x.",
            "x",
            key="b-7",
            history=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}],
            said="Say x. Box it.",
            verifier="exact:boxed",
            source="b",
            meta={"question": "Say x."},
        ),
    ),
}


# Benchmarks have tests of their own, and are in the registry only once these are imported.
TRAINING = {name: family for name, family in FAMILIES.items() if not family.benchmark}


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_a_row_becomes_this_item(name):
    row, item = ITEMS[name]
    assert FAMILIES[name].convert(row) == item


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gsm8k", {"answer": "no mark"}, "no_gold"),
        ("deepscaler", {"answer": None}, "no_gold"),
        ("math", {"solution": "no box"}, "no_gold"),
        ("scp116k", {"is_qwq_solution_same_with_matched_solution": False}, "not_confirmed"),
        ("scp116k", {"matched_solution": "a derivation " * 20}, "no_short_answer"),
        ("nemotron_if", {"args": {"instruction_id_list": ["x:y"], "instruction_kwargs": [{}]}}, "unknown_instruction"),
        ("eurus_code", {"ability": "math"}, "not_code"),
        ("eurus_code", {"reward_model": {"ground_truth": '{"inputs": [], "outputs": []}'}}, "no_tests"),
        ("eurus_code", {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": []}'}}, "tests_unreadable"),
        (
            "eurus_code",
            {"reward_model": {"ground_truth": '{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}'}},
            "tests_unreadable",
        ),
        ("mbpp", {"task_id": 600}, "not_training_split"),
    ],
)
def test_rows_that_cant_be_used_are_counted_by_reason(name, change, reason):
    with pytest.raises(Skip, match=f"^{reason}$"):
        FAMILIES[name].convert({**ITEMS[name][0], **change})


def test_rows_of_another_set_are_refused():
    with pytest.raises(ValueError, match=r"none of the fields answer; it has question"):
        FAMILIES["gsm8k"].convert({"question": "Q"})


def test_a_models_answer_confirms_where_no_flag_does():
    row = {"problem": "P", "matched_solution": "Long. \\boxed{3}", "r1_response": "So \\boxed{3.0}"}
    assert families.scp116k(row) == Item("P", "3", confirm="3.0")


@pytest.mark.parametrize(
    ("truth", "inputs", "outputs"),
    [
        ({"inputs": [["ab", 1], ["c", 2]], "outputs": [3, 4]}, [["ab", 1], ["c", 2]], [3, 4]),
        ({"inputs": ['"ab"\n1', '"c"\n2'], "outputs": ["3", "4"]}, [["ab", 1], ["c", 2]], [3, 4]),
        (
            {"inputs": [["ab"]], "outputs": [["YES"]]},
            [["ab"]],
            [["YES"]],
        ),  # maybe the one value, in a list: the judge takes either
        ({"inputs": [["ab"], ["c"]], "outputs": [[1], [1, 2]]}, [["ab"], ["c"]], [[1], [1, 2]]),  # lists are values
        ({"inputs": [["ab"]], "outputs": ["no JSON"]}, [["ab"]], ["no JSON"]),
    ],
)
def test_functions_of_eurus_in_every_spelling(truth, inputs, outputs):
    row = {**ITEMS["eurus_code"][0], "reward_model": {"ground_truth": json.dumps({**truth, "fn_name": "solve"})}}
    item = FAMILIES["eurus_code"].convert(row)
    assert item.meta["tests"] == {
        "kind": "call",
        "fn": "solve",
        "inputs": inputs,
        "outputs": outputs,
        "time_limit": 0.0,
    }
    assert item.said == "Add two.\n\nName it `solve`."


def test_every_family_has_a_template_a_licence_and_rows():
    assert code and generated
    for name, family in TRAINING.items():
        assert family.prompt.count("{question}") == 1 and family.licence and family.about
        assert name == "prepared" or family.hub or family.generate


def test_generated_rows_by_task_and_by_category():
    rows = list(generated._reasoning_gym_rows(2, 7, ["geometry", "bf"]))
    tasks = ["advanced_geometry", "bf", "simple_geometry"]
    assert [row["key"] for row in rows] == [f"{task}-{seed}" for task in tasks for seed in (7, 8)]
    again = list(generated._reasoning_gym_rows(1, 8, ["bf"]))  # item 0 of seed 8 is item 1 of seed 7
    assert (again[0]["key"], again[0]["question"]) == (rows[3]["key"], rows[3]["question"])
    with pytest.raises(ValueError, match="reasoning-gym has no task 'geometri'"):
        list(generated._reasoning_gym_rows(1, 0, ["geometri"]))
    with pytest.raises(ValueError, match="no tasks to choose from"):
        list(generated._instructions_rows(1, 0, ["x"]))
