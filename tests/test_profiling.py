"""What a trace holds, which steps it is of, and how fast updates are said to be."""

import gzip
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_cases import QWEN2, objective, packed, prompt, random_groups, sample

from brorl_jax import profiling, throughput, train
from brorl_jax.data.packing import Layout
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Stop
from brorl_jax.learner import state
from brorl_jax.learner.optim import make_optimizer
from brorl_jax.learner.step import Compute, make_train_step
from brorl_jax.models import transformer
from brorl_jax.types import Group, Status


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    tiny_runs.keep_programs(monkeypatch)


def events(workdir):
    """Complete events of the one trace, as Perfetto reads them."""
    (file,) = (workdir / "profile" / "plugins" / "profile").glob("*/perfetto_trace.json.gz")
    assert list(file.parent.glob("*.xplane.pb"))  # as XProf does
    return [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]


def traced(found):
    return [int(e["args"]["step_num"]) for e in found if e["name"] == "step"]


def test_a_trace_holds_the_steps_asked_for_with_their_phases(tmp_path):
    c = tiny_runs.config(tmp_path, **{"train.steps": 4, "log.rollouts": False})
    train.run(c, tmp_path / "run", profile=range(2, 4))
    found = events(tmp_path / "run")
    assert sorted(traced(found)) == [2, 3]
    for phase in ("rollout", "reward", "pack", "score", "update", "publish", "checkpoint"):
        assert sum(e["name"] == phase for e in found) >= 2
    steps, updates = ([e for e in found if e["name"] == name] for name in ("step", "update"))
    for step, update in zip(*(sorted(es, key=lambda e: e["ts"]) for es in (steps, updates)), strict=True):
        assert step["ts"] <= update["ts"] and update["ts"] + update["dur"] <= step["ts"] + step["dur"]


def test_a_run_that_ends_in_a_traced_step_leaves_its_trace(tmp_path, monkeypatch):
    pending = property(lambda _: 15 * (tmp_path / "run" / "metrics.jsonl").exists())
    monkeypatch.setattr(Stop, "pending", pending)
    c = tiny_runs.config(tmp_path, **{"data.eval": {}, "log.rollouts": False})
    with pytest.raises(SystemExit):
        train.run(c, tmp_path / "run", profile=range(1, 4))
    assert traced(events(tmp_path / "run")) == [1]


def test_parts_of_the_update_are_named_in_the_program():
    layout = Layout(1, 2, 8)
    batch = packed(random_groups([2]), layout)
    optimizer = make_optimizer(1e-3, warmup_steps=0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
    like = jax.eval_shape(lambda: state.create(transformer.init(jax.random.key(0), QWEN2), optimizer, reference=False))
    program = make_train_step(QWEN2, objective(), Compute(), optimizer).lower(like, batch).as_text(debug_info=True)
    for scope in ("attention", "mlp", "head", "loss", "optimizer"):
        assert re.search(rf'["/(]{scope}[)/]', program), scope
    assert "transpose(jvp(head))" in program  # its backward pass is written by hand


@pytest.mark.parametrize(("text", "steps"), [("", []), ("3", [3]), ("3:5", [3, 4, 5]), ("1:9", range(1, 10))])
def test_steps_are_read_from_the_flag(text, steps):
    assert list(profiling.parse(text, 9)) == list(steps)


@pytest.mark.parametrize("text", ["0", "5:3", "10", "3:10", "-1", "3:", ":3", "3-5", "last", "1.5"])
def test_other_steps_are_refused_in_one_line(text):
    with pytest.raises(UserError, match=f"--profile={text}: ") as refused:
        profiling.parse(text, 9)
    assert "\n" not in str(refused.value)


def test_speed_of_updates_by_hand():
    """Two devices, two seconds; a prompt of three tokens with responses of one and two, and one that was aborted."""
    groups = [Group(prompt("p", [5, 6, 7]), [sample([1]), sample([1, 2]), sample([3], status=Status.ABORTED)])]
    layers = 2 * (16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24)  # q, k and v, o, gate and up and down
    head, pairs = 16 * 53, (1 + 2) + 3 + (3 + 4)
    flops = 3 * (2 * layers * 5 + 2 * head * 3 + 4 * 2 * 24 * pairs)

    def mesh(kind) -> Any:
        return SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind)] * 2), size=2)

    on_cpu = {"throughput/update_tokens_per_s": 1.5, "throughput/update_flops_per_s": flops / 2}
    assert throughput.of_updates(QWEN2, groups, 2.0, mesh("cpu")) == pytest.approx(on_cpu)
    on_gpu = on_cpu | {"throughput/mfu": flops / (2 * 2 * 989.5e12)}
    assert throughput.of_updates(QWEN2, groups, 2.0, mesh("NVIDIA H200")) == pytest.approx(on_gpu)
    assert throughput.of_updates(QWEN2, [], 2.0, mesh("NVIDIA H200")) == {}
