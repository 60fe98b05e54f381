"""Kills, signals and resumes: the run that was interrupted is the run that was not."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from brorl_jax import checkpoint, collect, evaluate, session, train, warmup
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Interrupted, Stop
from brorl_jax.learner.state import TrainState
from brorl_jax.metrics import MetricLogger, read_jsonl
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

REPO = Path(__file__).resolve().parents[1]
STEPS = 10


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    tiny_runs.keep_programs(monkeypatch)


def law(folder, **changes):
    """12 prompts, at least 6 asked for a step and some dropped: an epoch ends every other step, groups are carried.

    KL to a reference that is reset, several updates a step, evaluations and checkpoints at different steps.
    """
    changes = {
        "train.steps": STEPS,
        "filter.oversample": 1.5,
        "algo.updates_per_step": 2,
        "algo.kl.coef": 1e-2,
        "algo.reference.every": 4,
        "checkpoint.every": 2,
        "eval.every": 3,
        "eval.samples": 2,
        **changes,
    }
    return tiny_runs.config(folder, **changes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run that was never interrupted, and what kills at awkward moments would have left of it."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.keep_programs(patch)

        def write(logger, step, row, original=MetricLogger.write):
            original(logger, step, row)
            if logger.path.name == "metrics.jsonl" and step in (0, 6):
                tiny_runs.image(folder / "run", folder / f"metrics of {step}")

        def save(self, step, *args, original=Checkpointer.save):
            original(self, step, *args)
            if step in (0, 4, 9):  # the writers are at work
                tiny_runs.image(folder / "run", folder / f"saving {step}")

        def update(s, batch, original):
            if s.updates == 6 and not (folder / "updating").exists():
                tiny_runs.image(folder / "run", folder / "updating")
            return original(s, batch)

        def make(*args, original=session.make_train_step):
            step = original(*args)
            return lambda state, batch: update(state, batch, step)

        patch.setattr(MetricLogger, "write", write)
        patch.setattr(Checkpointer, "save", save)
        patch.setattr(session, "make_train_step", make)
        train.run(law(folder), folder / "run")
    return folder


def carried_of(workdir, step):
    return [r for r in tiny_runs.rollouts(workdir, step) if r["outcome"] == "carried"]


def test_the_reference_run_has_what_makes_a_resume_hard(reference):
    rows = tiny_runs.metrics(reference / "run")
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    assert sum(bool(carried_of(reference / "run", s)) for s in range(1, STEPS)) >= 3
    assert sum(r["groups/generated"] for r in rows[1:]) > 3 * tiny_runs.PROMPTS  # epochs end
    assert {r.get("reference/reset") for r in rows[1:]} == {0.0, 1.0}
    assert all(r["optim/grad_norm"] > 1e-3 and not r["optim/skipped"] for r in rows[1:])
    assert [r["step"] for r in rows if "eval/pass@1" in r] == [0, 3, 6, 9, 10]


@pytest.mark.parametrize("moment", ["metrics of 0", "metrics of 6", "saving 0", "saving 4", "saving 9", "updating"])
def test_killed_at_an_awkward_moment_and_resumed_is_the_same_run(reference, tmp_path, moment, capsys):
    workdir = shutil.copytree(reference / moment, tmp_path / "run")
    assert len(tiny_runs.metrics(workdir) if (workdir / "metrics.jsonl").exists() else []) <= STEPS
    train.run(law(reference), workdir)
    tiny_runs.same_run(workdir, reference / "run", STEPS)
    assert "note: resuming with" not in capsys.readouterr().err  # nothing changed
    evals = [json.loads(p.read_text()) for p in sorted((workdir / "eval").iterdir())]
    assert evals == [json.loads(p.read_text()) for p in sorted((reference / "run" / "eval").iterdir())]
    assert Checkpointer(workdir, keep=2).steps == Checkpointer(reference / "run", keep=2).steps


def test_killed_in_mid_checkpoint_the_one_before_counts(reference, tmp_path):
    workdir = shutil.copytree(reference / "run", tmp_path / "run")
    torn = next((workdir / "checkpoints").glob("10"))
    for name in ("commit_success.txt", "state", "_CHECKPOINT_METADATA"):
        path = torn / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    torn.rename(torn.with_name("10.orbax-checkpoint-tmp-77"))
    assert Checkpointer(workdir, keep=2).latest == 9
    train.run(law(reference), workdir)
    tiny_runs.same_run(workdir, reference / "run", STEPS)
    assert [r["step"] for r in read_jsonl(workdir / "metrics.superseded.jsonl")[0]] == [10]
    assert [p.name for p in (workdir / "rollouts" / "superseded").iterdir()] == ["step_000010.0.jsonl.gz"]


def test_what_a_killed_save_left_is_removed_by_the_run_alone(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    saver.save(1, tiny_state(1), [], {}, None)
    saver.close()
    # of the last save before a signal: the resumed run may never save that step again
    left = Path(shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"))
    Checkpointer(tmp_path, keep=2).close()  # an evaluation, perhaps of a run that is saving
    assert left.is_dir()
    saver = Checkpointer(tmp_path, keep=2, tidy=True)
    saver.save(2, tiny_state(2), [], {}, None)  # waits for the removal
    saver.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}


FULL = (  # of a save on a full disk, shortened
    'RESOURCE_EXHAUSTED: Error writing "skipped/0" in OCDBT database at local file "/x/": Failed writing: "/x/d/18cc": '
    "Failed to write 8132 bytes to file 5: No space left on device [os_error_code='28']"
)


@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError(FULL), "No space left on device"), (OSError(errno.EDQUOT, ""), "Disk quota exceeded")],
)
def test_a_full_disk_is_one_line_that_names_what_is_left(tmp_path, monkeypatch, error, why):
    saver = Checkpointer(tmp_path, keep=2)
    saver.save(1, tiny_state(1), [], {}, None)
    saver.wait()

    def fail(*_, **__):
        raise error

    calls = {
        "wait_until_finished": saver.wait,
        "save": lambda: saver.save(2, tiny_state(2), [], {}, None),
        "close": saver.close,
    }
    for method, call in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(saver._manager, method, fail)
            with pytest.raises(UserError, match=rf"checkpoints: .*\({why}\).*of step 1"):
                call()
    saver.close()


def test_another_error_of_a_save_stays_what_it_is(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    with pytest.raises(ValueError, match="newer"), saver._writable():
        raise ValueError("newer")
    saver.close()


def test_killed_in_mid_line_of_the_metrics(reference, tmp_path):
    workdir = shutil.copytree(reference / "metrics of 6", tmp_path / "run")
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "reward/me')
    train.run(law(reference), workdir)
    tiny_runs.same_run(workdir, reference / "run", STEPS)


@pytest.mark.slow
def test_kill_minus_nine_of_a_real_process(reference, tmp_path):
    script = f"""
