"""Several processes: who takes part, what is said of one missing, different or dead, and that they train the same."""

import contextlib
import errno
import io
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tiny_runs
from safetensors.numpy import load_file

from brorl_jax import processes
from brorl_jax.config import ConfigError, default
from brorl_jax.errors import UserError
from brorl_jax.processes import link

REPO = pathlib.Path(__file__).resolve().parents[1]
SLURM = {"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_JOB_ID": "81234", "SLURM_STEP_NODELIST": "gpu-[007-009,12]"}
SERVERS = {"mesh.data": 4, "rollout.engine": "sglang"}
STEPS = 4


def test_flags_say_which_process_this_is():
    assert processes.place("1", None, "", {}) == processes.ALONE
    assert processes.place("2", 1, "10.0.0.7:1234", {}) == processes.Place(1, 2, ("10.0.0.7", 1234))
    assert processes.place("2", 0, "[fd00::1]:99", {}) == processes.Place(0, 2, ("fd00::1", 99))


def test_slurm_says_which_process_this_is():
    assert processes.place("slurm", None, "", SLURM) == processes.Place(3, 16, ("gpu-007", 29_634))
    assert processes.place("slurm", None, "head:5", SLURM).coordinator == ("head", 5)
    assert processes.place("slurm", None, "", {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == processes.ALONE


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-7]", "n3"),
        ("n[03,07],m", "n03"),
        ("r[1-2]n[4-5]", "r1n4"),
        ("gpu-1-2", "gpu-1-2"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert processes.first_host(nodes) == first


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("many", None, ""), "--processes=many: must be a number"),
        (("²", None, ""), "--processes=²: must be a number"),
        (("2", None, "h:1"), "--processes=2 needs --process_id (0 to 1)"),
        (("2", 0, ""), "--processes=2 needs --process_id (0 to 1) and --coordinator"),
        (("2", 2, "h:1"), "--process_id=2: must be from 0 to 1"),
        (("1", 0, ""), "need --processes"),
        (("2", 0, "host"), "--coordinator=host: write host:port"),
        (("slurm", None, ""), "SLURM_NTASKS is not set"),
    ],
)
def test_flags_that_say_too_little_are_refused(arguments, fragment):
    with pytest.raises(UserError) as refused:
        processes.place(*arguments, environment={})
    assert fragment in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({}, "its 3 devices cannot be shared evenly among 2"),
        ({"mesh.data": 4, "rollout.overlap": True}, "config.rollout.overlap = True: not with several processes"),
        ({"mesh.data": 4, "rollout.prompts_per_step": 5}, "config.rollout.prompts_per_step = 5"),
        ({"mesh.data": 4, "model.offload_reference": True}, "config.model.offload_reference = True"),
        ({"mesh.data": 4, "optim.offload": True}, "config.optim.offload = True"),
        (SERVERS | {"rollout.sglang.urls": ("http://a", "http://b", "http://c")}, "3 servers cannot be dealt evenly"),
        (SERVERS | {"rollout.sglang.router": "http://r"}, "config.rollout.sglang.router = 'http://r'"),
        (SERVERS | {"rollout.sglang.launch.servers": 2}, "config.rollout.sglang.launch.servers = 2"),
    ],
)
def test_what_processes_cannot_share_is_refused(changes, fragment):
    config = default()
    config.mesh.data, config.rollout.prompts_per_step = 3, 4
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError) as refused:
        processes.check(config, 2)
    assert fragment in str(refused.value)
    processes.check(config, 1)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meet(*facts, address=None, timeout=20.0):
    """Connects processes with these facts, each in a thread; the connections, or why there are none, of each."""
    address = address or ("127.0.0.1", free_port())

    def come(index):
        try:
            return link.connect(address, index, len(facts), facts[index], start_timeout_s=timeout)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(come, range(len(facts))))


def links(count):
    """Linked processes, to be left after use, and where each puts the reason why it would end."""
    reasons = [queue.Queue() for _ in range(count)]
    found: Any = meet(*[{"_port": i} for i in range(count)])
    assert [facts for _, facts in found] == [{"_port": 0}] * count  # all learn process 0's
    made = [
        link.Link(i, count, peers, lost_after_s=20.0, wait_s=20.0, die=reasons[i].put)
        for i, (peers, _) in enumerate(found)
    ]
    return made, reasons


