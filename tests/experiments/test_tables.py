"""The tables: published figures as printed, ours from run directories, checked cell by cell; nothing is invented."""

from __future__ import annotations

import csv
import io
import json
import shutil

import numpy as np
import pytest

from experiments import tables


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An N = 16 arm with two seeds, and an N = 512 arm with separate evaluations at steps 1 and 2."""
    root = tmp_path_factory.mktemp("runs")

    def run(name, n, prompts, rows):
        folder = root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"rollout": {"n": n, "prompts_per_step": prompts}}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    def step(i, groups, kept, n, rollout_s, step_s, **more):
        generated = {"samples/generated": groups * n, "groups/generated": groups, "groups/kept": kept}
        return {"step": i, **generated, "time/rollout_s": rollout_s, "time/step_s": step_s, **more}

    for seed, score in ((0, 0.5), (1, 0.6)):
        scores = {"eval/pass@1": score, "eval/length": 100.0}
        run(
            f"n16_{seed}",
            16,
            4,
            [{"step": 0, "eval/pass@1": 0.1}, step(1, 10, 4, 16, 2.0, 6.0), step(2, 6, 4, 16, 2.0, 3.0, **scores)],
        )
    big = run("n512", 512, 1, [step(1, 2, 1, 512, 4.0, 1800.0), step(2, 1, 1, 512, 6.0, 1800.0)])
    for i, (math, algebra, logic) in ((1, (0.40, 0.1, 0.3)), (2, (0.45, 0.2, 0.5))):
        folder = big / "eval" / f"at_{i:06d}"
        folder.mkdir(parents=True)
        scores = {"eval/aime24/pass@1": math - 0.1, "eval/amc23/pass@1": math + 0.1, "eval/average/math/pass@1": math}
        scores |= {"eval/average/math/length": 2000.0 + i, "eval/pass@1": 0.3}
        scores |= {
            "eval/average/reasoning_gym/algebra/pass@1": algebra,
            "eval/average/reasoning_gym/logic/pass@1": logic,
        }
        scores |= {
            "eval/average/reasoning_gym/pass@1": 0.25,
            "eval/average/reasoning_gym/plain/pass@1": (algebra + logic) / 2,
        }
        (folder / "scores.json").write_text(json.dumps(scores))
    return root


@pytest.fixture(scope="module")
def measured(runs):
    return [
        m
        for name, folder in (("prorl", "n16_0"), ("prorl", "n16_1"), ("brorl", "n512"))
        for m in tables.read_run(name, runs / folder)
    ]


def ours(key, measured):
    """Measured rows of a table: who -> column -> mean."""
    rows = [row for row in tables.table(key, measured).rows if row[1] == "measured"]
    return {who: {c: cell.mean for c, cell in cells.items()} for who, _, cells in rows}


PRORL, FIRST, SECOND = "prorl, step 2, 2 seeds", "brorl, step 1", "brorl, step 2"


def test_scores_and_cost_cell_by_cell(measured):
    t1 = ours("T1", measured)
    assert set(t1) == {PRORL, FIRST, SECOND}
    cost = {"N": 16, "prompts/step": 4, "RL steps": 2, "samples (k)": 0.256, "hours": 9 / 3600}
    assert t1[PRORL] == pytest.approx(cost | {"held out": 55.0})
    scores = {"math": 45.0, "reasoning_gym": 25.0}
    cost = {"N": 512, "prompts/step": 1, "RL steps": 2, "samples (k)": 1.536, "hours": 1.0}
    assert t1[SECOND] == pytest.approx(cost | scores)
    assert t1[FIRST]["hours"] == pytest.approx(0.5) and t1[FIRST]["samples (k)"] == pytest.approx(1.024)
    assert ours("B2", measured)[SECOND] == pytest.approx({"N": 512, "RL steps": 2, "hours": 1.0} | scores)


def test_pass_rate_and_throughput_cell_by_cell(measured):
    for key in ("T2", "B3"):
        rows = ours(key, measured)
        expected = {"N": 16, "pass rate": 50.0, "generation samples/s": 64.0, "samples/s of the step": 256 / 9}
        assert rows[PRORL] == pytest.approx(expected)
        expected = {"N": 512, "pass rate": 200 / 3, "generation samples/s": 153.6, "samples/s of the step": 1536 / 3600}
        assert rows[SECOND] == pytest.approx(expected)


def test_benchmarks_cell_by_cell(measured):
    assert ours("T3", measured)[SECOND] == pytest.approx({"AIME24": 35.0, "AMC": 55.0, "Avg": 45.0})
    gym = {"algebra": 20.0, "logic": 50.0, "Avg": 25.0, "mean of categories": 35.0}
    assert ours("T5", measured)[SECOND] == pytest.approx(gym)
    assert ours("T4", measured)[SECOND] == {}  # no code was evaluated: empty, not zero


def test_tokens_cell_by_cell(measured):
    rows = ours("B4", measured)
    assert rows[PRORL] == pytest.approx({"N": 16, "held out": 55.0, "held out tokens": 100.0})
    assert rows[FIRST] == pytest.approx({"N": 512, "math": 40.0, "math tokens": 2001.0, "reasoning_gym": 25.0})


def test_seeds_are_a_mean_and_a_standard_deviation(measured):
    cells = {who: cells for who, _, cells in tables.table("T1", measured).rows}
    assert cells[PRORL]["held out"].deviation == pytest.approx(np.std([50, 60], ddof=1))
    assert "55.00 ± 7.07" in tables.as_text(tables.table("T1", measured))
    assert r"55.00 $\pm$ 7.07" in tables.as_latex(tables.table("T1", measured))


def test_published_averages_are_the_means_of_their_columns():
    """Those of math and code are; that of Reasoning Gym is not (it is weighted by tasks)."""
    for key, columns in (("T3", tables.MATH), ("T4", tables.CODE[:4])):
        for row in tables.PUBLISHED[key]["rows"]:
            assert np.mean([row[c] for c in columns]) == pytest.approx(row["Avg"], abs=0.02), (key, row["arm"])
    plain = [np.mean([row[c] for c in tables.GYM]) for row in tables.PUBLISHED["T5"]["rows"]]
    assert plain == pytest.approx([62.49, 62.98, 62.96, 63.32, 63.50, 63.81], abs=0.006)
    for key, family in (("T3", "math"), ("T4", "code"), ("T5", "reasoning_gym")):
        assert [r["Avg"] for r in tables.PUBLISHED[key]["rows"]] == [r[family] for r in tables.PUBLISHED["T1"]["rows"]]


def test_published_pass_rates_follow_from_samples_kept():
    """The shares .420 and .625 that Table 1's caption implies are Table 2's 41 % and 62 % to two points."""
    rates = [row["pass rate"] for row in tables.PUBLISHED["T2"]["rows"]]
    assert rates == pytest.approx([42.0, 62.5], abs=1.5)


@pytest.mark.parametrize("key", list(tables.TITLES))
def test_without_runs_every_format_shows_the_published_figures_alone(key):
    table = tables.table(key, [])
    assert all(origin == "published" for _, origin, _ in table.rows)
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(table))))
    for row, published in zip(rows, tables.PUBLISHED[key]["rows"], strict=True):
        for column, value in published.items():
            assert row[column] == value if column == "arm" else float(row[column]) == value
    lines = tables.as_markdown(table).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert tables.as_latex(table).count(r"\\") == 1 + len(table.rows)
    assert tables.as_text(table).startswith(table.title)


def test_csv_keeps_full_precision(measured):
    (row,) = [r for r in csv.DictReader(io.StringIO(tables.as_csv(tables.table("T2", measured)))) if r["arm"] == PRORL]
    assert float(row["samples/s of the step"]) == 256 / 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[1]"),
        ("config.json", "{}"),
        ("config.json", '{"rollout": 3}'),
        ("metrics.jsonl", '{"step": 1, "samples/generated": "many"}'),
        ("metrics.jsonl", '{"eval/pass@1": 0.5}'),
        ("metrics.jsonl", '{"step": "one"}'),
        ("eval/at_000002/scores.json", "[]"),
        ("eval/at_000002/scores.json", "{"),
        ("eval/at_000002/scores.json", '{"eval/pass@1": "high"}'),
        ("eval/at_last/scores.json", "{}"),
    ],
)
def test_a_run_with_foreign_contents_is_named(runs, tmp_path, capsys, name, text):
    run = tmp_path / "run"
    shutil.copytree(runs / "n16_0", run)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)
    assert tables.main(["--runs", f"x={run}"]) == 2
    assert f"error: {run} holds what no run writes" in capsys.readouterr().err


def test_a_mistake_is_one_line(runs, capsys):
    assert tables.main(["--runs", "n16"]) == 2
    assert "write NAME=DIR" in capsys.readouterr().err
    assert tables.main(["--runs", f"x={runs / 'nowhere'}"]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert tables.main(["--runs", f"prorl={runs / 'n16_0'}", "--tables", "T2", "--format", "markdown"]) == 0
    assert "| prorl, step 2 | measured | 16 | 50.00 | 64.00 | 28.44 |" in capsys.readouterr().out
