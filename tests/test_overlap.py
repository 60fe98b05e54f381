"""One-step-off generation: which weights draw what, whatever takes how long; kills, signals and errors."""

import hashlib
import json
import os
import signal
import threading

import jax
import numpy as np
import pytest
import sglang_cases as cases
import sglang_task  # noqa: F401 (a verifier that few updates can please)
import tiny_runs

from brorl_jax import collect, config_checks, overlap, session, train
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.config import ConfigError
from brorl_jax.data.tokenizer import train_tokenizer
from brorl_jax.interrupt import Interrupted
from brorl_jax.models import hf
from brorl_jax.rollout import local
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

STEPS, UPDATES = 6, 2
# what differs between runs with and without; mismatch: which carried groups count as of the present weights
TIMED = ("time", "throughput/", "memory/", "grading/", "overlap/", "mismatch/")
WAIT_S = 120.0  # for another thread; only a test that fails waits that long


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    tiny_runs.keep_programs(monkeypatch)


def law(folder, **changes):
    """Groups are dropped and carried, epochs end, the reference is reset, evaluations use the engine in between."""
    changes = {
        "rollout.overlap": True,
        "train.steps": STEPS,
        "filter.oversample": 1.5,
        "algo.updates_per_step": UPDATES,
        "algo.kl.coef": 1e-2,
        "algo.reference.every": 4,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
        "eval.every": 3,
        "eval.samples": 2,
        **changes,
    }
    return tiny_runs.config(folder, **changes)


def named(weights):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(weights)}


