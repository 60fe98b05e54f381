"""The command line end to end, on small files made here: what is kept, what is left out and why, what is written."""

import hashlib
import itertools
import json
import re
import sys
import types

import pytest

from brorl_jax import rewards
from brorl_jax.data import files, sources
from brorl_jax.data.prepare.__main__ import main

STORIES = [
    "Tom picks twelve apples a day and sells each of them for two dollars. How much does he earn in 7 days?",
    "A train leaves the town at noon and drives 60 miles an hour. How far has it come after 3 hours?",
    "Lily reads 20 pages every evening and 35 on Sundays. How many pages has she read after two weeks?",
    "A baker fills 8 trays with 15 rolls each, and burns one tray. How many rolls can he sell?",
    "Three friends share a bill of 90 dollars, and the tallest of them pays half. What do the others pay each?",
]


def gsm8k(path, rows):
    lines = (json.dumps({"question": question, "answer": f"...\n#### {gold}"}) + "\n" for question, gold in rows)
    path.write_text("".join(lines))
    return str(path)


def rows_of(out):
    return files.read_rows(out / "data.jsonl")


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture
def stories(tmp_path):
    return gsm8k(tmp_path / "stories.jsonl", [(story, i) for i, story in enumerate(STORIES)])


def test_what_is_left_out_is_counted_and_shown(tmp_path, capsys):
    train = gsm8k(
        tmp_path / "train.jsonl",
        [
            (STORIES[0], 168),
            (STORIES[1], "1,080"),
            (STORIES[0].replace("Tom", "Ann"), 168),  # a name changed
            (STORIES[0].upper(), 168),  # the same words
            (STORIES[0], 169),
            (STORIES[0].replace("7", "9"), 216),  # another exercise
            (STORIES[2], "a lot"),  # no number
            ("A question without an answer?", ""),
            ("My favourite exercise. " + STORIES[3] + " Explain.", 105),
        ],
    )
    bench = tmp_path / "bench.jsonl"
    body, _, asked = STORIES[3].partition(". ")
    bench.write_text(json.dumps({"Body": f"{body}.", "Question": asked}) + "\n")
    out = tmp_path / "out"
    main(["gsm8k", "--from", train, "--against", str(bench), "--out", str(out)])

    prompt = "{}\nLet's think step by step and output the final answer within \\boxed{{}}."
    expected = [("gsm8k-0", STORIES[0], "168"), ("gsm8k-1", STORIES[1], "1,080")]
    expected.append(("gsm8k-5", STORIES[0].replace("7", "9"), "216"))
    assert rows_of(out) == [
        {
            "id": key,
            "prompt": prompt.format(question),
            "gold": gold,
            "verifier": "numeric:boxed",
            "source": "gsm8k",
            "meta": {"question": question},
        }
        for key, question, gold in expected
    ]
    manifest = manifest_of(out)
    dropped = {"no_gold": 1, "gold_fails": 1, "repeat": 1, "repeat_with_another_gold": 1, "near_repeat": 1}
    dropped["in_benchmark"] = 1
    assert manifest["dropped"] == dropped and manifest["rows_in"] == 9 and manifest["rows_out"] == 3
    assert manifest["sha256"] == hashlib.sha256((out / "data.jsonl").read_bytes()).hexdigest()
    assert manifest["origin"] == [{"file": "train.jsonl", "sha256": files.sha256(tmp_path / "train.jsonl")}]
    assert manifest["verifiers"] == {"numeric:boxed": 3} and manifest["sources"] == {"gsm8k": 3}
    report = (out / "report.md").read_text()
    for line in (
        "`gsm8k-6`, gold fails: gsm8k-6: ValueError: the gold 'a lot' is not a number",
        "- `gsm8k-2` repeats `gsm8k-0` (score 0.9",
        "- `gsm8k-3` repeats `gsm8k-0` (score 1.00, repeat)",
        "- `gsm8k-4` repeats `gsm8k-0` (score 1.00, repeat with another gold)",
        "- `gsm8k-8` stands in `bench.jsonl:1` (score 1.00)",
    ):
        assert line in report
    assert f"{out}: 3 of 9 rows" in capsys.readouterr().out
    assert len(sources.load("s", {"kind": "prepared", "path": str(out)})) == 3