import sys; sys.path[:0] = [{str(REPO)!r}, {str(REPO / "tests")!r}, {str(REPO / "tests" / "helpers")!r}]
import test_checkpoint
from brorl_jax import train
from pathlib import Path
train.run(test_checkpoint.law(Path({str(reference)!r})), Path({str(tmp_path / "run")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    lines = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if lines.exists() and lines.read_text().count("\n") > 5:
            break
        time.sleep(0.02)  # no event comes from another process's file
    process.send_signal(signal.SIGKILL)
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors
    assert 5 < len(tiny_runs.metrics(tmp_path / "run")) <= STEPS
    train.run(law(reference), tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", reference / "run", STEPS)


def test_every_prompt_once_per_epoch_across_three_kills(tmp_path, monkeypatch):
    c = tiny_runs.config(tmp_path, prompts=7, **{"train.steps": 9, "filter.oversample": 1.3, "checkpoint.every": 2})
    workdir = tmp_path / "0"
    for kill, at in enumerate((3, 4, 7), 1):
        workdir = tiny_runs.killed_at(monkeypatch, at, c, workdir, tmp_path / str(kill))
    train.run(c, workdir)
    drawn = {}  # groups in the order in which they were generated
    for step in range(1, 10):
        for row in tiny_runs.rollouts(workdir, step):
            if row["sample"] == 0:
                drawn.setdefault(row["seed"], row["prompt_id"])
    order = list(drawn.values())
    assert len(order) > 5 * 7
    for epoch in range(0, len(order) - 6, 7):
        assert len(set(order[epoch : epoch + 7])) == 7


def test_five_prompts_four_a_step_trains_them_all_alike(tmp_path):
    c = tiny_runs.config(tmp_path, prompts=5, **{"train.steps": 5, "filter.dynamic": False, "checkpoint.every": 0})
    train.run(c, tmp_path / "run")
    trained = [r["prompt_id"] for s in range(1, 6) for r in tiny_runs.rollouts(tmp_path / "run", s) if r["sample"] == 0]
    assert {p: trained.count(p) for p in trained} == {f"small/{i}": 4 for i in range(5)}
    seeds = [r["seed"] for s in range(1, 6) for r in tiny_runs.rollouts(tmp_path / "run", s)]
    assert len(set(seeds)) == len(seeds) == 5 * 4 * 4
    assert tiny_runs.checkpoint(tmp_path / "run", 5)["['updates']"] == 5


def interrupted(config, workdir, capsys, code):
    with pytest.raises(SystemExit) as stopped:
        train.run(config, workdir)
    assert stopped.value.code == code
    error = capsys.readouterr().err
    assert f"The same command resumes the run in {workdir}" in error
    return error


def send(signum, when):
    """Sends a signal to this process the first time that ``when`` holds."""
    sent = []

    def maybe(*args):
        if not sent and when(*args):
            sent.append(1)
            os.kill(os.getpid(), signum)

    return maybe


@pytest.mark.parametrize("step", [0, 5])
def test_sigterm_amid_rollouts_drops_them_and_resumes_the_same(reference, tmp_path, monkeypatch, capsys, step):
    calls = []

    def rollouts(engine, tokenizer, requests, *args, original=collect.rollouts):
        calls.append(requests)
        return original(engine, tokenizer, requests, *args)

    signalled = send(signal.SIGTERM, lambda s: s.step == step)

    def one(s, original=train.step):
        signalled(s)
        return original(s)

    with monkeypatch.context() as patch:
        patch.setattr(train, "step", one)
        patch.setattr(collect, "rollouts", rollouts)
        assert "SIGTERM" in interrupted(law(reference), tmp_path / "run", capsys, 143)
    rows = tiny_runs.metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(step + 1))
    assert Checkpointer(tmp_path / "run", keep=2).latest == step  # saved although none was due
    train.run(law(reference), tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", reference / "run", STEPS)
    assert "note: resuming with" not in capsys.readouterr().err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_amid_an_update_finishes_the_step_and_saves_it(reference, tmp_path, monkeypatch, capsys, signum, code):
    signalled = send(signum, lambda state: int(state.updates) == 9)  # the second of step 5

    def make(*args, original=session.make_train_step):
        step = original(*args)
        return lambda state, batch: (signalled(state), step(state, batch))[1]

    with monkeypatch.context() as patch:
        patch.setattr(session, "make_train_step", make)
        interrupted(law(reference, **{"checkpoint.every": 0}), tmp_path / "run", capsys, code)
    assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    assert Checkpointer(tmp_path / "run", keep=2).latest == 5
    train.run(law(reference), tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", reference / "run", STEPS)


def test_a_signal_in_the_last_step_still_leaves_it_saved(reference, tmp_path, monkeypatch, capsys):
    signalled = send(signal.SIGTERM, lambda s: s.step == 1)

    def one(s, original=train.step):
        out = original(s)
        signalled(s)
        return out

    c = tiny_runs.config(tmp_path, **{"train.steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(train, "step", one)
        interrupted(c, tmp_path / "run", capsys, 143)
    assert Checkpointer(tmp_path / "run", keep=2).latest == 1
    train.run(c, tmp_path / "run")  # nothing left but to finish
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "model").is_dir()


def test_sigterm_in_the_warm_start_begins_it_again(tmp_path, monkeypatch, capsys):
    c = tiny_runs.config(tmp_path, **{"warmup.steps": 4, "train.steps": 1})
    train.run(c, tmp_path / "whole")
    signalled = send(signal.SIGTERM, lambda state: int(state.updates) == 2)

    def make(*args, original=warmup.make_train_step):
        step = original(*args)
        return lambda state, batch: (signalled(state), step(state, batch))[1]

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "make_train_step", make)
        interrupted(c, tmp_path / "run", capsys, 143)
    train.run(c, tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", tmp_path / "whole", 1)
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "warmup.jsonl")[0]] == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["start", "warm start"])
def test_a_signal_amid_an_evaluation_of_untrained_weights_gives_it_up(tmp_path, monkeypatch, capsys, where):
    until = {"warmup.steps": 2, "warmup.every": 1, "warmup.until": 0.9} if where == "warm start" else {}
    c = tiny_runs.config(tmp_path, **{"train.steps": 1, **until})
    signalled, rows = send(signal.SIGTERM, lambda: True), []

    def graded(*args, original=evaluate.graded):
        for group in original(*args):
            signalled()
            rows.append(group)
            yield group

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "graded", graded)
        interrupted(c, tmp_path / "run", capsys, 143)
    assert len(rows) == 1  # of 3
    assert not read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    train.run(c, tmp_path / "run")
    assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1]


def stopped_while_evaluating(monkeypatch, capsys, config, workdir, step):
    """Runs until the evaluation after ``step``; a signal comes once its first prompt is done."""
    prompts = []
    signalled = send(signal.SIGTERM, lambda: True)

    def graded(engine, *args, original=evaluate.graded):
        for group in original(engine, *args):
            if engine._version == 2 * step:  # updates a step
                signalled()
                prompts.append(group)
            yield group

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "graded", graded)
        interrupted(config, workdir, capsys, 143)
    assert len(prompts) == 1  # of 3


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_signal_amid_an_evaluation_leaves_it_to_the_resumed_run(reference, tmp_path, monkeypatch, capsys, step):
    """Which evaluates first, even if it is stopped once more while it does, or has nothing else to do."""
    workdir, whole = tmp_path / "run", reference / "run"
    for _ in range(2):
        stopped_while_evaluating(monkeypatch, capsys, law(reference), workdir, step)
        rows = tiny_runs.metrics(workdir)
        assert [r["step"] for r in rows] == list(range(step + 1))
        assert (
            "eval/pass@1" not in rows[-1] and rows[-1]["reward/mean"] == tiny_runs.metrics(whole)[step]["reward/mean"]
        )
        assert tiny_runs.rollouts(workdir, step) == tiny_runs.rollouts(whole, step)
        assert Checkpointer(workdir, keep=2).latest == step
        assert not (workdir / "eval" / f"step_{step:06d}.json").exists()
    train.run(law(reference), workdir)
    tiny_runs.same_run(workdir, whole, STEPS)
    for file in (whole / "eval").iterdir():
        assert (workdir / "eval" / file.name).read_bytes() == file.read_bytes()
    assert Checkpointer(workdir, keep=2).best == Checkpointer(whole, keep=2).best