def leave(made):
    for one in made:
        one.leave()


def test_all_gather_what_each_has_in_order():
    made, _ = links(3)
    with ThreadPoolExecutor(3) as pool:
        for size in (0, 1, 3_000_000):
            payloads = [bytes([i]) * size * i for i in range(3)]
            got = list(pool.map(lambda i, data=payloads: made[i].gather(data[i], "data"), range(3)))
            assert got == [payloads] * 3
    leave(made)


def test_a_process_with_another_config_is_named():
    one, two = meet({"config.rollout.n": 4}, {"config.rollout.n": 8})
    assert one == two
    assert "process 1 has config.rollout.n = 8, process 0 has 4" in one


def test_a_process_that_does_not_come_is_named():
    address = ("127.0.0.1", free_port())
    with pytest.raises(UserError, match=r"1 of 2 processes came within 0\.2 s, missing: 1"):
        link.connect(address, 0, 2, {}, start_timeout_s=0.2)
    with pytest.raises(UserError, match=r"process 1 found no process 0 at --coordinator=127\.0\.0\.1:"):
        link.connect(address, 1, 2, {}, start_timeout_s=0.2)


def hello(**changes):
    """What a process sends first."""
    payload = json.dumps({"index": 1, "count": 2, "facts": {}, **changes}).encode()
    return link.MAGIC + link.HEADER.pack(link.HELLO, len(payload)) + payload


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    link.MAGIC + link.HEADER.pack(link.HELLO, 1 << 60),
    link.MAGIC + link.HEADER.pack(link.HELLO, 100_000) + b"[" * 100_000,
    link.MAGIC + link.HEADER.pack(link.HELLO, 2) + b"[]",
    hello(index="1"),
    hello(index=0),
    hello(index=2),
    hello(facts=[]),
    b"",  # says nothing
    link.MAGIC,  # and no more
]


def test_strangers_keep_nobody_from_meeting():
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        host = pool.submit(link.connect, address, 0, 2, {}, start_timeout_s=20.0)
        for words in STRANGERS:
            held.enter_context(knock(address)).sendall(words)
        peers, _ = link.connect(address, 1, 2, {}, start_timeout_s=20.0)
        assert [peer.index for peer in peers + host.result()[0]] == [0, 1]