def test_the_same_inputs_give_the_same_bytes(tmp_path, stories):
    for name in ("a", "b", "b"):  # the second time over itself
        main(["gsm8k", "--from", stories, "--out", str(tmp_path / name)])
    for file in ("data.jsonl", "manifest.json", "report.md"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert str(tmp_path) not in (tmp_path / "a" / "manifest.json").read_text()  # nor where it was made


def test_a_smaller_limit_keeps_some_of_what_a_larger_one_keeps(tmp_path, stories):
    kept = []
    for limit in (1, 2, 3, 4, 9):
        main(["gsm8k", "--from", stories, "--limit", str(limit), "--out", str(tmp_path / "o")])
        kept.append([row["id"] for row in rows_of(tmp_path / "o")])
    assert [len(ids) for ids in kept] == [1, 2, 3, 4, 5]
    assert all(set(few) < set(more) for few, more in itertools.pairwise(kept))
    assert all(ids == sorted(ids) for ids in kept)  # in the order of the file


def test_rows_of_a_benchmark_that_is_itself_trained_on_are_no_reason(tmp_path, stories):
    main(["gsm8k", "--from", stories, "--against", str(tmp_path), "--out", str(tmp_path / "o")])
    assert manifest_of(tmp_path / "o")["rows_out"] == 5 and manifest_of(tmp_path / "o")["against"] == []


def test_prompts_are_kept_by_how_often_a_policy_solved_them(tmp_path, stories):
    rates = {"gsm8k-0": [0.0, 0.0], "gsm8k-1": [1.0, 0.0], "gsm8k-2": [1.0, 1.0], "gsm8k-3": [None]}
    prompts = [{"prompt_id": f"math/{key}", "rewards": values} for key, values in rates.items()]
    measured = tmp_path / "step_000000.json"
    measured.write_text(json.dumps({"prompts": prompts}))
    options = ["--pass-rates", str(measured), "--keep", "0.1:0.9", "--out", str(tmp_path / "o")]
    main(["gsm8k", "--from", stories, *options])
    assert [row["id"] for row in rows_of(tmp_path / "o")] == ["gsm8k-1", "gsm8k-3", "gsm8k-4"]
    assert manifest_of(tmp_path / "o")["dropped"] == {"too_easy": 1, "too_hard": 1}
    main(["gsm8k", "--from", stories, *options, "--unmeasured", "drop"])
    assert [row["id"] for row in rows_of(tmp_path / "o")] == ["gsm8k-1"]
    assert manifest_of(tmp_path / "o")["pass_rates"]["prompts"] == 3


def test_pass_rates_of_other_prompts_are_refused(tmp_path, stories):
    """They would keep every row, as if the filter had been applied."""
    (tmp_path / "step_000000.json").write_text(json.dumps({"prompts": [{"prompt_id": "train/7", "rewards": [0.0]}]}))
    options = ["--pass-rates", str(tmp_path / "step_000000.json"), "--keep", "0.1:0.9", "--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit, match=r"none of the 1 prompts measured, such as '7'.* such as 'gsm8k-0'"):
        main(["gsm8k", "--from", stories, *options])
    assert not (tmp_path / "o").exists()


def test_prepared_sets_are_joined_and_keep_what_they_are(tmp_path, stories):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    ask = {"role": "user", "content": "Say x in a box."}
    common = {"gold": "x", "verifier": "exact:boxed", "source": "talks", "meta": {}}
    conversations = [
        {"id": "t-0", "prompt": ask["content"], **common},
        {"id": "t-1", "messages": [*talk, ask], **common},
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    main(["gsm8k", "--from", stories, "--out", str(tmp_path / "math")])
    both = [str(tmp_path / "math"), str(tmp_path / "talks.jsonl")]
    main(["prepared", "--from", *both, "--out", str(tmp_path / "both")])
    assert rows_of(tmp_path / "both") == [*rows_of(tmp_path / "math"), *conversations]  # other history: no repeat
    assert manifest_of(tmp_path / "both")["sources"] == {"gsm8k": 5, "talks": 2}
    with pytest.raises(SystemExit, match=r"error: prepared, row 5: the id 'gsm8k-0' comes twice"):
        main(["prepared", "--from", both[0], both[0], "--out", str(tmp_path / "twice")])


def test_with_templates_only_one_of_a_template_is_kept(tmp_path):
    other = STORIES[0].replace("7", "9")
    train = gsm8k(tmp_path / "t.jsonl", [(STORIES[0], 168), (other, 216), (STORIES[1], 180)])
    main(["gsm8k", "--from", train, "--templates", "--out", str(tmp_path / "o")])
    assert [row["id"] for row in rows_of(tmp_path / "o")] == ["gsm8k-0", "gsm8k-2"]
    main(["gsm8k", "--from", train, "--near", "0", "--out", str(tmp_path / "o")])
    assert [row["id"] for row in rows_of(tmp_path / "o")] == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]


def test_a_gold_that_fails_once_on_a_busy_machine_is_kept(tmp_path, stories, monkeypatch):
    asked = []

    def refusals(stated):
        asked.append(len(stated))
        return ["out of time"] * 2 + [""] * 3 if len(asked) == 1 else ["", "out of time"]

    monkeypatch.setattr(rewards, "refusals", refusals)
    main(["gsm8k", "--from", stories, "--out", str(tmp_path / "o")])
    assert asked == [5, 2]
    assert [row["id"] for row in rows_of(tmp_path / "o")] == ["gsm8k-0", "gsm8k-2", "gsm8k-3", "gsm8k-4"]
    assert "`gsm8k-1`, gold fails: out of time" in (tmp_path / "o" / "report.md").read_text()


def test_template_and_verifier_may_be_others(tmp_path, stories):
    other = ["--prompt", "Q: {question}", "--verifier", "exact:answer_line"]
    main(["gsm8k", "--from", stories, *other, "--out", str(tmp_path / "o")])
    row = rows_of(tmp_path / "o")[0]
    assert (row["prompt"], row["verifier"]) == (f"Q: {STORIES[0]}", "exact:answer_line")


def test_rows_come_from_the_hub_where_no_file_is_named(tmp_path, monkeypatch):
    seen = []

    def load_dataset(*args, **kwargs):
        seen.append((args, kwargs))
        return [{"question": STORIES[0], "answer": "#### 168"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    main(["gsm8k", "--revision", "abc", "--out", str(tmp_path / "o")])
    assert seen == [(("openai/gsm8k", "main"), {"split": "train", "revision": "abc"})]
    origin = {"path": "openai/gsm8k", "name": "main", "split": "train", "data_files": "", "revision": "abc"}
    assert manifest_of(tmp_path / "o")["origin"] == origin
    main(["gsm8k", "--split", "test", "--out", str(tmp_path / "o")])
    assert seen[1][1] == {"split": "test", "revision": None}
    assert manifest_of(tmp_path / "o")["origin"]["split"] == "test"


def test_generated_instructions(tmp_path):
    main(["instructions", "--size", "30", "--seed", "4", "--out", str(tmp_path / "o")])
    rows = rows_of(tmp_path / "o")
    dropped = manifest_of(tmp_path / "o")["dropped"]
    assert len(rows) + sum(dropped.values()) == 30 and set(dropped) <= {"near_repeat"}
    assert all(row["verifier"] == "ifeval:final" and row["meta"]["instruction_id_list"] for row in rows)


def test_generated_tasks(tmp_path):
    main(["reasoning_gym", "--tasks", "chain_sum", "--size", "4", "--seed", "9", "--out", str(tmp_path / "o")])
    rows = rows_of(tmp_path / "o")
    assert [row["id"] for row in rows] == [f"reasoning_gym-chain_sum-{i}" for i in (9, 10, 11, 12)]
    assert all(row["verifier"] == "reasoning_gym:tag" and row["gold"] and "<answer>" in row["prompt"] for row in rows)
    assert manifest_of(tmp_path / "o")["origin"] == {"tasks": ["chain_sum"], "size": 4, "seed": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "--from", "nowhere.jsonl"], "no file 'nowhere.jsonl'"),
        (["gsm8k", "--from", "STORIES", "--prompt", "no place"], "--prompt must contain {question} exactly once"),
        (["gsm8k", "--from", "STORIES", "--verifier", "nmeric"], "unknown verifier 'nmeric' (did you mean 'numeric'?)"),
        (["gsm8k", "--from", "STORIES", "--near", "2"], "must lie in (0, 1]"),
        (["gsm8k", "--from", "STORIES", "--keep", "0.1:0.9"], "needs --pass-rates"),
        (["gsm8k", "--from", "STORIES", "--plugins", "no_such_module"], "'no_such_module' can't be imported"),
        (["gsm8k", "--from", "STORIES", "--against", "STORIES", "nowhere.jsonl"], "no file 'nowhere.jsonl'"),
        (["mbpp", "--from", "STORIES"], "mbpp, row 0: a row has none of the fields task_id"),
        (["codecontests", "--from", "STORIES"], "row 0: of another shape than expected, KeyError: 'public_tests'"),
        (["gsm8k", "--from", "STORIES", "--limit", "-1"], "--limit -1 must be at least 0"),
        (["gsm8k", "--from", "STORIES", "--out", "/dev/null/o"], "/dev/null"),
        (["prepared"], "prepared is on no hub"),
        (["reasoning_gym", "--from", "STORIES"], "is generated: it takes --tasks, --size and --seed"),
        (["reasoning_gym", "--tasks", "composite"], "can't be used"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, stories, arguments, message):
    arguments = [stories if argument == "STORIES" else argument for argument in arguments]
    with pytest.raises(SystemExit, match=re.escape(message)) as error:
        main(["--out", str(tmp_path / "o"), *arguments])
    assert "\n" not in str(error.value) and not (tmp_path / "o").exists()


def test_nothing_but_a_prepared_set_is_replaced_and_nothing_empty_written(tmp_path, stories):
    (tmp_path / "o").mkdir()
    with pytest.raises(SystemExit, match="exists and is not a prepared data set"):
        main(["gsm8k", "--from", stories, "--out", str(tmp_path / "o")])
    empty = gsm8k(tmp_path / "empty.jsonl", [("No gold?", "")])
    with pytest.raises(SystemExit, match=r"no row is left of 1 \({'no_gold': 1}\)"):
        main(["gsm8k", "--from", empty, "--out", str(tmp_path / "p")])


def test_without_the_hubs_library_files_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"error: 'openai/gsm8k' is on the hub, which needs the datasets library"):
        main(["gsm8k", "--out", str(tmp_path / "o")])
