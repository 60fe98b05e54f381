"""The whole package against real servers: parity with the embedded engine, and runs that train, die and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sglang_cases as cases
import tiny_runs
from scipy import stats

from brorl_jax.data.tokenizer import train_tokenizer
from brorl_jax.models import hf, transformer
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.rollout.sglang import weights

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
FAMILIES = {"qwen3": cases.QWEN3, "llama": cases.LLAMA}
STEPS = 8


@pytest.fixture(params=FAMILIES)
def family(request):
    """(model, its running server)."""
    return FAMILIES[request.param], request.getfixturevalue(f"real_{request.param}")


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def engines(family, tmp_path):
    """The same weights in a server and in the embedded engine."""
    cfg, server = family
    params = cases.random_weights(cfg, seed=5)
    local = LocalEngine(cfg, rows=64, chunk=8)
    local.publish(params, 3)
    with cases.engine([server.spec.url], tmp_path / "weights", cfg, start_timeout_s=600.0) as remote:
        remote.publish(params, 3)
        yield remote, local


def by_prompt(engine, wanted, sampling):
    return {g.prompt.id: g.samples for g in engine.generate(wanted, sampling)}


def test_greedy_answers_are_the_embedded_engines(engines):
    wanted, greedy = cases.requests(8, 1, length=12), cases.sampling(max_tokens=24, temperature=0.0)
    theirs, ours = (by_prompt(e, wanted, greedy) for e in engines)
    for name in ours:
        [a], [b] = theirs[name], ours[name]
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-4)
        assert a.finish is b.finish


def test_sampled_first_tokens_are_of_one_distribution(engines):
    wanted, n = cases.requests(1, 800), 800
    once = cases.sampling(max_tokens=1, temperature=1.2)
    counts = []
    for engine in engines:
        [samples] = by_prompt(engine, wanted, once).values()
        counts.append(np.bincount([s.tokens[0] for s in samples], minlength=cases.VOCAB))
    table = np.array(counts)
    often = table.sum(0) >= 10  # the usual condition; the rest are one class
    table = np.column_stack([table[:, often], table[:, ~often].sum(1)])
    assert often.sum() >= 10 and table.sum() == 2 * n
    assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-4


# --- a real router ---------------------------------------------------------------------------------------------------


@pytest.fixture
def router(real_qwen3, tmp_path):
    """(its address, its one server's), once it knows the server."""
    port, metrics, log = cases.free_port(), cases.free_port(), tmp_path / "router.log"
    command = [cases.sglang_python(), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics, "--worker-urls", real_qwen3.spec.url]
    with log.open("wb") as out:
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=subprocess.STDOUT)

    def known():
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5) as answer:
                return json.load(answer)["workers"]
        except OSError:
            return []

    try:
        cases.wait_for(known, "the router to know its server", timeout=600.0)
        yield f"http://127.0.0.1:{port}", real_qwen3.spec.url
    finally:
        process.kill()
        process.wait()


def test_a_router_is_asked_for_its_servers_which_are_then_called_directly(router, tmp_path):
    at, server = router
    params, wanted = cases.random_weights(cases.QWEN3, seed=5), cases.requests(2, 4)
    with cases.engine((), tmp_path / "weights", router=at, start_timeout_s=600.0) as engine:
        engine.publish(params, 4)  # the router has no route for this
        groups = list(engine.generate(wanted, cases.sampling()))
        assert [w.url for w in engine._pool.workers] == [server]
    assert {s.weight_version for g in groups for s in g.samples} == {4} and len(groups) == 2


# --- runs ------------------------------------------------------------------------------------------------------------


