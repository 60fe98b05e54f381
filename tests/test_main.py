"""The command line: mistakes are one line and exit status 2 with nothing written; a dry run loads nothing."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from brorl_jax.commandline import guarded, load, piped, print_dry_run
from brorl_jax.config import default, derived, source
from brorl_jax.errors import UserError

REPO = pathlib.Path(__file__).resolve().parents[1]
QUICKSTART = f"--config={REPO}/configs/quickstart.py"


def command(*arguments: str, cwd: pathlib.Path, program: tuple[str, ...] = ("-m", "brorl_jax.main")):
    """Runs main in ``cwd`` and returns (exit status, stdout, lines of stderr)."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "--config is missing"),
        (["--config=configs/nowhere.py"], "there is no file configs/nowhere.py"),
        ([QUICKSTART], "--workdir is missing"),
        ([QUICKSTART, "--workdir=run", "--config.rollot.n=3"], "did you mean 'config.rollout.n'?"),
        ([QUICKSTART, "--workdir=run", "--config.rollout.n=many"], "--config.rollout.n=many"),
        ([QUICKSTART, "--workdir=run", "--config.rollout.n=1"], "config.rollout.n = 1: "),
        ([QUICKSTART, "--workdir=run", "--config.algo.updates_per_step", "5"], "config.algo.updates_per_step = 5: "),
        ([QUICKSTART, "--wokdir=run"], "Did you mean: workdir"),
        ([QUICKSTART, "--workdir=run", "--profile=5:3"], "--profile=5:3: "),
        ([QUICKSTART, "--workdir=run", "stray"], "'stray' is not a flag"),
        ([QUICKSTART, "--workdir=/dev/null/run"], "--workdir=/dev/null/run: Not a directory; name a folder"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, fragment, tmp_path):
    status, out, errors = command(*arguments, cwd=tmp_path)
    assert (status, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith("error: ")
    assert fragment in errors[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["main", "plan"])
def test_help_names_the_flags_that_the_commands_share(module, tmp_path):
    _, out, _ = command("--help", cwd=tmp_path, program=("-m", f"brorl_jax.{module}"))
    assert "  --config: " in out and "dry_run: " in out


def test_a_dry_run_prints_the_resolved_config_and_writes_nothing(tmp_path):
    overrides = ["--config.rollout.n=64", "--config.data.train.sums.size", "77", "--noconfig.log.rollouts"]
    status, out, errors = command(QUICKSTART, "--workdir=run", "--dry_run", *overrides, cwd=tmp_path)
    assert (status, errors, list(tmp_path.iterdir())) == (0, [], [])
    printed = json.loads(out)
    assert printed["config"]["rollout"]["n"] == 64
    assert printed["config"]["data"]["train"]["sums"]["size"] == 77
    assert printed["config"]["log"]["rollouts"] is False
    assert printed["derived"]["samples_per_step"] == printed["config"]["rollout"]["prompts_per_step"] * 64


@pytest.mark.parametrize(
    ("name", "samples", "rate"), [("brorl_n512", 65_536, 2.8284271e-6), ("prorl_n16", 8_192, 1e-6)]
)
def test_a_dry_run_of_a_paper_arm_needs_neither_model_nor_jax(name, samples, rate, tmp_path):
    """Imports of jax and of everything that brings it are made to fail."""
    blocked = "import sys, runpy; sys.modules.update(dict.fromkeys(['jax', 'jaxtyping', 'flax', 'transformers']))"
    program = ("-c", f"{blocked}; runpy.run_module('brorl_jax.main', run_name='__main__', alter_sys=True)")
    config = f"--config={REPO}/configs/{name}.py"
    status, out, errors = command(config, "--dry_run", cwd=tmp_path, program=program)
    assert (status, errors) == (0, [])
    derived = json.loads(out)["derived"]
    assert next(iter(json.loads(out))) == "derived" and len(out.splitlines()) < 200  # over 98 held-out sources
    assert (derived["samples_per_step"], derived["updates_per_step"]) == (samples, 4)
    assert derived["learning_rate"] == pytest.approx(rate, rel=1e-6)


def test_a_dry_run_shows_every_value_whatever_it_holds(capsys):
    config = default()
    config.name = 'a, {"b": 1},\n'
    config.data.train.odd = source("jsonl", path='x"}, ', params={"deep": {"er": [1, {"and": None}]}, "none": {}})
    print_dry_run(config)
    assert json.loads(capsys.readouterr().out) == {
        "derived": derived(config),
        "config": json.loads(json.dumps(config.to_dict())),  # tuples are lists
    }


@pytest.mark.parametrize(
    "program",
    [
        ("-m", "brorl_jax.main", f"--config={REPO}/configs/brorl_n512.py", "--dry_run"),
        ("-m", "brorl_jax.main", "--help"),
        ("-m", "experiments.sweep", f"--config={REPO}/configs/sweeps/n_paper.py", "--out=runs", "--print"),
        ("-m", "experiments.tables"),
    ],
)
def test_output_that_nobody_reads_any_more_is_no_traceback(program):
    """As with ``| head``, which closes its end once it has its lines."""
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    with os.fdopen(write) as out:
        done = subprocess.run(
            [sys.executable, *program], cwd=REPO, env=environment, stdout=out, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_another_broken_pipe_is_not_taken_for_the_readers(capfd):
    @piped
    def main():
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        main()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("def get_config():\n    config = {}\n    return config.rollout\n", "broken.py:3: get_config() failed: Attr"),
        ("def get_config(:\n", "get_config() failed: SyntaxError"),
        ("import nothing_of_the_kind\n", "broken.py:1: get_config() failed: ModuleNotFoundError"),
        ("x = 1\n", "KeyError"),
        ("def get_config():\n    return 3\n", "get_config() returned int"),
    ],
)
def test_a_broken_config_file_is_named_with_its_line(text, fragment, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load(str(file))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_may_take_an_argument_and_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("from ml_collections import ConfigDict\n")
    file = tmp_path / "with_argument.py"
    file.write_text("import neighbour\n\ndef get_config(n):\n    return neighbour.ConfigDict({'n': int(n)})\n")
    before = list(sys.path)
    assert load(f"{file}:7").n == 7
    assert sys.path == before


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda _: pathlib.Path("/dev/null/run").mkdir(), "error: /dev/null/run: Not a directory\n"),
        (lambda _: pathlib.Path("/dev/full").write_text("x"), "error: No space left on device\n"),
    ],
)
def test_a_path_that_can_not_be_used_is_one_line(capsys, work, message):
    with pytest.raises(SystemExit) as ended:
        guarded(work)([])
    assert (ended.value.code, capsys.readouterr().err) == (2, message)


def test_an_error_that_is_no_file_s_keeps_its_traceback():
    def lost(_: list[str]) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        guarded(lost)([])
