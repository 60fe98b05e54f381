"""Sweeps: arms are data, validated before the first starts; a cut-off sweep goes on."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from brorl_jax.commandline import load
from brorl_jax.config import derived
from brorl_jax.errors import UserError
from experiments import sweep

REPO = pathlib.Path(__file__).resolve().parents[2]
SWEEPS = sorted((REPO / "configs" / "sweeps").glob("*.py"))


def commands(capsys, *arguments):
    assert sweep.main([*arguments, "--print"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("file", SWEEPS, ids=lambda p: p.stem)
@pytest.mark.parametrize("base", [None, "configs/quickstart.py"])
def test_every_shipped_sweep_has_sound_arms(file, base, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    more = ["--base", base] if base else []
    printed = commands(capsys, "--config", str(file), "--out", "runs/x", "--seeds", "0", "1", *more)
    assert len(printed) >= 4 and len(printed) % 2 == 0
    assert len({tuple(c) for c in printed}) == len(printed)
    folders = [c[4].removeprefix("--workdir=") for c in printed]
    assert len(set(folders)) == len(folders)
    assert all(f.endswith("/seed_0") for f in folders[: len(folders) // 2])  # whole comparisons first


def figures(file, **fields):
    """Derived figures of every arm of a shipped sweep, by name."""
    names = __import__("runpy").run_path(str(REPO / "configs" / "sweeps" / file))
    found = {}
    for name, overrides in names["get_arms"](load(str(REPO / names["BASE"]))).items():
        config = load(str(REPO / names["BASE"]))
        config.update_from_flattened_dict(overrides)
        found[name] = (config.rollout.n, config.rollout.prompts_per_step, derived(config))
    return found


def test_a_seed_named_twice_is_one_run(capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    sweep_file = ("--config", "configs/sweeps/lr_rule.py", "--out", "runs/x", "--seeds")
    assert commands(capsys, *sweep_file, "1", "0", "1") == commands(capsys, *sweep_file, "1", "0")


def test_fixed_samples_are_fixed():
    found = figures("n_fixed_samples.py")
    assert [n for n, _, _ in found.values()] == [16, 64, 128, 256, 512, 1024]
    assert {n * prompts for n, prompts, _ in found.values()} == {65_536}
    assert len({d["learning_rate"] for _, _, d in found.values()}) == 1


def test_fixed_prompts_are_fixed_and_the_rate_follows_the_samples():
    found = figures("n_fixed_prompts.py")
    assert {prompts for _, prompts, _ in found.values()} == {128}
    rates = {n: d["learning_rate"] for n, _, d in found.values()}
    assert rates[512] / rates[128] == pytest.approx(2.0)


def test_the_papers_comparison_is_the_papers():
    found = figures("n_paper.py")
    assert [(n, prompts) for n, prompts, _ in found.values()] == [(16, 512), (512, 128)]
    assert found["n512"][2]["learning_rate"] / found["n16"][2]["learning_rate"] == pytest.approx(8**0.5)
    assert found["n512"][2]["updates_per_step"] == found["n16"][2]["updates_per_step"]


SWEEP = """
BASE = {base!r}
def get_arms(base):
    return {{"a": {{"rollout.n": 4}}, "b": {{"rollout.n": 8, "optim.lr": 1}}}}
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A sweep of two arms; runs are recorded instead of made, and arm b fails until it is mended."""
    file = tmp_path / "sweep.py"
    file.write_text(SWEEP.format(base=str(REPO / "configs" / "quickstart.py")))
    state = {"ran": [], "broken": {"b"}}

    def call(name, command):
        workdir = pathlib.Path(next(a for a in command if a.startswith("--workdir=")).removeprefix("--workdir="))
        state["ran"].append(f"{workdir.parent.name}/{workdir.name}")
        if workdir.parent.name in state["broken"]:
            raise UserError(f"{name} ended with status 2; the same command goes on from here")
        workdir.mkdir(parents=True)
        steps = load(str(REPO / "configs" / "quickstart.py")).train.steps
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": steps}) + "\n")
        (workdir / "model").mkdir()
        (workdir / "model" / "config.json").write_text("")
        (workdir / "report.html").write_text("")

    monkeypatch.setattr(sweep, "call", call)
    return file, state


def test_a_cut_off_sweep_goes_on_with_what_is_not_finished(small, tmp_path, capsys):
    file, state = small
    arguments = ["--config", str(file), "--out", str(tmp_path / "out")]
    assert sweep.main(arguments) == 2
    assert "b/seed_0 ended with status 2; the same command goes on" in capsys.readouterr().err
    assert state["ran"] == ["a/seed_0", "b/seed_0"]
    state["broken"].clear()
    assert sweep.main(arguments) == 0
    assert state["ran"][2:] == ["b/seed_0"]
    assert sweep.main(arguments) == 0
    assert state["ran"][3:] == []


CALLER = """
import sys, time
from experiments import files, sweep

@files.guarded
def main(argv=None):
    sweep.call("arm", [sys.executable, "-c", sys.argv[1]])

sys.exit(main())
"""
ARM = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_arm_stops_at_a_safe_place_and_never_outlives_the_sweep(signum):
    command = [sys.executable, "-c", CALLER, ARM]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    caller = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert caller.stdout.readline() == "begun\n"
    caller.send_signal(signum)
    out, err = caller.communicate(timeout=20)  # until the arm has ended, too: it holds the same pipes
    assert out == "saved\n"
    if signum != signal.SIGKILL:
        assert caller.returncode == 128 + signum
        assert err.splitlines()[-1] == f"{signum.name}: stopped. The same command goes on from here."


def test_what_an_arm_ends_with_is_said():
    with pytest.raises(UserError, match="arm ended with status 3; the same command goes on"):
        sweep.call("arm", [sys.executable, "-c", "raise SystemExit(3)"])


def test_only_one_arm_of_a_job_array(small, tmp_path, capsys):
    file, state = small
    arguments = ["--config", str(file), "--out", str(tmp_path / "out"), "--seeds", "3", "5"]
    assert len(commands(capsys, *arguments)) == 4
    assert sweep.main([*arguments, "--only", "2"]) == 0
    assert state["ran"] == ["a/seed_5"]
    assert sweep.main([*arguments, "--only", "4"]) == 2
    assert "there are commands 0 to 3" in capsys.readouterr().err


def test_overrides_reach_every_arm_with_their_types(small, tmp_path, capsys):
    file, _ = small
    arguments = ["--config", str(file), "--out", str(tmp_path / "out")]
    first, second = commands(capsys, *arguments, "--config.log.rollouts=false", "--config.name=x")
    assert "--config.log.rollouts=false" in first and "--config.name=x" in second
    assert "--config.optim.lr=1" in second


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--config.rollot.n=3"], "did you mean 'config.rollout.n'?"),
        (["--config.filter.min_valid=3"], "arm a/seed_0: config.filter.min_valid = 3.0"),
        (["--n=3"], "--n=3: not an option"),
    ],
)
def test_a_bad_arm_stops_the_sweep_before_anything_runs(small, tmp_path, capsys, arguments, fragment):
    file, state = small
    assert sweep.main(["--config", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert fragment in capsys.readouterr().err
    assert state["ran"] == []


def test_a_file_that_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        sweep.arms(str(tmp_path / "none.py"), None, tmp_path, [0], {})
    with pytest.raises(UserError, match="a sweep needs BASE and get_arms"):
        sweep.arms(str(REPO / "configs" / "quickstart.py"), None, tmp_path, [0], {})
