"""The miniature: its comparisons by hand, its runs as data, and all of it at a size of minutes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

from brorl_jax.errors import UserError
from experiments import files, miniature
from experiments.miniature import Curve

REPO = pathlib.Path(__file__).resolve().parents[2]


def curve(arm, seed, samples, score):
    x = np.array(samples, np.float64)
    return Curve(arm, seed, x / 50, x, 2 * x, np.array(score), np.zeros(len(x)))


CURVES = [
    curve("n16", 0, [0, 100, 200], [0.5, 0.5, 0.6]),
    curve("n512", 0, [0, 150], [0.5, 0.8]),
    curve("n16", 1, [0, 100], [0.4, 0.5]),
    curve("n512", 1, [0, 200], [0.4, 0.8]),
]


def test_arms_are_compared_when_both_have_spent_the_same():
    c = miniature.compare(CURVES, "samples")
    assert c.budget == [150, 100]
    np.testing.assert_allclose(c.gains["n16"], [5, 10])  # halfway from 0.5 to 0.6
    np.testing.assert_allclose(c.gains["n512"], [30, 20])
    # d = 25 and 10: mean 17.5, standard error 7.5; t(0.975, 1 degree of freedom) = 12.7062
    np.testing.assert_allclose([c.difference, c.low, c.high], [17.5, 17.5 - 95.2965, 17.5 + 95.2965], rtol=1e-5)
    alone = miniature.compare(CURVES[:2], "seconds")
    assert alone.budget == [300] and alone.difference == pytest.approx(25) and np.isnan(alone.low)


def test_the_slope_before_the_fork():
    trend, error = miniature.slope(curve("prorl", 0, [0, 100, 200, 300], [0.9, 0.1, 0.2, 0.3]), 3)
    assert trend == pytest.approx(5_000) and error == pytest.approx(0, abs=1e-6)  # 10 points in 2 steps
    assert np.isnan(miniature.slope(CURVES[1], 3)[0])


def curves(file):
    """Of a ``curves.csv``, read by pandas."""
    runs = pd.read_csv(file).groupby(["arm", "seed"], sort=False)
    return [Curve(arm, seed, *run.drop(columns=["arm", "seed"]).to_numpy().T) for (arm, seed), run in runs]


def test_curves_survive_their_file(tmp_path):
    files.write_csv(tmp_path / "curves.csv", miniature.table_rows(CURVES), digits=8)
    for a, b in zip(CURVES, curves(tmp_path / "curves.csv"), strict=True):
        assert (a.arm, a.seed) == (b.arm, b.seed)
        for field in ("step", "samples", "seconds", "score", "stderr"):
            np.testing.assert_allclose(getattr(a, field), getattr(b, field), atol=1e-6)


def row(step, **figures):
    return {"step": step, **{key.replace("__", "/"): value for key, value in figures.items()}}


def test_a_curve_leaves_evaluations_out_of_the_time(tmp_path):
    folder = tmp_path / "seed_3" / "n16"
    folder.mkdir(parents=True)
    score = {"eval__pass@1": 0.25, "eval__sums__stderr": 0.01}
    rows = [
        row(0, **score),
        row(1, samples__generated=64, time__step_s=2.0),
        row(2, samples__generated=96, time__step_s=5.0, time__eval_s=3.0, **score | {"eval__pass@1": 0.5}),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    c = miniature.read_curve(folder, "n16")
    assert c.seed == 3 and c.step.tolist() == [0, 2]
    assert c.samples.tolist() == [0, 160] and c.seconds.tolist() == [0, 4] and c.score.tolist() == [0.25, 0.5]
    (folder / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="1 evaluations; a curve needs at least two"):
        miniature.read_curve(folder, "n16")


def test_arms_share_everything_but_what_the_paper_changes(monkeypatch):
    monkeypatch.chdir(REPO)
    out = pathlib.Path("runs/x")
    made = {a.workdir.name: a.command for a in miniature.arms(out, 1, miniature.FULL)}
    flags = {
        name: dict(f.split("=", 1) for f in command[4:] if f.startswith("--config.")) for name, command in made.items()
    }
    assert {f["--config.model.path"] for f in flags.values()} == {"runs/x/seed_1/prorl/model"}
    lengths = {"--config.train.steps", "--config.eval.every", "--config.checkpoint.every", "--config.name"}
    n16, n512 = ({k: v for k, v in flags[name].items() if k not in lengths} for name in ("n16", "n512"))
    changed = {"rollout.n": "512", "rollout.prompts_per_step": "8", "optim.lr_rule": "sqrt"}
    assert {k: v for k, v in n512.items() if k not in n16} == {f"--config.{k}": v for k, v in changed.items()}
    assert all(n512[k] == v for k, v in n16.items())
    steps = {name: int(f["--config.train.steps"]) for name, f in flags.items()}
    assert steps["n16"] * 32 * 16 == steps["n512"] * 8 * 512 == miniature.FULL.samples


def test_nothing_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="run `make miniature` first"):
        miniature.runs(tmp_path)


@pytest.mark.slow
def test_the_fast_form_and_its_notebooks(tmp_path, monkeypatch):
    """From nothing to figure, tables and both notebooks; called again it has nothing to do and changes nothing."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "experiments.miniature", "--fast", "--seeds", "0", f"--out={tmp_path}"]
    for _ in range(2):
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count(": finished") == 3
    results = tmp_path / "results"
    assert sorted(f.name for f in results.iterdir()) == ["curves.csv", "figure1.png", "summary.md", "tables.md"]
    found = {(c.arm, c.seed): c for c in curves(results / "curves.csv")}
    assert {key: c.samples[-1] for key, c in found.items()} == {("prorl", 0): 1024, ("n16", 0): 4096, ("n512", 0): 4096}
    assert "n512, step 2 | measured | 512 |" in (results / "tables.md").read_text()
    monkeypatch.setenv("RUNS", str(tmp_path))
    for path in (REPO / "experiments" / "notebooks").glob("0[45]_*.ipynb"):
        book = nbformat.read(path, as_version=4)
        NotebookClient(book, resources={"metadata": {"path": str(path.parent)}}).execute()
