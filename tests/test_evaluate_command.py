"""The evaluation command: a checkpoint scored as training scored it, interrupted and completed, compared."""

from __future__ import annotations

import json

import pytest
import tiny_runs

from brorl_jax import compare, evaluate, train
from brorl_jax.errors import UserError
from brorl_jax.evaluate import standalone


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, workdir) of a run with a checkpoint and an evaluation at steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_runs.config(folder, train__steps=2, eval__every=1, eval__samples=4, checkpoint__every=1)
    config.data.eval.held.heading = "small"
    train.run(config, folder / "run")
    return config, folder / "run"


class Enough(BaseException):
    """Stands for a kill."""


def after(calls):
    """A check that kills at its ``calls``-th call."""
    left = iter(range(calls - 1))

    def check():
        if next(left, None) is None:
            raise Enough

    return check


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_scores_what_training_measured(trained, step, tmp_path):
    config, workdir = trained
    path = standalone.run(config, (workdir, str(step)), tmp_path / "out")
    during = json.loads((workdir / "eval" / f"step_{step:06d}.json").read_text())
    assert json.loads(path.read_text()) == during["metrics"]
    assert [r.to_json() for r in sorted(evaluate.read(tmp_path / "out"), key=lambda r: r.prompt_id)] == during[
        "prompts"
    ]
    table = (tmp_path / "out" / "scores.md").read_text()
    assert table.splitlines()[0].startswith("| benchmark | prompts | pass@1 | stderr | pass@4 |")
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["held", "**small**", "**all**"]


def test_an_exported_model_scores_like_its_checkpoint(trained, tmp_path):
    config, workdir = trained
    from_checkpoint = standalone.run(config, (workdir, "last"), tmp_path / "a").read_text()
    exported = config.copy_and_resolve_references()
    exported.model.path = str(workdir / "model")
    assert standalone.run(exported, None, tmp_path / "b").read_text() == from_checkpoint


def test_a_killed_evaluation_keeps_what_was_finished_and_is_completed(trained, tmp_path, monkeypatch):
    config, workdir = trained
    whole = standalone.run(config, (workdir, "last"), tmp_path / "whole").read_text()
    out = tmp_path / "out"
    config = config.copy_and_resolve_references()
    config.rollout.local.rows = 4  # one prompt after the other
    with pytest.raises(Enough):
        standalone.run(config, (workdir, "last"), out, after(3))
    kept = (out / "prompts.jsonl").read_text()
    done = [json.loads(line)["prompt_id"] for line in kept.splitlines()]
    assert 1 <= len(done) < 3
    with open(out / "prompts.jsonl", "a") as file:
        file.write('{"prompt_id": "held/')  # as a kill in mid-write leaves it
    asked = []
    original = evaluate.request
    monkeypatch.setattr(evaluate, "request", lambda p, *a, **k: asked.append(p.id) or original(p, *a, **k))
    assert standalone.run(config, (workdir, "last"), out).read_text() == whole
    assert set(asked).isdisjoint(done) and len(asked) == 3 - len(done)
    assert (out / "prompts.jsonl").read_text().startswith(kept)
    asked.clear()
    assert standalone.run(config, (workdir, "last"), out).read_text() == whole  # nothing is left to do
    assert asked == []


def test_results_of_another_evaluation_are_not_mixed_in(trained, tmp_path):
    config, workdir = trained
    standalone.run(config, (workdir, "last"), tmp_path)
    config = config.copy_and_resolve_references()
    config.eval.temperature = 0.25
    with pytest.raises(UserError, match=r"holds an evaluation with another eval\.temperature; choose another --out"):
        standalone.run(config, (workdir, "last"), tmp_path)
    with pytest.raises(UserError, match=r"another eval\.temperature, step"):
        standalone.run(config, (workdir, "1"), tmp_path)


def test_a_step_without_checkpoint_is_named(trained, tmp_path):
    config, workdir = trained
    with pytest.raises(UserError, match=r"no checkpoint --step=7; there are: .*1, 2"):
        standalone.run(config, (workdir, "7"), tmp_path)
    with pytest.raises(UserError, match="empty has no checkpoints; give the --workdir of a run"):
        standalone.run(config, (tmp_path / "empty", "last"), tmp_path)


def test_a_model_of_another_shape_is_refused(trained, tmp_path):
    config, workdir = trained
    config = config.copy_and_resolve_references()
    config.model.new.hidden = 32
    with pytest.raises(UserError, match=r"cannot read checkpoint 2 of .*: .*params/"):
        standalone.run(config, (workdir, "last"), tmp_path)


def test_two_evaluations_side_by_side(tmp_path, capsys):
    for name, rewards in (("a", (0.0, 0.5, 0.25)), ("b", (0.5, 0.5, 0.5))):
        (tmp_path / name).mkdir()
        rows = [
            {"prompt_id": f"m/{i}", "source": "m", "rewards": [r], "lengths": [1], "finish": ["stop"]}
            for i, r in enumerate(rewards)
        ]
        (tmp_path / name / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| m | 3 | 25.00 | 50.00 | +25.00 | +0.00 to +50.00 | 1.73 | 0.11 |")
    assert table[3].startswith("| all | 3 |")
    assert compare.main([str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "holds no evaluation" in capsys.readouterr().err


ROW = {"prompt_id": "m/0", "source": "m", "rewards": [0.5, None], "lengths": [1, 2], "finish": ["stop", "abort"]}
NO_EVALUATION = {
    "another file": ("prompts.jsonl", {"a": 1}),
    "another object": ("eval/step_000001.json", {}),
    "id": ("prompts.jsonl", ROW | {"prompt_id": 3}),
    "source": ("prompts.jsonl", ROW | {"source": ["m"]}),
    "a field more": ("prompts.jsonl", ROW | {"passed": 1}),
    "rewards in words": ("prompts.jsonl", ROW | {"rewards": "no"}),
    "a reward in words": ("prompts.jsonl", ROW | {"rewards": ["1", None]}),
    "a reward above 1": ("prompts.jsonl", ROW | {"rewards": [1.5, None]}),
    "a reward that is none": ("prompts.jsonl", ROW | {"rewards": [float("nan"), None]}),
    "a sample less": ("prompts.jsonl", ROW | {"lengths": [1]}),
    "a negative length": ("prompts.jsonl", ROW | {"lengths": [1, -1]}),
    "another end": ("prompts.jsonl", ROW | {"finish": ["stop", None]}),
    "not a list of rows": ("eval/step_000001.json", {"prompts": [[ROW]]}),
}


@pytest.mark.parametrize(("name", "content"), NO_EVALUATION.values(), ids=NO_EVALUATION)
def test_files_that_are_no_evaluation_are_named(tmp_path, capsys, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(json.dumps(content))
    assert compare.main([str(tmp_path), str(tmp_path)]) == 2
    assert f"{tmp_path / name} is not what an evaluation writes" in capsys.readouterr().err


def test_a_folder_without_checkpoints_is_named_and_stays_as_it_is(tmp_path):
    with pytest.raises(UserError, match="nowhere has no checkpoints"):
        standalone.run(tiny_runs.config(tmp_path / "data"), (tmp_path / "nowhere", "last"))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["evaluation.json", "prompts.jsonl"])
def test_results_that_can_not_be_read_are_named(trained, tmp_path, name):
    config, workdir = trained
    (tmp_path / name).write_text('[{"a": 1}]' if name == "evaluation.json" else '{"a": 1}\n')
    with pytest.raises(UserError, match=name):
        standalone.run(config, (workdir, "last"), tmp_path)