def knock(address):
    """A connection, as soon as somebody listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address)


def test_a_process_that_was_started_again_is_no_second_one():
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(3) as pool:
        host = pool.submit(link.connect, address, 0, 3, {}, start_timeout_s=20.0)
        with knock(address) as first:  # is killed before all have come
            first.sendall(hello(count=3))
        others = [pool.submit(link.connect, address, i, 3, {}, start_timeout_s=20.0) for i in (1, 2)]
        assert [peer.index for peer in host.result()[0]] == [1, 2]
        assert [other.result()[0][0].index for other in others] == [0, 0]


def test_another_program_at_the_coordinators_port_is_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(link.connect, server.getsockname(), 1, 2, {}, start_timeout_s=20.0)
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            with pytest.raises(UserError, match="another program listens there"):
                joined.result()


def test_a_host_whose_own_name_means_loopback_is_reached_from_others(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", {"gpu-1": "127.0.1.1", "gpu-2": "10.0.0.2"}.__getitem__)
    hosts = ("gpu-1", "gpu-2", "localhost", "127.0.0.1", "10.0.0.7", "fd00::1")
    assert [link._own(host) for host in hosts] == ["", *hosts[1:]]


def test_processes_meet_at_an_ipv6_address():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            address = server.getsockname()[:2]
    except OSError:
        pytest.skip("no IPv6 here")
    assert all(isinstance(found, tuple) for found in meet({}, {}, address=address))
    assert link.text(address) == f"[::1]:{address[1]}"


def test_a_dead_process_is_named_to_all_others():
    made, reasons = links(3)
    made[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)  # what the kernel does for a killed process
    assert "process 1 is gone" in reasons[0].get(timeout=20)
    assert "process 1 is gone" in reasons[2].get(timeout=20)
    leave(made)


def test_a_silent_process_is_named_after_its_deadline():
    found: Any = meet({}, {})
    reasons = queue.Queue()
    one = link.Link(0, 2, found[0][0], lost_after_s=0.3, wait_s=20.0, die=reasons.put)  # process 1 says nothing
    assert "process 1 has shown no sign of life" in reasons.get(timeout=20)
    leave([one])


def test_a_process_that_does_not_even_read_is_named():
    found: Any = meet({}, {})
    connection = found[0][0][0].connection
    connection.setblocking(False)
    for size in (1 << 20, 1):  # until not a byte more goes
        with contextlib.suppress(BlockingIOError):
            while connection.send(bytes(size)):
                pass
    reasons = queue.Queue()
    one = link.Link(0, 2, found[0][0], lost_after_s=0.3, wait_s=20.0, die=reasons.put)
    assert "process 1 has shown no sign of life" in reasons.get(timeout=20)
    found[1][0][0].connection.close()
    leave([one])


def test_words_that_cannot_be_read_end_the_run():
    made, reasons = links(2)
    made[1]._peers[0].send(link.DATA, b"")  # too short for its name
    assert "process 1 is gone" in reasons[0].get(timeout=20)
    leave(made)


def test_a_process_that_came_long_before_the_last_one_is_not_silent():
    found: Any = meet({}, {})
    found[0][0][0].seen -= 1000.0
    reasons = [queue.Queue(), queue.Queue()]
    made = [
        link.Link(i, 2, peers, lost_after_s=20.0, wait_s=20.0, die=reasons[i].put) for i, (peers, _) in enumerate(found)
    ]
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda one: one.gather(b"", "data"), made)) == [[b"", b""]] * 2
    leave(made)
    assert reasons[0].empty()


def test_a_process_that_was_suspended_calls_nobody_silent(monkeypatch):
    now, slept = [0.0], threading.Event()

    def sleep(_):
        now[0] += 100.0  # far beyond the deadline, all at once
        slept.wait() if now[0] > 500.0 else None

    found: Any = meet({}, {})
    monkeypatch.setattr(link, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    reasons = queue.Queue()
    one = link.Link(0, 2, found[0][0], lost_after_s=20.0, wait_s=20.0, die=reasons.put)  # process 1 says nothing
    while now[0] < 500.0:
        assert reasons.empty()
    leave([one])
    slept.set()
    assert reasons.empty()


def test_a_process_that_fails_tells_its_reason():
    made, reasons = links(2)
    made[1].leave("ValueError: no such table")
    assert reasons[0].get(timeout=20) == "process 1 stopped: ValueError: no such table"
    leave(made)


def test_a_process_elsewhere_in_the_program_is_named():
    made, _ = links(2)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(made[1].gather, b"", "an evaluation")
        with pytest.raises(UserError, match="process 1 is at 'an evaluation', this one at 'rollouts'"):
            made[0].gather(b"", "rollouts")
        made[0].leave()  # so that process 1 waits no longer
    leave(made)


def test_shares_come_back_in_order(monkeypatch):
    parts = []
    for i in range(3):
        monkeypatch.setattr(processes, "index", lambda i=i: i)
        monkeypatch.setattr(processes, "count", lambda: 3)
        parts.append(processes.share("abcdefg"))
    assert parts == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert processes.unshare(parts) == list("abcdefg")


@pytest.fixture
def ends(monkeypatch):
    """What this process tells the others when it fails, and the status that it ends with."""
    told = []
    monkeypatch.setattr(processes, "NOTICE_S", 0.0)
    monkeypatch.setattr(processes, "_link", types.SimpleNamespace(leave=told.append, agreed=False))
    monkeypatch.setattr(os, "_exit", told.append)
    return told


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("no such table"), 2, "no such table"),
        (OSError(errno.ENOSPC, "No space left", "/a/b"), 2, "/a/b: No space left"),
        (KeyError("x"), 1, "KeyError: 'x'"),
        (SystemExit("error: no update"), 1, "no update"),
        (SystemExit(143), 143, "exit status 143"),
    ],
)
def test_the_others_are_told_why_a_process_ends(ends, error, status, reason):
    processes._fail(error)
    assert ends == [reason, status]


def test_a_process_ends_though_nobody_hears_why(ends, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.close()
    with pytest.raises(ValueError, match="closed file"):
        processes._fail(UserError("no such table"))
    assert ends == [1]
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(AttributeError):
        link._exit("process 1 is gone")
    assert ends == [1, 1]


def answers(monkeypatch, *replies):
    """Lets ``gather_json`` return these, each made from what this process, number 1 of 2, gives."""
    left = iter(replies)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "gather_json", lambda value, what: next(left)(value))


def test_a_workdir_that_is_not_shared_is_refused(monkeypatch, tmp_path):
    answers(monkeypatch, lambda own: ["a1b2", own], lambda own: [True, own])
    with pytest.raises(UserError, match="not the same folder for process 1 as for process 0"):
        processes._check_shared(tmp_path)
    (tmp_path / ".seen_by_all").write_text("a1b2")
    answers(monkeypatch, lambda own: ["a1b2", own], lambda own: [True, own])
    processes._check_shared(tmp_path)


def test_other_training_data_is_refused(monkeypatch):
    answers(monkeypatch, lambda own: [own, own], lambda own: [{"source a: content": "12"}, own])
    processes.check_same({"source a: content": "34"}, "the training data")
    with pytest.raises(UserError, match="process 1 has source a: content = '34', process 0 has '12'"):
        processes.check_same({"source a: content": "34"}, "the training data")


class Run:
    """Processes that train together, each with its share of eight simulated devices; all output is kept."""

    def __init__(self, folder, workdir, count):
        port, flags = free_port(), "--xla_backend_optimization_level=0"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests' / 'helpers'}",
            "XLA_FLAGS": flags,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", "brorl_jax.main", f"--config={REPO}/tests/helpers/several.py:{folder}"]
        command += [f"--workdir={workdir}", f"--config.train.steps={STEPS}"]
        self.lines = [[] for _ in range(count)]
        self.processes, self._readers = [], []
        self._news = threading.Condition()
        for i in range(count):
            among = [f"--processes={count}", f"--process_id={i}", f"--coordinator=127.0.0.1:{port}"]
            process = subprocess.Popen(
                command + among * (count > 1),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.processes.append(process)
            self._readers.append(threading.Thread(target=self._read, args=(i,), daemon=True))
            self._readers[-1].start()

    def _read(self, i):
        for line in self.processes[i].stdout:
            with self._news:
                self.lines[i].append(line)
                self._news.notify_all()
        with self._news:
            self.lines[i].append("")  # the end
            self._news.notify_all()

    def says(self, text, i=0):
        """Waits until process ``i`` has printed ``text``."""
        with self._news:
            assert self._news.wait_for(lambda: text in self.text(i) or "" in self.lines[i], timeout=300)
        assert text in self.text(i), self.text(i)

    def text(self, i):
        return "".join(self.lines[i])

    def wait(self):
        """Exit statuses."""
        try:
            statuses = [process.wait(timeout=300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        for reader in self._readers:
            reader.join()
        return statuses


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The uninterrupted run of one process with eight devices."""
    folder = tmp_path_factory.mktemp("single")
    run = Run(folder, folder / "run", 1)
    assert run.wait() == [0], run.text(0)
    return folder / "run"


