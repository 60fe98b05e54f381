"""The experiment's command on a small vocabulary: what it writes, and that its check can fail."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from brorl_jax.theory.simulator import AdamW, Record, Setup
from experiments import simulate

TINY = ["--vocab", "96", "--correct", "10", "--steps", "4", "--seeds", "2"]


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_figure_and_its_numbers(tmp_path, capsys):
    assert simulate.main([*TINY, "--n", "2", "8", "--out", str(tmp_path)]) == 0
    rows = table(tmp_path / "figure3.csv")
    assert len(rows) == 2 * 2 * 2  # N, seeds, steps 0 and 4
    assert {(r["n"], r["seed"], r["step"]) for r in rows} == {
        (n, s, t) for n in ("2", "8") for s in ("0", "1") for t in ("0", "4")
    }
    assert rows[0]["eps"] == "1e-08" and rows[0]["weight_decay"] == "0.01"
    assert (tmp_path / "figure3.png").read_bytes().startswith(b"\x89PNG")
    assert "no reference values" in capsys.readouterr().out


def test_fgrpo_keeps_mass_and_uses_its_rate(tmp_path):
    assert simulate.main([*TINY, "--fgrpo", "--n", "2", "4", "--out", str(tmp_path)]) == 0
    rows = table(tmp_path / "fgrpo.csv")
    assert {r["lr"] for r in rows} == {"0.01"}
    assert all(0 <= float(r["retained"]) <= 1 for r in rows)


def test_sweep_changes_one_thing_at_a_time():
    base = Setup(n=1)
    cases = simulate.sweep_cases(base)
    for panel, setup, adamw in cases:
        others = [name for name in ("lr", "eps", "weight_decay") if name != panel]
        assert all(getattr(adamw, name) == getattr(AdamW(), name) for name in others)
        assert (setup.reading == "distinct") == (panel == "reading")
        assert setup.seeded == (panel != "start")
    assert {c.setup.n for c in cases if c.panel == "n"} >= {64, 512, 8192, 51_200}


@pytest.mark.parametrize(
    ("n", "q_pos", "improved", "worst", "missed"),
    [
        (4, 0.6013, 0.115, -1e-6, False),
        (4, 0.6031, 0.112, -1e-6, True),
        (4, 0.601, 0.13, -1e-6, True),
        (4, 0.601, 0.112, 1e-7, True),
        (51_200, 0.647, 1.0, 1e-7, False),
        (51_200, 0.647, 1.0, -1e-7, True),
    ],
)
def test_check_fails_where_a_reference_is_missed(n, q_pos, improved, worst, missed):
    ones = np.ones((2, 1))
    record = Record(ones, q_pos * ones, improved * ones, worst * ones, ones, ones)
    (line,) = simulate.check([simulate.Case("figure", Setup(n=n))], [record])
    assert line.endswith("MISSED") == missed


def test_kept_results_are_those_of_the_figure_and_meet_the_reference_values():
    """``results/simulator/figure3.csv`` at its last step: every N, four seeds each, nothing missed."""
    last = [row for row in table(simulate.OUT / "figure3.csv") if row["step"] == "1000"]
    cases = simulate.figure_cases(simulate.PAPER_N, Setup(n=1))
    records = []
    for case in cases:
        rows = [row for row in last if row["n"] == str(case.setup.n)]
        assert [row["seed"] for row in rows] == ["0", "1", "2", "3"]
        assert {(r["reading"], r["lr"], r["eps"], r["weight_decay"]) for r in rows} == {
            ("multiplicity", "0.001", "1e-08", "0.01")
        }
        records.append(Record(*([[float(row[name])] for row in rows] for name in Record._fields)))
    records = [Record(*map(np.array, record)) for record in records]
    lines = simulate.check(cases, records)
    assert all("reference" in line for line in lines) and not any(line.endswith("MISSED") for line in lines)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--n", "4", "0"], "--n 0: must be at least 1"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--steps", "-1"], "--steps -1: must be at least 1"),
        (["--threads", "0"], "--threads 0: must be at least 1"),
        (["--vocab", "5"], "got 10000 of 5 tokens"),
        (["--sweep", "--n", "4"], "--sweep has its own N; leave out --n"),
        (["--out", __file__], "File exists; name a folder that can be written"),
    ],
)
def test_options_that_mean_nothing_end_in_one_line(options, complaint, capsys):
    assert simulate.main(options) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.endswith(f"{complaint}\n")
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.slow
def test_reference_values_at_full_size():
    """The three cheapest N of the figure, one seed; the command checks all five over four seeds."""
    cases = simulate.figure_cases((4, 16, 512), Setup(n=1, log_every=100))
    lines = simulate.check(cases, simulate.run(cases, seeds=(0,)))
    assert len(lines) == 3 and not any(line.endswith("MISSED") for line in lines)
