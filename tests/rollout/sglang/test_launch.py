"""Servers of our own: command lines, process groups that end with their owner, restarts. The fake plays the server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang_cases as cases

from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang import launch, publish
from brorl_jax.rollout.sglang.pool import NoServers

PARAMS = cases.table_weights(seed=1)
STAND_IN = f"""
import asyncio, os, signal, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(cases.REPO / "tests" / "helpers")!r})
value = lambda name: sys.argv[sys.argv.index(name) + 1]
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])  # as a scheduler that hangs
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}\\n")
from fake_sglang import FakeServer
asyncio.run(FakeServer(Path(value("--model-path")), int(value("--port")), context=136).serve())
"""


def section(**changes):
    fields = {"python": sys.executable, "host": "127.0.0.1", "port": cases.free_port(), "tp": 1, "dp": 1, "gpus": ()}
    return SimpleNamespace(**fields | {"mem_fraction": 0.8, "flags": (), "env": ()} | changes)


def specs(tmp_path, servers=1, **changes):
    where = {"model": tmp_path / "boot", "dtype": "bfloat16", "context": 136, "seed": 3, "logs": tmp_path / "logs"}
    return launch.specs(section(**changes), servers, **where)


@pytest.fixture
def stand_in(tmp_path):
    """Makes specs whose ``sglang`` is the fake server with a child that ignores SIGTERM; ``pids()`` lists both."""
    package = tmp_path / "package" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    cases.boot_directory(tmp_path / "boot")
    file = tmp_path / "pids"
    file.touch()
    env = (f"PYTHONPATH={package.parent}", f"PIDS={file}")

    def pids():
        return [int(pid) for pid in file.read_text().split()]

    yield SimpleNamespace(specs=lambda n=1: specs(tmp_path, n, env=env), pids=pids, env=env)
    for pid in pids():  # only where a test failed
        if running(pid):
            os.kill(pid, signal.SIGKILL)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(stand_in):
    cases.wait_for(lambda: not any(running(p) for p in stand_in.pids()), "server and child to end", 10.0)


def value(spec, name):
    return spec.command[spec.command.index(name) + 1]


def test_a_command_line_for_each_server(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/trainer/only")
    monkeypatch.setenv("HOME", "/home/me")
    flags = ("--chunked-prefill-size=8192", "--enable-fp32-lm-head", "--mem-fraction-static=0.5")
    two = specs(tmp_path, 2, tp=2, gpus=(4, 5, 6, 7), flags=flags, env=("NCCL_DEBUG=INFO",), port=30000)
    assert [s.url for s in two] == ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in two] == ["4,5", "6,7"]
    for spec in two:
        assert value(spec, "--tp-size") == "2" and value(spec, "--context-length") == "136"
        assert value(spec, "--chunked-prefill-size") == "8192" and value(spec, "--mem-fraction-static") == "0.5"
        assert spec.command.count("--mem-fraction-static") == 1 and "--enable-fp32-lm-head" in spec.command
        assert value(spec, "--dtype") == "bfloat16" and "--skip-tokenizer-init" in spec.command
        assert "PYTHONPATH" not in spec.env and spec.env["HOME"] == "/home/me" and spec.env["NCCL_DEBUG"] == "INFO"
    assert value(two[0], "--random-seed") != value(two[1], "--random-seed")
    with pytest.raises(UserError, match="3 servers need 6 GPUs"):
        specs(tmp_path, 3, tp=2, gpus=(4, 5, 6, 7))
    with pytest.raises(UserError, match="make sglang-cpu"):
        specs(tmp_path, python="/no/python")


def test_serve_takes_a_device_for_each_of_its_servers_and_no_addresses():
    command = [sys.executable, "-m", "brorl_jax.rollout.serve", "--config=configs/quickstart.py", "--dry_run"]
    command += ["--servers=2", "--config.rollout.engine=sglang", "--config.rollout.sglang.launch.gpus=4,5"]
    command += ["--config.rollout.sglang.urls=('http://a:1',)"]  # the trainer's
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120.0)
    sglang = json.loads(done.stdout)["config"]["rollout"]["sglang"]
    assert (sglang["launch"]["servers"], sglang["launch"]["gpus"], sglang["urls"]) == (2, [4, 5], [])
    done = subprocess.run([*command, "--servers=3"], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 2 and "servers * tp * dp = 3 different device ids" in done.stderr


def test_keys_are_in_a_private_file_not_on_the_command_line(tmp_path, monkeypatch):
    assert launch.write_keys(tmp_path) is None
    monkeypatch.setenv("SGLANG_API_KEY", "open-sesame")
    file = launch.write_keys(tmp_path)
    assert file.read_text() == "api-key: 'open-sesame'\n" and stat.S_IMODE(file.stat().st_mode) == 0o600
    where = {"model": tmp_path, "dtype": "float32", "context": 9, "seed": 0, "logs": tmp_path, "keys": file}
    [spec] = launch.specs(section(), 1, **where)
    assert "sesame" not in " ".join(spec.command) + repr(spec) and "SGLANG_API_KEY" not in spec.env
    assert value(spec, "--config") == str(file)


def test_what_does_not_speak_http_is_no_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def speak():
            with stranger.accept()[0] as line:
                line.recv(1 << 16)
                line.sendall(b"220 mail.example.org ESMTP\r\n")

        [spec] = specs(tmp_path, port=stranger.getsockname()[1])
        thread = threading.Thread(target=speak)
        thread.start()
        assert not launch.Server(spec).answers()
        thread.join()


def test_stopping_ends_the_whole_group_and_nobody_else(stand_in):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "sglang.launch_server"])
    server = launch.Server(stand_in.specs()[0])
    try:
        server.start()
        cases.wait_for(server.answers, "the server to answer")
        assert server.alive() and len(stand_in.pids()) == 2 and all(running(p) for p in stand_in.pids())
        server.stop()
        assert not server.alive()
        gone(stand_in)
        server.stop()  # again does nothing
        assert bystander.poll() is None
    finally:
        server.stop()
        bystander.kill()
        bystander.wait()


OWNER = """
import os, signal, sys, threading, time
from pathlib import Path
from brorl_jax.rollout.sglang import launch
spec = launch.Spec(tuple(sys.argv[3:]), {**os.environ}, "http://127.0.0.1:0", Path(sys.argv[1]))
server = launch.Server(spec)
thread = threading.Thread(target=server.start)  # a thread that ends: its death is not the owner's
thread.start(); thread.join()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_when_their_owner_is_killed(stand_in, tmp_path, signum):
    [spec] = stand_in.specs()
    env = {**os.environ, **dict(e.split("=", 1) for e in stand_in.env)}
    env["PYTHONPATH"] += f":{cases.REPO}"
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), "--", *spec.command]
    owner = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"started\n"
        cases.wait_for(lambda: len(stand_in.pids()) == 2, "server and child to start")
        time.sleep(0.6)  # longer than the guard looks
        assert all(running(p) for p in stand_in.pids())
    finally:
        owner.send_signal(signum)
        owner.wait()
    gone(stand_in)


