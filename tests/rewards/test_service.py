"""Laws of the grading service: misbehaving costs oneself alone, order and cache never matter, no process is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.rewards import Grader, registry
from brorl_jax.rewards import pool as pool_lib
from brorl_jax.types import Finish, Group, Prompt, Sample, Status
from tests.helpers.hostile_scorers import plain

ROOT = Path(__file__).parents[2]
LONG = 60.0  # seconds; a wait that long has failed


def prompt(key="0", verifier="patient", **meta):
    return Prompt(f"s/{key}", np.zeros(1, np.int32), "", f"gold {key}", verifier, "s", meta)


def group(answers, key="0", verifier="patient", **meta):
    nothing = np.zeros(0, np.float32)
    samples = [Sample(i, i, nothing, nothing, Finish.STOP, 0, text) for i, text in enumerate(answers)]
    return Group(prompt(key, verifier, **meta), samples)


def verdicts(g):
    return [(s.status, None if np.isnan(s.reward) else s.reward) for s in g.samples]


def pids(grader):
    return [worker.pid for worker in grader._pool._team]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def assert_whole(grader):
    """As many live workers as there should be, and they work."""
    g = group([f"{time.monotonic()} {i}" for i in range(8 * grader.workers)], key="after")
    grader.grade([g])
    assert verdicts(g) == [(Status.OK, plain(s.text, g.prompt)) for s in g.samples]
    assert len(pids(grader)) == grader.workers and all(map(alive, pids(grader)))


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2) as grader:
        yield grader


HANGS = ["hang", "hang_in_c", "stop"]
DIES = ["kill", "_exit 0", "_exit 3", "flood"]
FAILS = ["exit 0", "exit 1", "interrupt", "raise", "recurse", "memory", "lambda", "nan"]
HARMLESS = ["print", "alarm", "fork"]


def test_what_misbehaves_costs_itself_alone(grader):
    """P02, P07: it has no reward and says why, its neighbours have theirs, and the pool is whole."""
    hangs = group(HANGS, key="hangs", verifier="hostile")
    mixed = group([text for bad in DIES + FAILS + HARMLESS for text in (bad, f"after {bad}")], key="mixed")
    stats = grader.grade([hangs, mixed])
    assert verdicts(hangs) == [(Status.TIMEOUT, None)] * 3
    for sample in mixed.samples:
        bad = sample.text in DIES + FAILS
        expected = (Status.GRADER_ERROR, None) if bad else (Status.OK, plain(sample.text, mixed.prompt))
        assert (sample.status, None if bad else sample.reward) == expected, sample.text
    assert stats.statuses[Status.TIMEOUT] == 3 and stats.statuses[Status.GRADER_ERROR] == len(DIES + FAILS)
    assert any("no verdict within 1 s" in error for error in stats.errors)
    assert_whole(grader)
    metrics = grader.pop_metrics()
    assert metrics["grading/hostile/timeouts"] == 3 and metrics["grading/patient/timeouts"] == 0
    assert metrics["grading/patient/errors"] == len(DIES + FAILS)
    assert metrics["grading/hostile/seconds"] >= 3


def test_a_failure_says_how_it_came(grader):
    grader.pop_errors()
    asked = ["kill", "_exit 3", "raise", "memory", "nan"]
    groups = [group([answer], key=answer) for answer in asked]
    errors = [grader.grade([g]).errors[0] for g in groups]
    for error, expected in zip(
        errors, ("signal 9", "exit status 3", "RuntimeError: xxx", "MemoryError", "nan"), strict=True
    ):
        assert expected in error and len(error) < 1000
    grader.pop_metrics()
    assert sorted(grader.pop_errors()) == sorted(errors) and grader.pop_errors() == []


def test_workers_are_what_a_scorer_may_rely_on(grader):
    """No jax, one thread per library, and the main thread: where libraries may set alarms (P01)."""
    g = group(["no jax", "one thread", "main thread"])
    grader.grade([g])
    assert verdicts(g) == [(Status.OK, 1.0)] * 3


def test_a_spent_worker_makes_room_and_loses_nothing():
    with Grader(workers=1, memory_gib=0.75) as grader:
        grader.grade([group(["warm"])])
        (before,) = pids(grader)
        g = group(["grow 400", *map(str, range(20))], key="1")
        grader.grade([g])
        assert verdicts(g) == [(Status.OK, plain(s.text, g.prompt)) for s in g.samples]
        assert pids(grader) != [before]
        assert_whole(grader)


@pytest.fixture(scope="module")
def forgetful():
    with Grader(workers=1, cache=1) as grader:
        yield grader


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "c", "raise", "nan", "\ud800", "é\n"]), min_size=1), min_size=1),
    st.randoms(use_true_random=False),
)
def test_neither_order_nor_cache_nor_workers_matter(grader, forgetful, texts, random):
    """A verdict is a function of verifier, prompt and answer; a cached one equals a fresh one."""
    groups = [group(answers, key=str(i % 3)) for i, answers in enumerate(texts)]
    random.shuffle(groups)
    for g in groups:
        random.shuffle(g.samples)
    for grade in (grader.grade, grader.grade, lambda groups: [forgetful.grade([g]) for g in groups]):
        grade(groups)
        for g in groups:
            for s in g.samples:
                bad = s.text in ("raise", "nan")
                assert s.status is (Status.GRADER_ERROR if bad else Status.OK)
                assert np.isnan(s.reward) if bad else s.reward == plain(s.text.strip(), g.prompt)


def test_every_distinct_answer_is_scored_once(grader):
    grader.pop_metrics()
    one = group(["x", "y", " x ", "x"] * 64, key="once")
    two = group(["x", "z", "", "raise", "raise"], key="once")  # the same prompt again
    other = group(["x"], key="another")
    stats = grader.grade([one, two, other])
    assert stats.scored == 5 and stats.unanswered == 1  # x, y; z, raise; x
    metrics = grader.pop_metrics()
    assert metrics["grading/patient/answers"] == 256 + 4 + 1 and metrics["grading/patient/unanswered"] == 1
    assert metrics["grading/patient/graded"] == 5
    assert metrics["grading/patient/cache_hits"] == 256 + 4 + 1 - 5
    # Verdicts are kept, failures are asked again.
    assert grader.grade([one, two]).scored == 1
    assert grader.pop_metrics()["grading/patient/graded"] == 1


@pytest.mark.parametrize("change", [{"verifier": "patient:tag"}, {"key": "1"}, {"tolerance": 1}])
def test_what_a_scorer_may_read_keeps_verdicts_apart(grader, change):
    answer = "<answer>5</answer>" if "verifier" in change else "5"
    same = {"key": f"apart {sorted(change)}"}
    assert grader.grade([group(["5"], **same)]).scored == 1
    assert grader.grade([group([answer], **same | change)]).scored == 1
    assert grader.grade([group(["5"], **same)]).scored == 0


def test_the_cache_is_bounded_and_forgets_what_was_used_least_recently():
    with Grader(workers=1, cache=3) as grader:
        for answer, scored in zip("abcadbac", (1, 1, 1, 0, 1, 1, 0, 1), strict=True):  # c leaves for d? no: b does
            assert grader.grade([group([answer])]).scored == scored, answer
            assert len(grader._cache) <= 3


def test_cheap_and_inline_scorers_start_no_worker():
    def cheap(answer, prompt):
        return 1.0 if answer == prompt.gold else None

    registry.register("cheap", default_format="whole", cheap=cheap)(plain)
    try:
        with Grader(workers=1) as grader:
            sure = group(["gold 0"] * 3, verifier="cheap")
            assert grader.grade([sure]).scored == 1 and verdicts(sure) == [(Status.OK, 1.0)] * 3
            inline = group(["gold 0"], verifier="exact:whole")
            grader.grade([inline])
            assert verdicts(inline) == [(Status.OK, 1.0)] and grader._pool is None
    finally:
        del registry._SCORERS["cheap"]
        registry.get.cache_clear()


def test_large_prompts_reach_every_worker(grader):
    """More than a socket holds, while both workers are busy."""
    groups = [group([f"{i}" for i in range(4)], key=f"large {k}", tests="x" * 3_000_000) for k in range(4)]
    grader.grade(groups)
    for g in groups:
        assert verdicts(g) == [(Status.OK, plain(s.text, g.prompt)) for s in g.samples]


def test_live_workers_have_slots_of_their_own(grader, tmp_path):
    grader.grade([group([f"slot {tmp_path}"], key=str(i)) for i in range(2)])
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1"}


def test_nothing_that_a_scorer_started_is_left(grader):
    """P09: not even in a session of its own, with its parent gone."""
    seconds = f"{10_000 + os.getpid()}.5"
    g = group([f"orphan {seconds}"], verifier="hostile", key="orphan")
    grader.grade([g])
    assert verdicts(g) == [(Status.TIMEOUT, None)]
    until(lambda: seconds.encode() not in _command_lines())
    assert_whole(grader)


def _command_lines():
    lines = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines += path.read_bytes()
        except OSError:
            continue
    return lines


def test_a_lost_fork_server_costs_what_was_under_way(tmp_path):
    with Grader(workers=2) as grader:
        grader.grade([group(["warm"])])
        file, old = tmp_path / "pid", pids(grader)
        under_way = grader.submit(group([f"pid {file}"], key="under way"))
        until(lambda: file.exists() and file.read_text())
        os.kill(grader._pool._server.pid, signal.SIGKILL)
        assert grader.wait([under_way]).statuses == {Status.GRADER_ERROR: 1}
        assert_whole(grader)
        assert not set(old) & set(pids(grader))
        until(lambda: not any(map(alive, old)))


def test_closing_gives_up_what_hangs():
    grader = Grader(workers=1)
    pending = grader.submit(group(["hang"]))
    until(lambda: grader._pool._team)
    processes = [*pids(grader), grader._pool._server.pid]
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        grader.wait([pending])
    with pytest.raises(RuntimeError, match="closed"):
        grader.submit(group(["x"]))
    until(lambda: not any(map(alive, processes)))


def test_waiting_ends_when_told_to(grader):
    class Told(Exception):
        pass

    def check():
        raise Told

    pending = [grader.submit(group(["sleep 0.5"], key="told"))]
    with pytest.raises(Told):
        grader.wait(pending, check)
    grader.wait(pending)


def test_a_standstill_ends_the_run_and_says_what_is_waited_for(monkeypatch):
    with Grader(workers=1) as grader:
        pending = grader.submit(group(["sleep 20", "behind"]))
        until(lambda: grader._pool._team and grader._pool._team[0].items)
        monkeypatch.setattr(grader, "_longest", lambda: 0.5)
        with pytest.raises(RuntimeError, match=r"stood still.*1 answers queued; worker 0: patient:whole of s/0"):
            grader.wait([pending])


def test_processes_that_can_not_start_end_the_run_with_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Grader(workers=1) as grader, pytest.raises(RuntimeError, match="ended while grading waited for"):
        grader.grade([group(["x"])])


def test_workers_that_die_before_any_result_end_the_run(monkeypatch):
    """A machine on which nothing can be graded stops the run instead of training on nothing."""
    monkeypatch.setattr(pool_lib, "BARREN", 2)
    with Grader(workers=1) as grader:
        grader.grade([group(["warm"])])
        for _ in range(3):
            (pid,) = pids(grader)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pids(grader) != [pid])
        with pytest.raises(RuntimeError, match="3 grading processes in a row were lost"):
            grader.grade([group(["y"])])


def test_a_scorer_of_the_started_script_is_refused(grader):
    def scorer(answer, prompt):
        return 1.0

    scorer.__module__ = "__main__"
    registry.register("main", default_format="whole")(scorer)
    try:
        with pytest.raises(ValueError, match="put it into a module of its own"):
            grader.submit(group(["x"], verifier="main"))
    finally:
        del registry._SCORERS["main"]
        registry.get.cache_clear()


def test_a_busy_trainer_blames_nobody(grader):
    """Verdicts that came in time count, however late they are read."""
    hold, held = threading.Event(), threading.Event()
    take = grader._pool._take

    def slow(worker, line):
        held.set()
        assert hold.wait(LONG)
        return take(worker, line)

    grader.grade([group(["warm"], verifier="hostile", key="busy")])
    grader._pool._take = slow
    try:
        g = group(list("abcd"), verifier="hostile", key="busy")  # a deadline of 1 s
        pending = grader.submit(g)
        assert held.wait(LONG)
        time.sleep(1.5)  # what the thread would have been away for
        hold.set()
        grader.wait([pending])
    finally:
        grader._pool._take = take
    assert verdicts(g) == [(Status.OK, plain(s.text, g.prompt)) for s in g.samples]


def test_time_of_which_the_trainer_was_suspended_does_not_count(grader, monkeypatch):
    """As if it and its workers had been stopped for 100 s in the middle of an answer with a deadline of 1 s."""
    jumps = []
    monkeypatch.setattr(pool_lib, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(jumps)))
    select = grader._pool._selector.select

    def suspended(pause):
        ready = select(pause)
        if len(jumps) < 3 and any(worker.items for worker in grader._pool._team):
            jumps.append(100.0)
        return ready

    monkeypatch.setattr(grader._pool._selector, "select", suspended)
    g = group(["sleep 0.4", "sleep 0.2"], verifier="hostile", key="suspended")
    grader.grade([g])
    assert jumps
    assert verdicts(g) == [(Status.OK, plain(s.text, g.prompt)) for s in g.samples]


DEATHS = {
    "exits": "pass",
    "raises": "raise RuntimeError",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "hard exit": "os._exit(0)",
    "aborts": "os.abort()",
}


@pytest.mark.parametrize("how", [pytest.param(k, marks=() if k == "killed" else pytest.mark.slow) for k in DEATHS])
def test_no_process_outlives_the_trainer(how, tmp_path):
    script = f"""
        import os, pathlib, signal, sys, time
        from tests.rewards.test_service import group, until
        from brorl_jax.rewards import Grader

        grader = Grader(workers=2)
        files = [pathlib.Path({str(tmp_path)!r}, str(i)) for i in range(2)]
        for file in files:
            grader.submit(group([f"pid {{file}}"], key=file.name))
        until(lambda: all(f.exists() and f.read_text() for f in files))
        pathlib.Path({str(tmp_path)!r}, "server").write_text(str(grader._pool._server.pid))
        {DEATHS[how]}
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, timeout=LONG, capture_output=True)
    processes = [int((tmp_path / name).read_text()) for name in ("0", "1", "server")]
    until(lambda: not any(map(alive, processes)))
