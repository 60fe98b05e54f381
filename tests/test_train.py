"""Whole runs of a tiny model: what each step does and records, and what ends a run."""

import json
import math
import shutil
import threading

import jax
import numpy as np
import pytest
import tiny_runs

from brorl_jax import assemble, batches, collect, metrics, session, train
from brorl_jax import config as config_lib
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.errors import UserError
from brorl_jax.models import hf
from brorl_jax.rollout import local
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Status

STEPS = 4


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    tiny_runs.keep_programs(monkeypatch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of four steps with everything on."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.keep_programs(patch)
        before = {t for t in threading.enumerate() if not t.daemon}
        train.run(everything(folder), folder / "run")
        left = {t for t in threading.enumerate() if not t.daemon} - before
    assert not left  # a thread that outlives its run keeps the process from ending
    return folder


def everything(folder, prompts=tiny_runs.PROMPTS, **changes):
    """One update a step, a reference policy, evaluations, diagnostics."""
    always = {"algo.kl.coef": 1e-2, "eval.every": 2, "eval.samples": 2, "diagnostics.mass_balance_every": 2}
    changes = {**always, "diagnostics.min_visits": 2, **changes}
    return tiny_runs.config(folder, prompts, **changes)


def words(text):
    return text.split()


def same_metrics(ours, theirs):
    """The rows of two runs, what is timed left out."""

    def untimed(row):
        return {k: v for k, v in row.items() if not k.startswith(("time", "throughput/", "memory/"))}

    assert [untimed(r) for r in tiny_runs.metrics(ours)] == [untimed(r) for r in tiny_runs.metrics(theirs)]


# As README and report know them; a loss with clipping and a run with KL fill all of them.
EVERY_STEP = words(
    """
    reward/mean reward/shaped
    source/small/groups source/small/trained source/small/reward source/small/right source/small/kept
    source/small/length
    groups/generated groups/kept groups/pass_rate groups/all_zero groups/all_one groups/all_equal groups/too_few_valid
    groups/informative groups/trained groups/carried_in groups/carried groups/rounds groups/starved
    samples/generated samples/trained samples/truncated samples/aborted samples/grader_error samples/duplicate_rate
    tokens/generated length/mean length/max length/truncated_rate
    batch/tokens batch/sequences loss/total loss/policy loss/kl
    policy/entropy policy/ratio_mean policy/ratio_max policy/clip_low policy/clip_high policy/kl_ref
    mismatch/mean mismatch/max mismatch/p99 mismatch/kl mismatch/ess
    optim/grad_norm optim/lr optim/skipped reference/reset
    time/rollout_s time/reward_s time/pack_s time/score_s time/update_s time/publish_s time/step_s
    throughput/samples_per_s throughput/tokens_per_s throughput/update_tokens_per_s throughput/update_flops_per_s
    memory/rss_gib
"""
)


def test_every_step_records_every_figure(plain):
    rows = tiny_runs.metrics(plain / "run")
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        missing = [key for key in EVERY_STEP if row.get(key) is None]
        assert not missing
    for step in (0, 2, 4):
        for key in ("eval/held/pass@1", "eval/held/length", "eval/pass@1", "eval/length"):
            assert rows[step][key] is not None
    assert all("time/checkpoint_s" in r for r in rows[2:])  # of the step before: it is written after the row


def test_mass_balance_is_logged_at_the_steps_asked_for(plain):
    rows = tiny_runs.metrics(plain / "run")
    logged = [{k: v for k, v in row.items() if k.startswith("mass_balance/")} for row in rows]
    assert [row["step"] for row in rows if "time/diagnose_s" in row] == [1, 3]
    assert [row["step"] for row, figures in zip(rows, logged, strict=True) if figures] == [1, 3]
    for figures in (logged[1], logged[3]):
        assert {"mass_balance/unsampled", "mass_balance/unsampled_2", "mass_balance/sign_certain"} <= figures.keys()
        assert all(map(math.isfinite, figures.values()))
        assert 0 < figures["mass_balance/unsampled_root"] < 1  # 4 of 300 tokens, from new weights


def test_figures_of_a_step_agree_with_its_rollouts(plain):
    for step, row in enumerate(tiny_runs.metrics(plain / "run")[1:], 1):
        samples = tiny_runs.rollouts(plain / "run", step)
        trained = [s for s in samples if s["outcome"] == "trained"]
        assert len(samples) == row["samples/generated"] == 4 * row["groups/generated"]
        assert len(trained) == row["samples/trained"] == row["batch/sequences"] == 16
        assert sum(s["n_tokens"] for s in samples) == row["tokens/generated"]
        assert sum(s["n_tokens"] for s in trained) == row["batch/tokens"]
        assert np.mean([s["reward"] for s in samples]) == pytest.approx(row["reward/mean"])
        assert {s["weight_version"] for s in samples} == {step - 1}
        assert len({s["seed"] for s in samples}) == len(samples)
        weighted = sum(s["advantage"] * s["n_tokens"] for s in trained)
        assert weighted == pytest.approx(0, abs=1e-3)  # normalised over tokens
        for prompt in {s["prompt_id"] for s in trained}:
            rewards = [s["reward"] for s in trained if s["prompt_id"] == prompt]
            assert max(rewards) != min(rewards)
        assert row["throughput/samples_per_s"] == pytest.approx(len(samples) / row["time/step_s"])
        speed = row["batch/tokens"] / row["time/update_s"]
        assert row["throughput/update_tokens_per_s"] == pytest.approx(speed)
        assert 0.01 < row["memory/rss_gib"] < 64


def test_only_update_of_a_step_has_ratio_one_and_engine_and_trainer_agree(plain):
    rows = tiny_runs.metrics(plain / "run")[1:]
    assert all(r["policy/ratio_mean"] == pytest.approx(1, abs=1e-6) for r in rows)
    assert all(r["mismatch/mean"] < 1e-6 and r["mismatch/max"] < 1e-5 for r in rows)
    assert rows[0]["policy/kl_ref"] == 0 and all(r["policy/kl_ref"] > 0 for r in rows[1:])
    assert all(r["optim/lr"] == pytest.approx(1e-2) and r["optim/grad_norm"] > 0 for r in rows)


def test_groups_carried_over_are_not_taken_for_a_drifting_engine(tmp_path):
    train.run(everything(tmp_path, **{"filter.oversample": 2.0, "train.steps": 5}), tmp_path / "run")
    rows = tiny_runs.metrics(tmp_path / "run")[1:]
    ages = set()
    for step, row in enumerate(rows, 1):
        trained = [s for s in tiny_runs.rollouts(tmp_path / "run", step) if s["outcome"] == "trained"]
        stale = [s for s in trained if s["weight_version"] < step - 1]
        ages |= {step - 1 - s["weight_version"] for s in trained}
        assert len(stale) == 4 * row["groups/carried_in"] and row["groups/trained"] == 4
        assert row["mismatch/max"] < 1e-5  # of the others; the policy moves by hundredths of a nat a step
    assert ages == {0, 1} and sum(r["groups/carried_in"] for r in rows) > 2


def test_what_a_run_leaves_behind(plain):
    workdir = plain / "run"
    c = everything(plain)
    assert json.loads((workdir / "config.json").read_text()) == json.loads(config_lib.to_json(c))
    assert sorted(p.name for p in (workdir / "eval").iterdir()) == [f"step_{i:06d}.json" for i in (0, 2, 4)]
    for step in (0, 2, 4):
        evaluation = json.loads((workdir / "eval" / f"step_{step:06d}.json").read_text())
        row = tiny_runs.metrics(workdir)[step]
        assert {k: row[k] for k in evaluation["metrics"]} == evaluation["metrics"]
        assert [len(p["rewards"]) for p in evaluation["prompts"]] == [2, 2, 2]
        assert np.mean([p["rewards"] for p in evaluation["prompts"]]) == pytest.approx(row["eval/pass@1"])
    assert len(list((workdir / "rollouts").glob("*.jsonl.gz"))) == STEPS
    assert "<html" in (workdir / "report.html").read_text()[:500]


def test_exported_model_is_the_trained_one_and_trains_on(plain, tmp_path):
    last = tiny_runs.checkpoint(plain / "run", STEPS)
    cfg, weights = hf.from_pretrained(plain / "run" / "model")
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        np.testing.assert_array_equal(x, last[f"['params']{jax.tree_util.keystr(path)}"])
    assert cfg.vocab_size == 320  # 300 ids, padded
    names = {p.name for p in (plain / "run" / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"} <= names
    c = everything(tmp_path, **{"train.steps": 1, "model.path": str(plain / "run" / "model")})
    train.run(c, tmp_path / "run")
    first = tiny_runs.checkpoint(tmp_path / "run", 0)
    for name in (n for n in first if n.startswith("['params']")):
        np.testing.assert_array_equal(first[name], last[name])
    assert tiny_runs.metrics(tmp_path / "run")[-1]["mismatch/max"] < 1e-5


def test_weights_are_read_once_and_on_a_resume_not_at_all(plain, tmp_path, monkeypatch):
    monkeypatch.undo()  # programs kept from other runs would hide it
    reads = []

    def read(*args, original=hf.from_pretrained):
        reads.append(args[0])
        return original(*args)

    monkeypatch.setattr(hf, "from_pretrained", read)
    changes = {"model.path": str(plain / "run" / "model"), "warmup.steps": 1, "train.steps": 0}
    for _ in range(2):
        with pytest.raises(SystemExit, match="no update was made in 0 steps"):
            train.run(tiny_runs.config(tmp_path, **changes), tmp_path / "run")
    assert reads == [str(plain / "run" / "model")]


def test_a_model_without_its_weights_is_refused_in_one_line(plain, tmp_path):
    model = shutil.copytree(plain / "run" / "model", tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"model.path = {model}: .*safetensors") as refused:
        train.run(tiny_runs.config(tmp_path, **{"model.path": str(model)}), tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_the_same_config_gives_the_same_run_and_another_seed_another(plain, tmp_path):
    train.run(everything(plain), tmp_path / "again")
    tiny_runs.same_run(tmp_path / "again", plain / "run", STEPS)
    train.run(everything(plain, **{"seed": 1, "train.steps": 1}), tmp_path / "other")
    seeds = [{s["seed"] for s in tiny_runs.rollouts(w, 1)} for w in (plain / "run", tmp_path / "other")]
    assert not seeds[0] & seeds[1]


def several(folder, updates, **changes):
    """Several updates a step, importance weights, a learning rate that is scaled and warms up."""
    rate = {"optim.warmup_steps": 3, "optim.lr_rule": "sqrt", "optim.base_samples": 4}
    changes = {"algo.updates_per_step": updates, "algo.mismatch.kind": "tis", **rate, **changes}
    return tiny_runs.config(folder, **changes)


@pytest.mark.parametrize("updates", [2, 4])
def test_several_updates_a_step(tmp_path, updates):
    train.run(several(tmp_path, updates, **{"train.steps": 2}), tmp_path / "run")
    last = tiny_runs.checkpoint(tmp_path / "run", 2)
    assert last["['updates']"] == last["['opt_state'][1][0]['count']"] == 2 * updates
    for step, row in enumerate(tiny_runs.metrics(tmp_path / "run")[1:]):
        assert row["batch/sequences"] == 16 and row["mismatch/max"] < 1e-5
        assert 0 < abs(row["policy/ratio_mean"] - 1) < 0.1  # later updates have moved on
        assert {s["weight_version"] for s in tiny_runs.rollouts(tmp_path / "run", step + 1)} == {step * updates}
        # Four times the base's samples: twice the rate, which is reached with the third update.
        assert row["optim/lr"] == pytest.approx(2e-2 * min(1, (step + 1) * updates / 3))


def only_first_group_is_mixed(monkeypatch):
    """Dynamic sampling keeps one group a round."""

    def rollouts(*args, original=collect.rollouts):
        groups = original(*args)
        for g in groups[1:]:
            for s in g.samples:
                s.reward = 0.0
        groups[0].samples[0].reward, groups[0].samples[1].reward = 0.0, 1.0
        return groups

    monkeypatch.setattr(collect, "rollouts", rollouts)


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_a_starved_step_trains_on_what_there_is(tmp_path, monkeypatch, capsys, updates):
    only_first_group_is_mixed(monkeypatch)
    changes = {"filter.max_generation_batches": 1, "train.steps": 2}
    make = everything(tmp_path, **changes) if updates == 1 else several(tmp_path, updates, **changes)
    train.run(make, tmp_path / "run")
    for row in tiny_runs.metrics(tmp_path / "run")[1:]:
        assert (row["groups/starved"], row["groups/trained"], row["groups/generated"]) == (1, 1, 4)
        assert row["batch/sequences"] == 4
        # One update whatever was planned: on its own weights.
        assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-5) and row["mismatch/max"] < 1e-5
    assert tiny_runs.checkpoint(tmp_path / "run", 2)["['updates']"] == 2
    assert "step 1 is starved: 1 groups kept of 4 generated in 1 rounds (3 all_zero)" in capsys.readouterr().err


def test_a_run_without_any_update_ends_with_an_error(tmp_path, capsys):
    c = everything(tmp_path, **{"filter.max_generation_batches": 2, "train.steps": 2})
    c.data.train.small.verifier = "exact:whole"  # which a random model never satisfies
    with pytest.raises(SystemExit) as ended:
        train.run(c, tmp_path / "run")
    assert "no update was made in 2 steps" in str(ended.value.code)  # a text is status 1
    rows = tiny_runs.metrics(tmp_path / "run")[1:]
    assert [(r["groups/starved"], r["groups/rounds"], r["groups/all_zero"]) for r in rows] == [(1, 2, 8)] * 2
    assert "loss/total" not in rows[0] and rows[0]["reward/mean"] == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_the_first_update_is_checked_even_if_the_first_step_had_none(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(
        batches, "check_first_update", lambda update, dtype: checked.append(float(update["batch/tokens"]))
    )

    def rollouts(engine, *args, original=collect.rollouts, calls=[]):  # noqa: B006
        calls.append(1)
        groups = original(engine, *args)
        if len(calls) <= 2:
            for s in (s for g in groups for s in g.samples):
                s.reward = 0.0
        return groups

    monkeypatch.setattr(collect, "rollouts", rollouts)
    train.run(several(tmp_path, 2, **{"filter.max_generation_batches": 2, "train.steps": 2}), tmp_path / "run")
    rows = tiny_runs.metrics(tmp_path / "run")
    assert rows[1]["groups/trained"] == 0 and rows[2]["groups/trained"] > 1
    assert len(checked) == 1 and 0 < checked[0] < rows[2]["batch/tokens"]


def test_passes_that_disagree_stop_the_run_at_its_first_update(tmp_path, monkeypatch):
    def score(*args, original=session.make_score):
        compiled = original(*args)
        return lambda params, batch: compiled(params, batch) - 0.01

    monkeypatch.setattr(session, "make_score", score)
    with pytest.raises(RuntimeError, match="ratio 1 and KL 0"):
        train.run(several(tmp_path, 2), tmp_path / "run")


def test_reference_resets_by_step_and_keeps_or_forgets_the_moments(tmp_path):
    changes = {"algo.reference.every": 2, "train.steps": 3, "checkpoint.keep": 4, "checkpoint.every": 1}
    train.run(everything(tmp_path, **changes), tmp_path / "keep")
    changes["algo.reference.reset_optimiser"] = True
    train.run(everything(tmp_path, **changes), tmp_path / "forget")
    for name, count in (("keep", 2), ("forget", 0)):
        rows = tiny_runs.metrics(tmp_path / name)
        assert [r["reference/reset"] for r in rows[1:]] == [0, 1, 0] and rows[2]["reference/reset_every"] == 1
        assert [r["policy/kl_ref"] > 0 for r in rows[1:]] == [False, True, False]  # 0 again after the reset
        states = [tiny_runs.checkpoint(tmp_path / name, step) for step in range(4)]
        assert states[2]["['opt_state'][1][0]['count']"] == count
        for leaf in (n.removeprefix("['params']") for n in states[0] if n.startswith("['params']")):
            np.testing.assert_array_equal(states[1][f"['reference']{leaf}"], states[0][f"['params']{leaf}"])
            np.testing.assert_array_equal(states[2][f"['reference']{leaf}"], states[2][f"['params']{leaf}"])
            np.testing.assert_array_equal(states[3][f"['reference']{leaf}"], states[2][f"['params']{leaf}"])
            assert np.any(states[2][f"['opt_state'][1][0]['mu']{leaf}"]) == (count > 0)


def test_reference_resets_on_a_kl_spike_and_on_a_stall(tmp_path, monkeypatch):
    train.run(everything(tmp_path, **{"algo.reference.kl_spike": 1e-12, "train.steps": 3}), tmp_path / "spike")
    rows = tiny_runs.metrics(tmp_path / "spike")[1:]
    assert [r.get("reference/reset_kl_spike") for r in rows] == [None, 1, None]
    monkeypatch.setattr(train, "_evaluate", flat_evaluation)
    train.run(
        everything(tmp_path, **{"algo.reference.stall": 2, "train.steps": 5, "eval.every": 1}), tmp_path / "stall"
    )
    rows = tiny_runs.metrics(tmp_path / "stall")[1:]
    # Evaluated after steps 0, 1, 2, and so known when step 3 ends: two without a new best. Again two steps later.
    assert [r.get("reference/reset_stall") for r in rows] == [None, None, 1, None, None]


def test_a_stalled_run_ends_early_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_evaluate", flat_evaluation)
    c = everything(tmp_path, **{"train.stop_stalled": 2, "train.steps": 9, "eval.every": 1, "checkpoint.every": 0})
    for _ in range(2):  # the second time it is resumed, and there is nothing left to do
        train.run(c, tmp_path / "run")
        assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1, 2]
        assert (tmp_path / "run" / "checkpoints" / "2").is_dir() and (tmp_path / "run" / "model").is_dir()


def flat_evaluation(s, check=None):
    s.evals.append((s.step, 0.5))
    return {"eval/pass@1": 0.5}


@pytest.mark.parametrize("shift", [0.5, math.nan])
def test_an_engine_that_drifts_stops_the_run_with_a_dump(tmp_path, monkeypatch, shift):
    def sample(self, row, original=local._Session._sample):
        out = original(self, row)
        if self.e._version >= 2:
            out.logp = out.logp + np.float32(shift)
        return out

    changes = {"algo.mismatch.stop_above": 0.1, "log.rollouts": False, "checkpoint.every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(local._Session, "_sample", sample)
        with pytest.raises(UserError) as stopped:
            train.run(everything(tmp_path, **changes), tmp_path / "run")
    message = str(stopped.value)
    assert "\n" not in message and "step 3" in message and "stop_above = 0.1" in message
    dump = tmp_path / "run" / "rollouts" / "step_000003.jsonl.gz"
    assert str(dump) in message and len(tiny_runs.rollouts(tmp_path / "run", 3)) >= 16
    dumped = json.loads((tmp_path / "run" / "mismatch_step_000003.json").read_text())
    assert (dumped["metrics"]["mismatch/mean"] or 1.0) > 0.1  # JSON has no NaN
    assert f"sample {dumped['worst'][0]['sample']} of" in message
    assert Checkpointer(tmp_path / "run", keep=2).latest == 2 and "checkpoint is of step 2" in message
    assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1, 2]
    train.run(everything(tmp_path, **changes), tmp_path / "run")  # mended: it goes on
    assert [r["step"] for r in tiny_runs.metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_with_learning_rate_0_nothing_moves(tmp_path):
    train.run(everything(tmp_path, **{"optim.lr": 0.0, "train.steps": 8, "checkpoint.keep": 9}), tmp_path / "run")
    rows = tiny_runs.metrics(tmp_path / "run")[1:]
    assert all(r["mismatch/max"] < 1e-5 and r["policy/kl_ref"] == 0 and r["optim/grad_norm"] > 0 for r in rows)
    start, end = (tiny_runs.checkpoint(tmp_path / "run", step) for step in (0, 8))
    for name in (n for n in start if n.startswith("['params']")):
        np.testing.assert_array_equal(start[name], end[name])


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_never_saved(tmp_path, monkeypatch):
    def setter(config, original=assemble.advantage_setter):
        fill = original(config)

        def filled(groups, step):
            fill(groups, step)
            if step == 1:
                groups[0].samples[0].advantage = math.nan

        return filled

    monkeypatch.setattr(assemble, "advantage_setter", setter)
    changes = {"train.steps": 3, "checkpoint.keep": 4, "checkpoint.every": 1}
    train.run(everything(tmp_path, **changes), tmp_path / "run")
    rows = tiny_runs.metrics(tmp_path / "run")[1:]
    assert [r["optim/skipped"] for r in rows] == [0, 1, 0] and rows[1]["optim/grad_norm"] is None
    states = [tiny_runs.checkpoint(tmp_path / "run", step) for step in (1, 2, 3)]
    for name in states[0]:
        assert np.isfinite(states[1][name]).all() and np.isfinite(states[2][name]).all()
        if name.startswith(("['params']", "['opt_state']")):
            np.testing.assert_array_equal(states[0][name], states[1][name])
    assert (states[1]["['skipped']"], states[1]["['updates']"]) == (1, 2)


def test_trackers_that_fail_do_no_harm(plain, tmp_path, monkeypatch):
    class Broken:
        def __init__(self, *args):
            pass

        def write(self, *args):
            raise OSError("disk full")

        truncate_after = close = write

    monkeypatch.setattr(metrics, "TensorBoard", Broken)
    monkeypatch.setattr(metrics, "WandB", lambda *args: 1 / 0)
    monkeypatch.setattr("brorl_jax.progress.Progress._show", lambda *args: 1 / 0)
    c = everything(plain, **{"log.tensorboard": True, "log.wandb_project": "p"})
    train.run(c, tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", plain / "run", STEPS)


def test_shaping_changes_advantages_but_not_what_is_trained(plain, tmp_path):
    changes = {"shaping.stop_properly": 0.5, "shaping.overlong_buffer": 4, "shaping.overlong_penalty": 1.0}
    train.run(everything(plain, **{**changes, "train.steps": 1}), tmp_path / "run")
    ours, theirs = tiny_runs.rollouts(tmp_path / "run", 1), tiny_runs.rollouts(plain / "run", 1)
    for key in ("prompt_id", "seed", "response", "reward", "outcome"):
        assert [s[key] for s in ours] == [s[key] for s in theirs]
    kept = [s for s in ours if s["outcome"] == "trained"]
    assert any(s["shaped_reward"] != s["reward"] for s in kept)
    assert [s["advantage"] for s in ours] != [s["advantage"] for s in theirs]


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_anew(tmp_path):
    changes = {"train.steps": 1, "filter.dynamic": False}
    train.run(everything(tmp_path, prompts=2, **changes), tmp_path / "run")
    samples = tiny_runs.rollouts(tmp_path / "run", 1)
    assert len({s["prompt_id"] for s in samples}) == 2 and len(samples) == 16
    assert len({s["seed"] for s in samples}) == 16
    assert [s["sample"] for s in samples] == list(range(4)) * 4
    for at in range(0, 16, 4):  # a group is of one prompt
        assert len({s["prompt_id"] for s in samples[at : at + 4]}) == 1


def test_samples_without_a_reward_are_not_trained(tmp_path, monkeypatch):
    def rollouts(*args, original=collect.rollouts):
        groups = original(*args)
        for g in groups:
            g.samples[2].status, g.samples[2].reward = Status.GRADER_ERROR, math.nan
        return groups

    monkeypatch.setattr(collect, "rollouts", rollouts)
    train.run(everything(tmp_path, **{"train.steps": 1}), tmp_path / "run")
    row, samples = tiny_runs.metrics(tmp_path / "run")[1], tiny_runs.rollouts(tmp_path / "run", 1)
    assert row["batch/sequences"] == row["samples/trained"] == 12
    assert row["samples/grader_error"] == row["groups/generated"]
    lost = [s for s in samples if s["sample"] == 2]
    assert {s["advantage"] for s in lost} == {0.0} and {s["reward"] for s in lost} == {None}
    assert sum(s["outcome"] == "excluded: grader_error" for s in lost) == 4


def test_an_engine_that_fails_leaves_a_run_that_resumes(plain, tmp_path, monkeypatch):
    def generate(self, requests, sampling, original=LocalEngine.generate):
        if self._version == 2:
            raise OSError("the machine room is on fire")
        return original(self, requests, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", generate)
        with pytest.raises(OSError, match="on fire"):
            train.run(everything(plain, **{"checkpoint.every": 1}), tmp_path / "run")
    train.run(everything(plain), tmp_path / "run")
    tiny_runs.same_run(tmp_path / "run", plain / "run", STEPS)


def test_fewer_steps_than_are_done_finishes_what_is_there(plain, tmp_path):
    workdir = shutil.copytree(plain / "run", tmp_path / "run")
    train.run(everything(plain, **{"train.steps": 2}), workdir)
    same_metrics(workdir, plain / "run")
    assert Checkpointer(workdir, keep=2).latest == STEPS


def test_grader_that_refuses_gold_answers_stops_the_run_before_it_begins(tmp_path):
    c = tiny_runs.config(tmp_path)
    table = tmp_path / "train.jsonl"
    table.write_text(table.read_text().replace('"answer": "5"', '"answer": "five"'))
    c.data.train.small.verifier = "choice"
    with pytest.raises(UserError, match=r"grader refuses \d+ of 64 gold answers.*'five' names no option"):
        train.run(c, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("part", ["data.train.small.path", "model.path"])
def test_what_is_missing_is_named_in_one_line(tmp_path, part):
    c = tiny_runs.config(tmp_path, **{part: str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="nowhere") as refused:
        train.run(c, tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_a_run_that_was_refused_leaves_no_tokenizer_to_the_next(tmp_path):
    """The next one may have other data or another vocabulary; only a checkpoint belongs to its tokenizer."""

    def tokenizer_in(workdir):
        return assemble.model_and_tokenizer(config_lib.freeze(c), tmp_path / workdir)[1].fingerprint()

    c = tiny_runs.config(tmp_path)
    before = tokenizer_in("run")
    c.data.train.small.prompt = "whisper {question}"
    assert tokenizer_in("run") == tokenizer_in("fresh") != before
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    other = tokenizer_in("run")
    c.data.train.small.prompt = "{question}"
    assert tokenizer_in("run") == other


@pytest.mark.parametrize("resumed", [False, True])
def test_a_refused_run_takes_its_new_tokenizer_along_but_not_a_checkpoints(tmp_path, resumed):
    c = tiny_runs.config(tmp_path)
    if resumed:
        (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    c.data.eval.held.path = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        train.run(c, tmp_path / "run")
    left = ["checkpoints", "tokenizer"] if resumed else []
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == left


def test_a_model_folder_that_holds_other_things_is_named_at_the_end_and_left_alone(tmp_path):
    c = tiny_runs.config(tmp_path, **{"train.steps": 1})
    (tmp_path / "run" / "model").mkdir(parents=True)
    (notes := tmp_path / "run" / "model" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"run is done, its model not exported: .*model holds .*notes\.txt"):
        train.run(c, tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists() and notes.read_text() == "mine"
    notes.unlink()
    train.run(c, tmp_path / "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_missing_warm_up_data_is_named_in_one_line(tmp_path, monkeypatch):
    c = tiny_runs.config(tmp_path, **{"warmup.steps": 1})
    monkeypatch.setattr(assemble, "model_and_tokenizer", lambda _, to, f=assemble.model_and_tokenizer: f(whole, to))
    whole = config_lib.freeze(c.copy_and_resolve_references())  # a tokenizer that is there reads no data
    c.data.warmup.gold.path = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data\.warmup: data source 'gold': no file .*nowhere"):
        train.run(c, tmp_path / "run")