def digest(weights):
    """Of weights by name, bit for bit."""
    parts = (name.encode() + np.asarray(weights[name]).tobytes() for name in sorted(weights))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def weights_of(state):
    """Of a checkpoint."""
    return {name.removeprefix("['params']"): x for name, x in state.items() if name.startswith("['params']")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The uninterrupted run, what kills would have left of it, and the weights that every generation began and ended
    with."""
    folder = tmp_path_factory.mktemp("overlap")
    drawn = []  # (in the background, weights at its start, at its end)
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.keep_programs(patch)

        def generate(self, requests, sampling, original=LocalEngine.generate):
            if len(requests[0].seeds) == 2:  # an evaluation
                yield from original(self, requests, sampling)
                return
            before = digest(named(self._params))
            yield from original(self, requests, sampling)
            drawn.append(
                (threading.current_thread() is not threading.main_thread(), before, digest(named(self._params)))
            )
            if self._version == 2 * UPDATES and not (folder / "generating").exists():
                tiny_runs.image(folder / "run", folder / "generating")

        def save(self, step, *args, original=Checkpointer.save):
            original(self, step, *args)
            if step == 4:
                tiny_runs.image(folder / "run", folder / "saving")

        patch.setattr(LocalEngine, "generate", generate)
        patch.setattr(Checkpointer, "save", save)
        before = {t for t in threading.enumerate() if not t.daemon}
        train.run(law(folder), folder / "run")
        assert not {t for t in threading.enumerate() if not t.daemon} - before
    return folder, drawn


def test_every_step_is_drawn_from_the_weights_that_the_step_before_it_began_with(reference):
    folder, drawn = reference
    states = [tiny_runs.checkpoint(folder / "run", step) for step in range(STEPS + 1)]
    weights = [digest(weights_of(state)) for state in states]
    assert len(set(weights)) == STEPS + 1
    expected = []
    for step in range(1, STEPS + 1):
        row = tiny_runs.metrics(folder / "run")[step]
        expected += [(step > 1, weights[max(step - 2, 0)])] * int(row["groups/rounds"])
        assert row["overlap/staleness"] >= UPDATES * (step > 1) if step < STEPS else "overlap/staleness" not in row
    assert [(beside, before) for beside, before, _ in drawn] == expected
    assert all(before == after for _, before, after in drawn)  # though the updates donated the trainer's own


def test_versions_say_so(reference):
    folder, _ = reference
    rows = tiny_runs.metrics(folder / "run")
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    assert sum(r["groups/carried_in"] for r in rows[1:]) > 2 and {r["groups/starved"] for r in rows[1:]} == {0}
    for step in range(1, STEPS + 1):
        samples = tiny_runs.rollouts(folder / "run", step)
        of_carried = 4 * rows[step]["groups/carried_in"] * (step != 2)  # steps 1 and 2 are of the same weights
        ages = [UPDATES * (step - 1) - s["weight_version"] for s in samples]
        young = UPDATES * (step > 1)
        assert ages.count(young) == len(samples) - of_carried
        assert all(a == young for a, s in zip(ages, samples, strict=True) if s["outcome"] == "carried")
        if step < STEPS:
            trained = [a for a, s in zip(ages, samples, strict=True) if s["outcome"] == "trained"]
            assert rows[step]["overlap/staleness"] == pytest.approx(np.mean(trained))
            assert 0 <= rows[step]["overlap/hidden_s"] <= rows[step]["overlap/collect_s"]


@pytest.mark.parametrize("first", ["generation", "updates"])
def test_nothing_depends_on_what_ends_first(reference, tmp_path, monkeypatch, first):
    ended = threading.Semaphore(0)

    def collected(*args, original=collect.collect):
        beside = threading.current_thread() is not threading.main_thread()
        if beside and first == "updates":
            assert ended.acquire(timeout=WAIT_S)
        out = original(*args)
        if beside and first == "generation":
            ended.release()
        return out

    def make(*args, original=session.make_train_step):
        step = original(*args)

        def update(state, batch):
            done = int(state.updates)
            if first == "generation" and done % UPDATES == 0 and done < UPDATES * (STEPS - 1):
                assert ended.acquire(timeout=WAIT_S)
            out = jax.block_until_ready(step(state, batch))
            if first == "updates" and done % UPDATES == UPDATES - 1:
                ended.release()
            return out

        return update

    monkeypatch.setattr(collect, "collect", collected)
    monkeypatch.setattr(session, "make_train_step", make)
    train.run(law(tmp_path), tmp_path / "run")
    same(tmp_path / "run", reference[0] / "run")


def same(ours, theirs):
    """``tiny_runs.same_run`` of rows without their times."""
    for workdir in (ours, theirs):
        rows = tiny_runs.metrics(workdir)
        rows = [{k: v for k, v in r.items() if k not in ("overlap/collect_s", "overlap/hidden_s")} for r in rows]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_runs.same_run(ours, theirs, STEPS)


@pytest.mark.parametrize("moment", ["generating", "saving"])
def test_killed_and_resumed_is_the_same_run(reference, tmp_path, moment):
    """Killed while two threads are at work, and while a checkpoint is written."""
    workdir = tiny_runs.image(reference[0] / moment, tmp_path / "run")
    assert len(tiny_runs.metrics(workdir)) < STEPS
    train.run(law(reference[0]), workdir)
    same(workdir, reference[0] / "run")


@pytest.mark.parametrize("where", ["generation", "updates"])
def test_a_signal_lets_the_generation_end_and_saves_it(reference, tmp_path, monkeypatch, where):
    def signalled():
        if threading.current_thread() is not threading.main_thread() or where == "updates":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        once_at_version(patch, 2 * UPDATES, where, signalled)
        with pytest.raises(SystemExit) as stopped:
            train.run(law(reference[0], **{"checkpoint.every": 0}), tmp_path / "run")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert Checkpointer(tmp_path / "run", keep=9).latest == 3
    train.run(law(reference[0]), tmp_path / "run")
    same(tmp_path / "run", reference[0] / "run")


def once_at_version(patch, version, where, act):
    """Calls ``act`` once step 3 generates beside its updates, or updates: both begin with that version."""
    done = []

    def generate(self, requests, sampling, original=LocalEngine.generate):
        for group in original(self, requests, sampling):
            if self._version == version and len(requests[0].seeds) != 2 and not done:
                done.append(1)
                act()
            yield group

    def make(*args, original=session.make_train_step):
        step = original(*args)

        def update(state, batch):
            if int(state.updates) == version and not done:
                done.append(1)
                act()
            return step(state, batch)

        return update

    if where == "generation":
        patch.setattr(LocalEngine, "generate", generate)
    else:
        patch.setattr(session, "make_train_step", make)


@pytest.mark.parametrize("where", ["generation", "updates"])
def test_an_error_on_either_side_ends_the_run_with_its_own_words(reference, tmp_path, monkeypatch, where):
    def fail():
        raise OSError("the machine room is on fire")

    with monkeypatch.context() as patch:
        once_at_version(patch, 2 * UPDATES, where, fail)
        with pytest.raises(OSError, match="on fire"):
            train.run(law(reference[0]), tmp_path / "run")
    assert not [t for t in threading.enumerate() if t.name.startswith("next-step")]
    train.run(law(reference[0]), tmp_path / "run")
    same(tmp_path / "run", reference[0] / "run")


def test_work_in_the_background_is_given_up_when_the_body_fails():
    ended = []

    def work(check):
        try:
            while True:
                check()
        finally:
            ended.append(1)

    with pytest.raises(KeyError), overlap.background(work):
        raise KeyError
    assert ended


def test_samples_of_other_weights_stop_the_run(tmp_path, monkeypatch):
    def sample(self, row, original=local._Session._sample):
        out = original(self, row)
        out.weight_version -= self.e._version > 0
        return out

    monkeypatch.setattr(local._Session, "_sample", sample)
    with pytest.raises(RuntimeError, match=r"should all be of weights 2 but are also of \{1\}"):
        train.run(law(tmp_path), tmp_path / "run")


def test_with_learning_rate_0_it_is_the_run_without_overlap(tmp_path):
    changes = {"optim.lr": 0.0, "algo.updates_per_step": 1, "eval.every": 0, "train.steps": 4}
    for name, on in (("on", True), ("off", False)):
        train.run(law(tmp_path, **changes, **{"rollout.overlap": on}), tmp_path / name)
    rows = (tiny_runs.metrics(tmp_path / name)[1:] for name in ("on", "off"))
    for row, other in zip(*rows, strict=True):
        step = row["step"]
        timed = {k for k in {*row, *other} if k.startswith(TIMED)}
        assert {k: v for k, v in row.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
        ours, theirs = ([drop(s) for s in tiny_runs.rollouts(tmp_path / name, step)] for name in ("on", "off"))
        assert ours == theirs


def drop(row):
    return {k: v for k, v in row.items() if k != "weight_version"}


def test_importance_weights_are_those_of_the_formula(tmp_path, monkeypatch):
    """Step 3 by hand: trained with w2, drawn from w1; every weight is cut at 1, so about half of them are."""
    seen = []

    def make(*args, original=session.make_train_step):
        step, score = original(*args), session.make_score(args[0], args[2])

        def update(state, batch):
            if int(state.updates) < 3:
                seen.append((np.asarray(score(state.params, batch)), jax.device_get(batch)))
            return step(state, batch)

        return update

    monkeypatch.setattr(session, "make_train_step", make)
    changes = {"algo.updates_per_step": 1, "algo.mismatch.high": 1.0, "filter.oversample": 1.0, "algo.kl.coef": 0.0}
    train.run(law(tmp_path, **changes, **{"train.steps": 4, "eval.every": 0}), tmp_path / "run")
    present, batch = seen[2]
    mask = batch.mask
    weights = np.exp(present.astype(np.float64) - batch.rollout_logp)[mask]
    assert 0.2 < (weights > 1).mean() < 0.8 and np.abs(weights - 1).max() > 0.01
    loss = -(np.minimum(weights, 1.0) * batch.advantages[mask]).mean()  # the ratio is 1: only update of its step
    row = tiny_runs.metrics(tmp_path / "run")[3]
    assert row["step"] == 3 and row["loss/policy"] == pytest.approx(loss, rel=1e-4)
    assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert row["mismatch/mean"] == pytest.approx(np.abs(np.log(weights)).mean(), rel=1e-3)
    assert row["mismatch/ess"] == pytest.approx(weights.sum() ** 2 / (weights.size * (weights**2).sum()), rel=1e-3)


def test_it_learns(tmp_path):
    changes = {"rollout.n": 32, "rollout.overlap": True, "algo.mismatch.kind": "tis", "filter.dynamic": False}
    changes |= {"optim.lr": 2e-2, "optim.base_samples": 128, "batch.rows": 32, "train.steps": 10}
    c = tiny_runs.config(tmp_path, **changes, **{"rollout.local.rows": 128, "log.rollouts": False})
    c.data.train.small.verifier = "even_start"
    train.run(c, tmp_path / "run")
    rewards = [r["reward/mean"] for r in tiny_runs.metrics(tmp_path / "run") if r["step"]]
    # 256 samples on either side: three standard errors of the difference
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.13, rewards


def test_a_step_collected_ahead_survives_its_record():
    def group(i):
        sample = Sample(0, i, np.array([i]), np.array([0.0]), Finish.STOP, 3, status=Status.OK, reward=1.0)
        return Group(Prompt(f"p/{i}", np.array([i]), "", "", "exact", "p"), [sample])

    old, *new = (group(i) for i in range(4))
    made = collect.Collected(
        kept=[old, new[1]], carried=[new[2]], judged=[(new[0], "all_zero"), (new[1], "kept"), (new[2], "kept")],
        rounds=2, starved=False,
    )  # fmt: skip
    groups, record = overlap.to_record(made)
    assert len(groups) == 4
    assert overlap.from_record(groups, json.loads(json.dumps(record))) == made
    assert made.version == 3 and collect.Collected([], [], [], 0, True).version == -1


def test_it_needs_a_correction(tmp_path):
    c = law(tmp_path, **{"algo.mismatch.kind": "none"})
    with pytest.raises(ConfigError, match=r"rollout\.overlap = True: .*need a correction"):
        config_checks._check_algorithm(c)


def test_an_engine_that_looks_for_signals_itself_leaves_a_checkpoint_to_begin_from(tmp_path, monkeypatch):
    """Its generation is lost; the step that was updating is not, and the next draws from its own weights."""
    with monkeypatch.context() as patch:

        def stop():
            os.kill(os.getpid(), signal.SIGTERM)
            raise Interrupted(signal.SIGTERM)

        once_at_version(patch, 2 * UPDATES, "generation", stop)
        with pytest.raises(SystemExit):
            train.run(law(tmp_path), tmp_path / "run")
    train.run(law(tmp_path), tmp_path / "run")
    rows = tiny_runs.metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    drawn = [{s["weight_version"] for s in tiny_runs.rollouts(tmp_path / "run", step)} for step in range(1, STEPS + 1)]
    assert [max(versions) for versions in drawn] == [0, 0, 2, 6, 6, 8]  # step 4 begins anew


def test_servers_are_given_weights_between_generations(tmp_path):
    """They refuse others. Learning rate 0, since the fake knows models of one kind only."""
    train_tokenizer(["say 10"], cases.VOCAB, tmp_path / "tokenizer")
    hf.save_pretrained(tmp_path / "model", cases.QWEN3, cases.table_weights(), tmp_path / "tokenizer")
    changes = {"rollout.engine": "sglang", "model.path": str(tmp_path / "model"), "optim.lr": 0.0, "eval.every": 0}
    changes |= {"rollout.sglang.weights_dir": str(tmp_path / "weights"), "data.max_prompt_tokens": 24}
    changes |= {"algo.kl.coef": 0.0, "algo.updates_per_step": 1, "filter.dynamic": False, "train.steps": 4}
    with cases.FakeServer(cases.boot_directory(tmp_path / "boot"), context=cases.CONTEXT) as server:
        c = law(tmp_path, **changes, **{"filter.oversample": 1.0, "rollout.sglang.urls": (server.url,)})
        train.run(c, tmp_path / "run")
        assert server.calls.count("/update_weights_from_disk") == 5  # at the start, after every step
    for row in tiny_runs.metrics(tmp_path / "run")[1:]:
        samples = tiny_runs.rollouts(tmp_path / "run", row["step"])
        assert {s["weight_version"] for s in samples} == {max(row["step"] - 2, 0)} and len(samples) == 16
        assert row["mismatch/mean"] < 1e-4 and row.get("overlap/staleness", 1) == (row["step"] > 1)