def test_our_own_server_is_restarted_and_gets_the_current_weights(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "REVIVE_EVERY_S", 0.05)
    with cases.engine((), tmp_path / "weights", servers=stand_in.specs(2), start_timeout_s=30.0) as engine:
        engine.publish(PARAMS, 7)
        wanted = cases.requests(4, 4)
        assert len(list(engine.generate(wanted, cases.sampling()))) == 4
        first = stand_in.pids()
        os.kill(first[0], signal.SIGKILL)
        groups = list(engine.generate(wanted, cases.sampling()))  # one server is gone
        assert all(len(s.tokens) and s.weight_version == 7 for g in groups for s in g.samples)
        cases.wait_for(lambda: len(engine._pool.serving) == 2, "the server to be restarted", 30.0)
        assert len(stand_in.pids()) == 6 and not running(first[0]) and not running(first[1])
        assert len(list(engine.generate(wanted, cases.sampling()))) == 4
        found = engine.metrics()
        assert found["engine/restarts"] == found["engine/deaths"] == 1
    gone(stand_in)
    assert not (tmp_path / "weights").exists()


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_words(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text("raise SystemExit('RuntimeError: no GPU is left')")
    own = specs(tmp_path, env=(f"PYTHONPATH={tmp_path}",))
    with (
        cases.engine((), tmp_path / "weights", servers=own, start_timeout_s=30.0) as engine,
        pytest.raises(NoServers, match=r"ended; .*no GPU is left"),
    ):
        engine.publish(PARAMS, 0)


def test_a_port_of_somebody_else_is_refused_before_their_server_is_taken_for_ours(fake, stand_in, tmp_path):
    first, second = stand_in.specs(2)
    taken = dataclasses.replace(second, url=fake.url)
    with pytest.raises(UserError, match=f"cannot start a server at {fake.url}: .*in use; set rollout.sglang.launch"):
        cases.engine((), tmp_path / "weights", servers=[first, taken]).__enter__()
    gone(stand_in)
    assert fake.calls == []


def test_serve_starts_what_the_config_says_and_stops_on_a_signal(stand_in, tmp_path):
    config = tmp_path / "config.py"
    port = cases.free_port()
    config.write_text(
        "from brorl_jax.config import default, source\n"
        "def get_config():\n"
        "    c = default()\n"
        "    c.data.train.sums = source('reasoning_gym', task='basic_arithmetic', size=50)\n"
        f"    c.rollout.sglang.launch.update(python={sys.executable!r}, port={port}, env={stand_in.env!r})\n"
        "    return c\n"
    )
    command = [sys.executable, "-m", "brorl_jax.rollout.serve", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    env = {**os.environ, "PYTHONPATH": str(cases.REPO)}
    serving = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout.readline().startswith(f"http://127.0.0.1:{port} serves; its output goes to")
        assert len(stand_in.pids()) == 2
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 128 + signal.SIGTERM
    gone(stand_in)
