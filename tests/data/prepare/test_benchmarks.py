"""Benchmarks: every row becomes a prompt whose gold its own verifier accepts; the paper's evaluation asks them."""

from __future__ import annotations

import json
import pathlib

import pytest

from brorl_jax.commandline import load
from brorl_jax.config import validate
from brorl_jax.data.prepare import __main__ as command
from brorl_jax.data.prepare import benchmarks, families, pipeline

REPO = pathlib.Path(__file__).resolve().parents[3]
FILES = {  # family: file of public benchmark data, rows, rows left out with the reason
    "aime24": ("aime24.jsonl", 30, {}),
    "aime25": ("aime25.jsonl", 30, {}),
    "amc23": ("amc23.jsonl", 40, {}),
    "math500": ("math500.jsonl", 500, {}),
    "minerva": ("minerva_math.jsonl", 272, {}),
    "olympiadbench": ("olympiadbench_oe_to_maths_en.jsonl", 675, {}),
    "gsm8k_test": ("gsm8k_test.jsonl", 1319, {}),
    "ifeval": ("ifeval_input_data.jsonl", 541, {}),
}


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", "ifeval"])
def test_every_row_of_a_benchmark_is_kept(name, shared_data, tmp_path):
    _check(name, shared_data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math500", "minerva", "olympiadbench", "gsm8k_test"])
def test_every_row_of_a_large_benchmark_is_kept(name, shared_data, tmp_path):
    _check(name, shared_data, tmp_path)


def _check(name, shared_data, tmp_path):
    file, count, dropped = FILES[name]
    command.main([name, "--from", str(shared_data / file), "--out", str(tmp_path / name)])
    manifest = json.loads((tmp_path / name / "manifest.json").read_text())
    assert manifest["rows_in"] == count
    assert manifest["dropped"] == dropped
    assert manifest["options"]["near"] == 0  # a question that comes twice in a benchmark is asked twice


def test_repeats_are_kept(tmp_path):
    rows = [{"problem": "What is 1 + 1?", "expected_answer": "2"}] * 3
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command.main(["aime24", "--from", str(tmp_path / "aime.jsonl"), "--out", str(tmp_path / "out")])
    assert len((tmp_path / "out" / "data.jsonl").read_text().splitlines()) == 3


def test_options_of_a_multiple_choice_question_are_shuffled_the_same_way_every_time():
    rows = [
        {
            "Question": f"Which one is {i}?",
            "Correct Answer": f"right {i}",
            **{f"Incorrect Answer {j}": f"wrong {j}" for j in (1, 2, 3)},
        }
        for i in range(40)
    ]
    items = [benchmarks.gpqa(row) for row in rows]
    assert items == [benchmarks.gpqa(row) for row in rows]
    for i, item in enumerate(items):
        place = "ABCD".index(item.gold)
        assert item.meta["options"][place] == f"right {i}"
        assert f"\n{item.gold}) right {i}" in item.question
    assert {item.gold for item in items} == set("ABCD")  # no constant answer is right


def test_programs_of_every_form_are_read():
    stub = {"prompt": "def one():\n", "canonical_solution": "    return 1\n", "entry_point": "one", "task_id": "H/0"}
    item = benchmarks.humaneval({**stub, "test": "def check(f):\n    assert f() == 1\n"})
    assert (item.key, item.gold) == ("H-0", "def one():\n    return 1\n")
    assert item.meta["tests"]["tests"] == ["check(one)"]
    item = benchmarks.apps({"question": "Add.", "input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}'})
    assert item.meta["tests"]["kind"] == "stdin"
    item = benchmarks.taco({"question": "Add.", "input_output": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}})
    assert item.said.endswith("Name the function `add`.")
    with pytest.raises(families.Skip, match="no_tests"):
        benchmarks.apps({"question": "Add.", "input_output": '{"inputs": [], "outputs": []}'})
    with pytest.raises(families.Skip, match="tests_unreadable"):
        benchmarks.apps({"question": "Add.", "input_output": ""})
    with pytest.raises(families.Skip, match="interactive_or_files"):
        benchmarks.codeforces({"description": "Ask.", "official_tests": [], "input_mode": "interactive"})


def test_a_question_with_several_golds_is_left_out_by_name():
    rows = [{"question": "Which?", "final_answer": ["1", "2"]}, {"question": "What?", "final_answer": ["$3$"]}]
    result = pipeline.convert("olympiadbench", families.FAMILIES["olympiadbench"], rows)
    assert dict(result.dropped) == {"several_answers": 1} and [row["gold"] for row in result.rows] == ["$3$"]


def test_the_papers_evaluation_takes_the_benchmarks_at_hand(tmp_path):
    config = load(f"{REPO}/configs/eval/paper.py:{tmp_path}")
    assert {source.heading.split("/")[0] for source in config.data.eval.values()} == {"reasoning_gym"}
    validate(config, purpose="evaluate")
    (tmp_path / "aime24").mkdir()
    config = load(f"{REPO}/configs/eval/paper.py:{tmp_path}")
    assert config.data.eval.aime24.heading == "math"
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (16, 0.6, 0.95)
    headings = {source.heading for source in config.data.eval.values()} - {"math"}
    assert len(headings) == 11  # [P] Table 5