@pytest.mark.slow
def test_a_pair_stopped_killed_and_resumed_trains_what_one_process_does(single, tmp_path):
    workdir = tmp_path / "run"

    stopped = Run(tmp_path, workdir, 2)
    stopped.says(f"1/{STEPS}")
    stopped.processes[1].send_signal(signal.SIGTERM)  # to one of them
    assert stopped.wait() == [143, 143], stopped.text(0) + stopped.text(1)
    assert "SIGTERM: stopped. The same command resumes the run" in stopped.text(0)

    killed = Run(tmp_path, workdir, 2)
    killed.says(f"2/{STEPS}")
    killed.processes[1].kill()
    assert killed.wait() == [1, -signal.SIGKILL]  # the other does not wait in a collective for ever
    assert "error: process 1 is gone" in killed.text(0)

    resumed = Run(tmp_path, workdir, 2)
    assert resumed.wait() == [0, 0], resumed.text(0) + resumed.text(1)
    assert "resuming after step" in resumed.text(0)

    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (workdir, single))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=name)
    assert [row["step"] for row in tiny_runs.metrics(workdir)] == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        both = (tiny_runs.rollouts(folder, step) for folder in (workdir, single))
        a, b = ([(row["prompt_id"], row["response"], row["reward"], row["outcome"]) for row in rows] for rows in both)
        assert a == b
