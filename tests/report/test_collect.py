import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brorl_jax.report import collect, summary, write_report
from brorl_jax.report.collect import BUDGET, HEAD, TAIL, add_axes, choose_rollouts, collect_run, columns, cut_text
from brorl_jax.report.render import embed, render

_spec = importlib.util.spec_from_file_location("synthetic_runs", Path(__file__).with_name("synthetic_runs.py"))
synthetic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic)


def block(page):
    """The data block of a page, as a browser would cut it out."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


@pytest.mark.parametrize("text", [synthetic.HOSTILE, "<!--<script>", "]]>", "{{script}} \\1 \\g<0>", "\u2028\ud800"])
def test_embedded_data_round_trips_and_cannot_leave_its_block(text):
    inside = embed({"a": text, text: 1})
    assert json.loads(inside) == {"a": text, text: 1}
    assert inside.isascii() and not set("<>&\n\r") & set(inside)


def test_page_with_hostile_text_holds_it_unchanged(tmp_path):
    run = synthetic.write_run(tmp_path / "a<b>&\"'", n=4, done=10, hostile=True)
    page = write_report([run]).read_text(encoding="utf-8")
    data = block(page)
    texts = {r["response"] for p in data["runs"][0]["prompts"] for r in p["rollouts"]}
    assert synthetic.HOSTILE in texts
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<title>a&lt;b&gt;&amp;&quot;&#x27; – " in page
    assert not re.search(r"\b(?:src|href)=(?!\"data:|\"#)", page.split('id="data"')[0])


def test_numbers_that_javascript_can_not_read_become_null():
    data = {"nan": float("nan"), "deep": [{"huge": float("inf"), "low": -float("inf"), "one": 1.5}]}
    assert json.loads(embed(data)) == {"nan": None, "deep": [{"huge": None, "low": None, "one": 1.5}]}


def test_axes_are_cumulative_and_skip_the_pause_before_a_resume():
    rows = [
        {"step": 1, "time": 100.0, "samples/generated": 8, "length/mean": 10.0},
        {"step": 2, "time": 107.0, "samples/generated": 8, "length/mean": 20.0, "tokens/generated": 150},
        {
            "step": 3,
            "time": 9107.0,
            "samples/generated": 4,
            "length/mean": None,
            "time/step_s": 5.0,
            "time/eval_s": 2.0,
        },
        {"step": 4, "time": 9110.0, "time/rollout_s": 1.0, "time/update_s": 2.0},
    ]
    add_axes(rows)
    assert [r["x/samples"] for r in rows] == [8, 16, 20, 20]
    assert [r["x/tokens"] for r in rows] == [80, 230, 230, 230]
    assert [r["x/wall"] for r in rows] == [0, 7, 12, 15]


def test_columns_align_gaps_and_thin_long_runs():
    notes = []
    table = columns([{"step": 1, "a": 0.123456789, "s": "x"}, {"step": 2, "b": 5}, {"step": 3, "a": None}], notes)
    assert table == {"step": [1, 2, 3], "a": [0.123457, None, None], "b": [None, 5, None]} and notes == []
    rows = [{"step": s, "x": s} | ({"eval/pass@1": 0.5} if s == 17 else {}) for s in range(1, 7002)]
    steps = columns(rows, notes)["step"]
    assert steps[0] == 1 and steps[-1] == 7001 and 17 in steps and len(steps) <= 3002
    assert notes == ["curves show every 3th step of a long run"]


def test_facts_and_summary_of_a_finished_run(tmp_path):
    rows = [{"step": 0, "eval/pass@1": 0.25}]
    rows += [
        {"step": s, "reward/mean": s / 10, "time/step_s": 30.0, "samples/generated": 64, "length/mean": 10.0}
        for s in range(1, 9)
    ]
    rows[4]["eval/pass@1"], rows[8]["eval/pass@1"] = 0.875, 0.75
    rows[2]["groups/starved"] = rows[3]["groups/starved"] = 1
    (tmp_path / "config.json").write_text('{"name": "q", "train": {"steps": 8}}')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = summary(tmp_path, tmp_path / "report.html").splitlines()
    assert text[1:-1] == [
        f"run              {tmp_path.name}: finished",
        "held-out pass@1  25.0% -> 75.0%   (+50.0 points, best 87.5%)",
        "reward           0.150 -> 0.750",
        "steps            8 of 8",
        "samples          512 (5,120 response tokens)",
        "wall time        4:00",
        "note             starved: trained on fewer groups than asked for (at 2 steps)",
        f"report           {tmp_path / 'report.html'}",
    ]


def test_partial_and_damaged_runs_are_shown_with_a_note(tmp_path):
    run = synthetic.write_run(tmp_path / "r", n=4, done=20)
    (run / "config.json").write_text('{"name": ')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')
    whole = (run / "rollouts/step_000010.jsonl.gz").read_bytes()
    (run / "rollouts/step_000010.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (run / "rollouts/step_000020.jsonl.gz").write_bytes(b"not gzip")
    (run / "rollouts/step_000001.jsonl.tmp").write_bytes(b"half")
    data = collect_run(run, BUDGET)
    assert data["metrics"]["step"][-1] == 20 and not data["facts"]["finished"]
    assert {p["step"] for p in data["prompts"]} >= {1}
    notes = " | ".join(data["notes"])
    for part in ("metrics.jsonl: 1 unreadable", "config.json cannot be read", "step_000010", "step_000020"):
        assert part in notes
    write_report([run])


@pytest.mark.parametrize("files", [{"config.json": "{}"}, {"metrics.jsonl": ""}, {"metrics.jsonl": '{"step'}])
def test_a_run_without_a_step_has_a_report(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    data = block(write_report([tmp_path], tmp_path / "deep" / "out.html").read_text())
    assert data["runs"][0]["facts"]["state"] == "no step finished yet"


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"not a run directory.*found: notes\.txt.*--workdir"):
        write_report([tmp_path])
    with pytest.raises(ValueError, match="is not a directory"):
        write_report([tmp_path / "missing"])
    with pytest.raises(ValueError, match="at least one"):
        write_report([])
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "config.json").write_text("{}")
    runs = collect([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [r["name"] for r in runs] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]
    assert "NaN" not in render(runs)


def rollout(step, prompt, sample, reward, response):
    return {
        "step": step,
        "prompt_id": prompt,
        "sample": sample,
        "reward": reward,
        "response": response,
        "prompt": prompt,
    }


def write_step(directory, step, rows):
    directory.mkdir(exist_ok=True)
    with gzip.open(directory / f"step_{step:06d}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_equal_rollouts_are_merged_and_both_ends_of_the_rewards_kept(tmp_path):
    rows = [rollout(1, "p", i, 0.0, "same") for i in range(10)]
    rows += [rollout(1, "p", 10 + i, i / 100, f"r{i}") for i in range(1, 101)] + [rollout(1, "p", 111, None, "lost")]
    write_step(tmp_path / "rollouts", 1, rows)
    (group,), shown = choose_rollouts(tmp_path / "rollouts", BUDGET, [])
    rewards = [r["reward"] for r in group["rollouts"]]
    assert rewards == [*(i / 100 for i in range(100, 88, -1)), *(i / 100 for i in range(10, 0, -1)), 0.0, None]
    assert group["rollouts"][-2]["samples"] == list(range(10))
    assert (group["n"], group["distinct"], group["solved"]) == (111, 102, 1)
    assert group["levels"] == {"high": 1, "mid": 99, "low": 10, "none": 1}
    assert (shown["steps"], shown["of_steps"], shown["cut"]) == (1, 1, 0)


def test_choice_stays_in_its_budget_and_spans_the_run(tmp_path):
    for step in range(1, 31):
        rows = [rollout(step, f"p{p}", i, float(i < p), f"{i} " + "x" * 3000) for p in range(12) for i in range(12)]
        write_step(tmp_path / "rollouts", step, rows)
    chosen, shown = choose_rollouts(tmp_path / "rollouts", 400_000, [])
    assert len(json.dumps(chosen)) < 410_000 and shown["bytes"] <= 400_000 and shown["cut"] > 0
    assert sorted({g["step"] for g in chosen}) == [1, 8, 15, 23, 30] and shown["of_steps"] == 30
    everything, shown = choose_rollouts(tmp_path / "rollouts", 10**9, [])
    assert shown["cut"] == 0
    first = [g["mean_reward"] for g in everything if g["step"] == 1]
    assert len(first) == 8 and first == sorted(first) and (first[0], first[-1]) == (0.0, 11 / 12)


def test_long_texts_lose_their_middle_and_say_so():
    text = "a" * HEAD + "b" * 1234 + "c" * TAIL
    assert cut_text(text) == "a" * HEAD + "\n[… 1,234 characters left out …]\n" + "c" * TAIL
    assert cut_text(text[: HEAD + TAIL]) == text[: HEAD + TAIL]


def test_command_line(tmp_path):
    run = synthetic.write_run(tmp_path / "r", n=4, done=10)

    def report(*args):
        command = [sys.executable, "-m", "brorl_jax.report", *map(str, args)]
        root = Path(__file__).parents[2]
        return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)

    good = report(run)
    assert good.returncode == 0 and good.stdout.endswith(f"report: {run / 'report.html'}\n"), good.stderr
    bad = report(tmp_path)
    assert bad.returncode == 2 and bad.stderr.startswith(f"error: {tmp_path} is not a run directory") and not bad.stdout
