"""A run that stands still ends, and says where it stood; one that moves does not."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny_runs

from brorl_jax import metrics, processes, train, watchdog

REPO = Path(__file__).resolve().parents[1]

STUCK_ENGINE = """
import sys, threading
from pathlib import Path
import tiny_runs
from brorl_jax import train, watchdog
from brorl_jax.rollout.local import LocalEngine

watchdog.MOST_S = 0.05

def stuck_in_the_machine_room():
    watchdog._watch.timeout_s = 0.2  # not before: the run has programs to compile
    threading.Event().wait()

def generate(self, requests, sampling):
    stuck_in_the_machine_room()
    yield

LocalEngine.generate = generate
folder = Path(sys.argv[1])
train.run(tiny_runs.config(folder, **{"train.stall_timeout_s": 600.0}), folder / "run")
"""

STUCK_WITH_THE_LOCK = """
import ctypes, faulthandler, sys, threading
from pathlib import Path
from brorl_jax import watchdog

armed = threading.Event()

def later(*args, original=faulthandler.dump_traceback_later, **how):
    original(*args, **how)
    armed.set()

def stuck_in_the_machine_room():
    armed.wait()
    ctypes.PyDLL(None).pause()  # keeps the interpreter's lock, as a regular expression does

faulthandler.dump_traceback_later = later
with watchdog.watching(3.0, Path(sys.argv[1]) / "stacks.txt"):
    watchdog.alive("matching")
    stuck_in_the_machine_room()
"""


def stuck(script, folder):
    path = os.pathsep.join([str(REPO), str(REPO / "tests" / "helpers")])
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "in stuck_in_the_machine_room" in done.stderr
    return done.stderr


def test_a_stuck_engine_ends_the_run_and_is_named(tmp_path):
    told, file = stuck(STUCK_ENGINE, tmp_path), tmp_path / "run" / "stacks.txt"
    assert f"the last sign was 'rollout'. What every thread is doing, also in {file}" in told
    assert "in stuck_in_the_machine_room" in file.read_text() and "in graded" in file.read_text()


def test_what_keeps_the_interpreter_s_lock_is_named_too(tmp_path):
    assert "Timeout (0:00:03)!" in stuck(STUCK_WITH_THE_LOCK, tmp_path)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watch with a timeout of 10 s, its clock, and the exit statuses that it asked for."""
    clock, ended = Clock(), []
    watch = watchdog.Watch(10.0, tmp_path / "stacks.txt", clock=clock, end=ended.append)
    monkeypatch.setattr(watchdog, "_watch", watch)
    return watch, clock, ended


def test_many_short_phases_are_progress_and_one_long_one_is_none(watched, capfd):
    watch, clock, ended = watched
    timer = metrics.PhaseTimer()
    clock.now += 1000  # before the first sign: a download, say
    watch.look()
    for _ in range(100):
        with timer("rollout"):
            clock.now += 9
            watch.look()
        clock.now += 9
        watch.look()
    assert not ended and not watch.file.exists()
    clock.now += 1
    watch.look()
    told = capfd.readouterr().err
    assert ended == [1]
    for text in (told, watch.file.read_text()):
        assert text.startswith("error: no progress for 10 s (config.train.stall_timeout_s = 10), the last sign was ")
        assert "'the end of rollout'" in text and "in test_many_short_phases" in text


def test_a_wait_with_a_deadline_of_its_own_is_excused(watched, monkeypatch):
    watch, clock, ended = watched

    class Link:
        index = 0

        def gather(self, payload, what):
            clock.now += 1000
            watch.look()
            return [payload, payload]

    monkeypatch.setattr(processes, "_link", Link())
    assert processes.gather_json(3, "rollouts") == [3, 3]
    clock.now += 9
    watch.look()
    assert not ended
    clock.now += 1
    watch.look()
    assert ended == [1]


def test_the_whole_run_gives_signs(tmp_path, monkeypatch):
    tiny_runs.keep_programs(monkeypatch)
    signs = []
    monkeypatch.setattr(watchdog, "alive", signs.append)
    c = tiny_runs.config(tmp_path, **{"train.steps": 1, "train.rehearse": True, "eval.every": 1, "warmup.steps": 2})
    c.algo.updates_per_step = 4
    train.run(c, tmp_path / "run")
    phases = ("data", "rollout", "reward", "pack", "score", "update", "publish", "eval", "checkpoint")
    wanted = {*phases, "the rehearsal", "a chunk of the embedded engine", "the end of the run"}
    assert wanted <= set(signs)
    assert signs.count("an update") == 4
    assert signs.count("rollout") > 2 * 3 + 4  # each group of a step and each prompt of both evaluations


@pytest.mark.parametrize("error", [None, ValueError, SystemExit, KeyboardInterrupt])
def test_nobody_watches_after_the_end(tmp_path, monkeypatch, error):
    cancelled = []
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: cancelled.append(1))

    def body():
        with watchdog.watching(1000.0, tmp_path / "stacks.txt"):
            watchdog.alive("begun")
            assert any(t.name == "watchdog" for t in threading.enumerate())
            if error:
                raise error

    if error:
        with pytest.raises(error):
            body()
    else:
        body()
    assert cancelled and watchdog._watch is None
    assert not any(t.name == "watchdog" for t in threading.enumerate())


def test_0_watches_nothing(tmp_path):
    with watchdog.watching(0.0, tmp_path / "stacks.txt"):
        watchdog.alive("begun")
        assert watchdog._watch is None and not any(t.name == "watchdog" for t in threading.enumerate())