def write_config(folder, cfg, sglang):
    """A config file: a random model learns to start its answers with a character of even code."""
    tiny_runs.write_tables(folder)
    train_tokenizer(["say 10"], cases.VOCAB, folder / "tokenizer")
    params = transformer.init(jax.random.key(1), cfg, jnp.float32)
    hf.save_pretrained(folder / "model", cfg, params, folder / "tokenizer")
    file = folder / "config.py"
    file.write_text(f"""
from brorl_jax.config import default, source

def get_config():
    c = default()
    c.model.path = {str(folder / "model")!r}
    c.grading.plugins = ("sglang_task",)
    c.data.train.small = source("jsonl", path={str(folder / "train.jsonl")!r}, verifier="even_start")
    c.data.max_prompt_tokens = 24
    c.rollout.engine = "sglang"
    c.rollout.sglang.start_timeout_s = 600.0
    c.rollout.update(prompts_per_step=4, n=32, max_tokens=8, stop_ids=tuple(range(3, 60)))
    c.rollout.sglang.launch.update({sglang.pop("launch", {})!r})
    c.rollout.sglang.update({sglang!r})
    c.filter.dynamic = False
    c.algo.updates_per_step = 1
    c.algo.kl.coef = 0.0
    c.algo.mismatch.stop_above = 1e-3
    c.optim.update(lr=5e-2, base_samples=128)
    c.batch.update(slots=4, rows=32, row_tokens=8)
    c.train.steps = {STEPS}
    c.checkpoint.every = 1
    c.log.tensorboard = False
    return c
""")
    return file


def start(config, workdir):
    command = [sys.executable, "-m", "brorl_jax.main", f"--config={config}", f"--workdir={workdir}"]
    path = f"{cases.REPO}:{cases.REPO / 'tests' / 'helpers'}"
    log = (config.parent / "log").open("ab")
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)


def steps_done(workdir):
    file = workdir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_steps(run, workdir, steps):
    cases.wait_for(lambda: steps_done(workdir) >= steps or run.poll() is not None, f"step {steps}", 600.0)
    assert run.poll() is None, (workdir.parent / "log").read_text()[-2000:]


def finish(run, workdir):
    assert run.wait(600) == 0, (workdir.parent / "log").read_text()[-2000:]


def check_run(workdir):
    """Learnt, every step there once, every version exact, engine and trainer of one mind; returns the metrics."""
    rows = tiny_runs.metrics(workdir)
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    for row in rows:
        samples = tiny_runs.rollouts(workdir, row["step"])
        assert {s["weight_version"] for s in samples} == {row["step"] - 1}
        assert row["mismatch/mean"] < 1e-4 and row["mismatch/ess"] > 0.999
        asked = row["engine/delivered"] + row["engine/dropped"]
        assert row["engine/requested"] == asked == len(samples) and row["engine/dropped"] == 0
        assert row["engine/publish_bytes"] > 0 and row["engine/servers"] == 1
        assert len({(s["prompt_id"], s["seed"]) for s in samples}) == len(samples)
    rewards = [r["reward/mean"] for r in rows]
    # 256 samples on either side, so 0.1 is three standard errors of the difference. A server's answers vary from run to
    # run; with the embedded engine the same run rises by 0.4 to 0.8 (three seeds of each family).
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1, rewards
    return rows


def test_a_run_learns_and_goes_on_after_the_trainer_was_killed(family, tmp_path):
    cfg, server = family
    config, workdir = write_config(tmp_path, cfg, {"urls": (server.spec.url,)}), tmp_path / "run"
    run = start(config, workdir)
    try:
        wait_for_steps(run, workdir, 3)
    finally:
        run.kill()
        run.wait()
    assert server.alive()  # not ours to take along
    finish(start(config, workdir), workdir)
    check_run(workdir)
    assert server.answers()  # neither dead nor paused
    assert not weights.default_folder(workdir).exists()
    assert '"engine/cache_hit_rate"' in (workdir / "report.html").read_text()


def test_a_run_starts_its_own_server_and_restarts_it_when_it_is_killed(tmp_path):
    launch = vars(cases.cpu_launch(cases.free_port())) | {"servers": 1}
    config, workdir = write_config(tmp_path, cases.QWEN3, {"launch": launch}), tmp_path / "run"
    run = start(config, workdir)
    try:
        wait_for_steps(run, workdir, 2)
        [guard] = [p for p in children(run.pid) if "guard.py" in command_of(p)]
        [server] = children(guard)
        os.kill(server, signal.SIGKILL)
        finish(run, workdir)
    finally:
        run.kill()
        run.wait()
    rows = check_run(workdir)
    assert sum(r["engine/restarts"] for r in rows) == sum(r["engine/deaths"] for r in rows) == 1
    assert not Path(f"/proc/{guard}").exists()


def children(pid):
    """By what every process says of its parent: lists kept by thread lose those of a thread that just ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            parent = stat.read_text().rsplit(")", 1)[1].split()[1]
            found += [int(stat.parent.name)] * (int(parent) == pid)
    return found


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()