def test_a_second_signal_kills():
    code = "import os, signal\nfrom brorl_jax.interrupt import Stop\nwith Stop() as stop:\n"
    code += "    os.kill(os.getpid(), signal.SIGTERM)\n    print('asked', flush=True)\n"
    code += "    os.kill(os.getpid(), signal.SIGTERM)\n    print('still here')\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("asked\n", -signal.SIGTERM)


def test_handlers_are_put_back_and_check_raises_only_after_a_signal():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted) as raised:
            stop.check()
    assert raised.value.signum == signal.SIGINT and str(raised.value) == "SIGINT"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# --- the checkpointer by itself


def tiny_state(value):
    leaf = jnp.full((64, 33), value, jnp.float32)
    moments = {"mu": {"w": leaf + 1}, "count": jnp.int32(value)}
    return TrainState({"w": leaf}, moments, {"w": leaf + 2}, jnp.int32(value), jnp.int32(0))


def placed(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def carried_groups():
    def sample(i, n, status, reward):
        tokens, logp = np.arange(n, dtype=np.int32) + i, -np.arange(n, dtype=np.float32) - np.float32(0.1)
        finish = Finish.ABORT if status is Status.ABORTED else Finish.LENGTH
        return Sample(i, 2**63 - 1 - i, tokens, logp, finish, 5, "text \ud800 é", status, reward)

    meta = {"question": "q", "params": {"a": [1, 2]}, "index": 3}
    prompt = Prompt("src/1", np.array([5, 6], np.int32), "q", "g", "exact:boxed", "src", meta)
    whole = [sample(0, 3, Status.TRUNCATED, 0.1), sample(1, 0, Status.ABORTED, np.nan), sample(2, 1, Status.OK, 1.0)]
    return [Group(prompt, whole), Group(prompt, [sample(7, 2, Status.GRADER_ERROR, np.nan)])]


def assert_same_groups(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt.tokens.dtype == np.int32
        assert a.prompt.tokens.tolist() == b.prompt.tokens.tolist()
        for name in ("id", "text", "gold", "verifier", "source", "meta"):
            assert getattr(a.prompt, name) == getattr(b.prompt, name)
        for x, y in zip(a.samples, b.samples, strict=True):
            np.testing.assert_array_equal(x.tokens, y.tokens, strict=True)
            np.testing.assert_array_equal(x.logp, y.logp, strict=True)
            for name in ("index", "seed", "finish", "weight_version", "text", "status"):
                assert getattr(x, name) == getattr(y, name), name
            assert x.finish is y.finish and x.status is y.status
            np.testing.assert_equal(x.reward, y.reward)


@pytest.mark.parametrize("groups", [[], carried_groups()], ids=["none", "some"])
def test_what_is_saved_is_what_is_restored(tmp_path, groups):
    saver, state = Checkpointer(tmp_path, keep=2), tiny_state(3)
    saver.save(3, state, groups, {"step": 3, "evals": [(1, 0.5), (2, float("nan"))]}, None)
    saver.close()
    restored, carried, host = Checkpointer(tmp_path, keep=2).restore(placed(state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored.reference is not None and isinstance(restored, TrainState)
    assert host["step"] == 3 and host["evals"][0] == [1, 0.5]
    assert_same_groups(carried, groups)


def test_a_state_without_reference_stays_without(tmp_path):
    saver, state = Checkpointer(tmp_path, keep=2), tiny_state(3)._replace(reference=None)
    saver.save(1, state, [], {}, None)
    assert saver.restore(placed(state))[0].reference is None


def test_donating_the_state_during_a_save_does_not_change_what_is_saved(tmp_path):
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    saver, state = Checkpointer(tmp_path, keep=20), jax.tree.map(jnp.copy, tiny_state(0))
    for step in range(8):
        saver.save(step, state, [], {}, None)
        for _ in range(5):
            state = advance(state)
    saver.wait()
    for step in range(8):
        restored = saver.restore(placed(state), step)[0]
        jax.tree.map(np.testing.assert_array_equal, restored, jax.tree.map(lambda x, s=step: x + 5 * s, tiny_state(0)))


def test_last_k_and_the_best_by_evaluation_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    scores = {1: 0.1, 3: 0.9, 5: 0.9, 6: 0.2}
    for step in range(8):
        saver.save(step, tiny_state(step), [], {"step": step}, scores.get(step))
    saver.wait()
    kept = saver.steps
    assert kept[-2:] == [6, 7] and len(kept) == 3 and kept[0] in (3, 5)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == kept  # others are gone from disk
    resumed = Checkpointer(tmp_path, keep=2)  # what another process knows is on disk
    assert resumed.best == saver.best == kept[0]
    resumed.save(8, tiny_state(8), [], {}, None)
    resumed.wait()
    assert resumed.steps == [kept[0], 7, 8]
    resumed.save(9, tiny_state(9), [], {}, 0.95)
    resumed.wait()
    assert resumed.steps == [8, 9] and Checkpointer(tmp_path, keep=2).best == 9


def test_a_score_that_comes_late_counts_as_one_that_was_saved(tmp_path):
    saver = Checkpointer(tmp_path, keep=1)
    for step, score in ((1, 0.5), (2, None)):
        saver.save(step, tiny_state(step), carried_groups(), {"step": step, "evals": []}, score)
    saver.amend(2, {"evals": [[2, 0.9]]}, 0.9)
    for step in (3, 4):
        saver.save(step, tiny_state(step), [], {"step": step}, None)
    saver.wait()
    assert saver.steps == [2, 4] and Checkpointer(tmp_path, keep=1).best == 2
    state, carried, host = saver.restore(placed(tiny_state(0)), 2)
    jax.tree.map(np.testing.assert_array_equal, state, tiny_state(2))
    assert_same_groups(carried, carried_groups())
    assert host == {"step": 2, "evals": [[2, 0.9]]}


def test_another_format_is_refused(tmp_path, monkeypatch):
    saver, state = Checkpointer(tmp_path, keep=2), tiny_state(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        saver.save(1, state, [], {}, None)
    with pytest.raises(ValueError, match="checkpoint 1 has another format"):
        saver.restore(placed(state))


# --- what does not fit is refused


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.keep_programs(patch)
        train.run(tiny_runs.config(folder, **{"train.steps": 1}), folder / "run")
    return folder


def refusal(config, workdir):
    with pytest.raises(UserError) as refused:
        train.run(config, workdir)
    message = str(refused.value)
    assert "\n" not in message and str(workdir / "checkpoints") in message
    return message


def other_data(folder):
    table = folder / "train.jsonl"
    table.write_text(table.read_text().replace("say 10", "say 99"))


REFUSALS = {
    "data": ({}, other_data, r"training data is not that of the checkpoint.*source small: content: was '\w+'"),
    "seed": ({"seed": 1}, None, "seed: was '0', is '1'"),
    "prompt": (
        {"data.train.small.prompt": "Now {question}"},
        None,
        "small: prompt: was '{question}', is 'Now {question}'",
    ),
    "width": ({"model.new.hidden": 24}, None, r"params/embed is \[320, 16\] there and \[320, 24\] with this config"),
    "layers": ({"model.new.layers": 2}, None, r"params/layers/attn_norm is \[1, 16\] there and \[2, 16\]"),
    "family": ({"model.new.family": "llama"}, None, r"params/layers/k_norm is \[1, 8\] there and absent"),
    "reference": ({"algo.kl.coef": 0.1}, None, r"reference/embed is absent there.*algo\.kl"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(finished, tmp_path, case):
    changes, change, message = REFUSALS[case]
    workdir = shutil.copytree(finished / "run", tmp_path / "run")
    c = tiny_runs.config(tmp_path, **{"train.steps": 2, **changes})
    if change:
        change(tmp_path)
    # The tables lie elsewhere, which is no reason to refuse them.
    before = {p.relative_to(workdir): p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    assert re.search(message, refusal(c, workdir))
    after = {p.relative_to(workdir): p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    assert after == before  # refused: nothing was written


@pytest.mark.parametrize("damage", ["host/metadata", "state/manifest.ocdbt", "state/d", "carried"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(finished, tmp_path, damage):
    workdir = shutil.copytree(finished / "run", tmp_path / "run")
    newest = workdir / "checkpoints" / "1"
    path = newest / damage
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    message = refusal(tiny_runs.config(finished, **{"train.steps": 2}), workdir)
    assert "checkpoint 1 can't be read" in message
    assert message.endswith(f"move {newest} away; then step 0 is the newest one.")


def test_another_config_on_a_resume_is_noted_and_both_are_kept(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished / "run", tmp_path / "run")
    old = json.loads((workdir / "config.json").read_text())
    train.run(tiny_runs.config(finished, **{"train.steps": 2, "optim.lr": 5e-3}), workdir)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: resuming with optim.lr = 0.005, was 0.01",
        "note: resuming with train.steps = 2, was 1",
    ]
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == 2
    (kept,) = workdir.glob("config.until_*.json")
    assert json.loads(kept.read_text()) == old


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff"])
def test_a_damaged_config_of_the_run_is_noted_and_kept(tmp_path, capsys, text):
    c = tiny_runs.config(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    session._write_config(c, tmp_path, resuming=True)
    assert "config.json can't be compared with this config" in capsys.readouterr().err
    (kept,) = tmp_path.glob("config.until_*.json")
    assert kept.read_bytes() == text and json.loads((tmp_path / "config.json").read_text())["name"] == c.name
