"""Hostile programs: none escapes, none forges a verdict, none outlives its deadline, nothing is left of them."""

import itertools
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from brorl_jax.rewards import code, sandbox
from brorl_jax.rewards.sandbox import isolation
from tests.helpers.hostile_programs import FORGED, GREEDY, HELD

MARK = f"BRORL_JAX_{secrets.token_hex(6)}"
TOKEN = secrets.token_hex(8)
FOLDERS = ("/", "/tmp", "/var/tmp", "/dev/shm", "/usr", "/usr/bin", "/usr/lib", ".")
_users = itertools.count(1000 + os.getpid() % 35 * 120)


def processes(user):
    """Live processes of ``user``; of all foreign pid namespaces where programs run as the present user."""
    mine, found = os.readlink("/proc/self/ns/pid"), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if user is not None:
                same = os.stat(f"/proc/{pid}").st_uid == user
            else:
                same = os.readlink(f"/proc/{pid}/ns/pid") != mine
            if same and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add((int(pid), Path(f"/proc/{pid}/cmdline").read_text()[:80]))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def arena(sandboxed, tmp_path_factory):
    """Judges programs, each as a user of its own; returns (verdict or error, processes left) of each."""
    local, numbers = threading.local(), {}
    patch = pytest.MonkeyPatch()
    patch.setattr(isolation, "slot", lambda: getattr(local, "slot", 0))
    patch.setenv(MARK, "secret")

    def run(job):
        name, source, tests = job
        local.slot = numbers.setdefault(name, next(_users))
        before = processes(isolation.user()) if isolation.user() is None else set()
        try:
            result = code.judge(source, tests)
        except Exception as error:
            result = error
        sandbox.drop_tester()
        return result, processes(isolation.user()) - before

    def runs(jobs):
        threads = 3 if isolation.user() is not None else 1  # else what is left would be blamed on another
        with ThreadPoolExecutor(threads) as pool:
            return dict(zip([job[0] for job in jobs], pool.map(run, jobs), strict=True))

    yield runs
    patch.undo()
    assert not [folder for folder in FOLDERS if any(MARK in name for name in os.listdir(folder))]


@pytest.fixture(scope="module")
def held(arena, tmp_path_factory):
    """Every program of HELD; expects "held"."""
    secret = tmp_path_factory.mktemp("host") / "secret.txt"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener, open(secret) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        words = {"SECRET": str(secret), "PORT": str(listener.getsockname()[1]), "PID": str(os.getpid()), "MARK": MARK}
        jobs = []
        for name, source in HELD.items():
            for word, value in words.items():
                source = source.replace(word, value)
            jobs.append((name, source, code.Tests("stdin", [""], ["held"], total_limit=20.0)))
        results = arena(jobs)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    return results


@pytest.mark.parametrize("name", HELD)
def test_nothing_escapes(held, name):
    verdict, left = held[name]
    assert (verdict.scores, verdict.why, left) == ([1.0], "ok", set())


def forged_tests(kind):
    """Tests that a program passes only if it knows TOKEN."""
    if kind == "stdin":
        return code.Tests("stdin", [""], [TOKEN], total_limit=4.0)
    if kind == "call":
        outputs = [TOKEN, [TOKEN], {"x": TOKEN}, [[TOKEN, 1], 0.5], 7.25, -12]
        return code.Tests("call", [[1, "x"]] * 6, outputs, fn="f", total_limit=4.0)
    loop = f"def check(candidate):\n    for i in range(1, 3):\n        assert candidate(i) == '{TOKEN}' * i"
    tests = [
        "check(f)",
        f"assert f(1) == '{TOKEN}'",
        f"assert list(f(1)) == ['{TOKEN}'] * 3",
        f"assert '{TOKEN}' in f(2)",
        "assert abs(f(3) - 0.7251) < 1e-9",
        "assert math.isclose(f(3), 7.251)",
        "assert len(f(4)) == 7251",
        f"assert str(f(5)) == '{TOKEN}'",
        "assert set(f(6)) == {7251, 1}",
    ]
    return code.Tests("assert", tests=tests, setup=loop, total_limit=4.0)


FORGERIES = [
    (name, kind)
    for name, source in FORGED.items()
    for kind in ("stdin", "call", "assert")
    if (kind == "stdin") != ("def f" in source)
]


@pytest.fixture(scope="module")
def forged(arena):
    jobs = [((name, kind), FORGED[name], forged_tests(kind)) for name, kind in FORGERIES]
    return arena(jobs)


@pytest.mark.parametrize("job", FORGERIES, ids="-".join)
def test_no_verdict_is_forged(forged, job):
    verdict, left = forged[job]
    assert isinstance(verdict, code.Verdict), verdict  # an error would spare the program its 0
    assert (verdict.scores, left) == ([0.0] * len(verdict.scores), set())


LIMIT = 1.0


@pytest.fixture(scope="module")
def greedy(arena):
    start = time.monotonic()
    jobs = [(name, source, code.Tests("stdin", [""], [TOKEN], total_limit=LIMIT)) for name, source in GREEDY.items()]
    return arena(jobs), time.monotonic() - start


@pytest.mark.parametrize("name", GREEDY)
def test_nothing_outlives_its_deadline(greedy, name):
    verdict, left = greedy[0][name]
    assert (verdict.fraction, left) == (0.0, set())
    assert verdict.seconds < LIMIT + 30  # the machine may be busy, but no program waits for us
