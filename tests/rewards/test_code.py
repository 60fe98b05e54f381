"""Verdicts of harmless programs: what earns which score, in every form that tests have."""

import gzip
import json
import os
import re
import struct
from pathlib import Path

import pytest

from benchmarks import sandbox as sandbox_benchmark
from brorl_jax import rewards
from brorl_jax.data import code_tests
from brorl_jax.errors import UserError
from brorl_jax.rewards import code, sandbox
from brorl_jax.rewards.code import judge
from brorl_jax.rewards.sandbox import isolation, seccomp
from brorl_jax.types import Prompt, Status

pytestmark = pytest.mark.usefixtures("sandboxed")
LIMIT = 30.0  # seconds for what must not run out of time


def scores(program, kind, **fields):
    return judge(program, code.Tests(kind, **{"total_limit": LIMIT, **fields})).scores


def test_scripts():
    add = "a, b = map(int, input().split())\nif a == 9: raise ValueError\nprint(a + b)"
    assert scores(add, "stdin", inputs=["1 2\n", "3 4", "9 1"], outputs=["3", "8", "10"]) == [1.0, 0.0, 0.0]


def test_a_script_is_run_anew_for_each_test():
    count = "import os\nn = globals().get('n', 0) + 1\nprint(n)"
    assert scores(count, "stdin", inputs=["", "", ""], outputs=["1", "1", "1"]) == [1.0] * 3


@pytest.mark.parametrize(
    "ending, score",
    [
        ("exit(0)", 1.0),
        ("import sys; sys.exit()", 1.0),
        ("quit(1)", 0.0),
        ("exit('why')", 0.0),
        ("import os; os._exit(0)", 0.0),  # what was printed is not flushed
        ("import os, sys; sys.stdout.flush(); os._exit(0)", 1.0),
        ("1 / 0", 0.0),
        ("import threading; threading.Thread(target=print, args=('late',)).start()", 0.0),
        ("if __name__ == '__main__': pass", 1.0),
        ("if __name__ != '__main__': exit(1)", 1.0),
        ("import sys; sys.stderr.write('x' * 10**6)", 1.0),
    ],
)
def test_how_a_script_ends(ending, score):
    assert scores(f"print(7)\n{ending}", "stdin", inputs=[""], outputs=["7"]) == [score]


@pytest.mark.parametrize(
    "reading",
    [
        "import sys\nn, *x = map(int, sys.stdin.read().split())",
        "import sys\nn, *x = map(int, sys.stdin.buffer.read().split())",
        "n = int(input())\nx = [int(input()) for _ in range(n)]",
        "import sys\ninput = sys.stdin.readline\nn = int(input())\nx = [int(input()) for _ in range(n)]",
        "import fileinput\nn, *x = map(int, fileinput.input())",
        "import os, io\nn, *x = map(int, io.BytesIO(os.read(0, 1 << 20)).read().split())",
        "n, *x = map(int, open(0).read().split())",
        "n, *x = map(int, open('/dev/stdin').read().split())",
    ],
)
def test_ways_to_read(reading):
    assert scores(f"{reading}\nprint(sum(x))", "stdin", inputs=["3\n4\n5\n6\n"], outputs=["15"]) == [1.0]


def test_large_input_and_output():
    text = "\n".join(map(str, range(200_000)))
    assert scores("import sys\nprint(sys.stdin.read())", "stdin", inputs=[text], outputs=[text]) == [1.0]


def test_functions():
    program = "def f(a, b=1):\n    if a == 0: raise ValueError\n    return (a, [b])"
    inputs, outputs = [[1, 2], [3], [0], [5]], [[1, [2]], [3, [1]], [0, [1]], [5, [2]]]
    assert scores(program, "call", fn="f", inputs=inputs, outputs=outputs) == [1.0, 1.0, 0.0, 0.0]


def test_method_of_a_solution():
    program = "class Solution:\n    def add(self, a: List[int]) -> int:\n        return sum(a)"
    fields = {"fn": "add", "inputs": [[[1, 2]]], "outputs": [3], "prefix": "from typing import *"}
    assert scores(program, "call", **fields) == [1.0]


def test_calls_do_not_see_one_another():
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert scores(program, "call", fn="f", inputs=[[1], [2]], outputs=[1, 1]) == [1.0, 1.0]


def test_values_written_as_lists_of_one():
    program = "def f(x): return x + 1"
    assert scores(program, "call", fn="f", inputs=[[1], [2]], outputs=[[2], [3]]) == [1.0, 1.0]
    assert scores(program, "call", fn="f", inputs=[[1], [2]], outputs=[[2], 3]) == [0.0, 1.0]


def test_assertions():
    program = (
        "class Point:\n    def __init__(self, x): self.x = x\n    def twice(self): return Point(2 * self.x)\n"
        "def make(x): return Point(x)\ndef bad(x): raise KeyError(x)\n"
        "def words(s): return {w: len(w) for w in s.split()}"
    )
    tests = {
        "assert make(3).x == 3": 1.0,
        "assert make(3).twice().twice().x == 12": 1.0,
        "assert Point(1).x == 1": 1.0,
        "assert make(3) == make(3)": 0.0,
        "assert words('a bb') == {'a': 1, 'bb': 2}": 1.0,
        "assert sorted(words('a bb')) == ['a', 'bb']": 1.0,
        "try:\n    bad(1)\n    assert False\nexcept KeyError:\n    pass": 1.0,
        "bad(1)": 0.0,
        "assert missing(1) == 1": 0.0,
        "assert math.isclose(make(0.1).x * 3, 0.3)": 1.0,
        "assert helper(words('a')) == 1": 1.0,
    }
    assert scores(program, "assert", tests=list(tests), setup="def helper(d):\n    return sum(d.values())") == list(
        tests.values()
    )


@pytest.mark.parametrize(
    "value",
    ["None", "True", "-5", "10**30", "1.5", "'é\\n'", "b'x'", "1j", "[1, [2]]", "(1, (2,))", "{1, 2}", "frozenset({1})",
     "[1, float('inf')]", "[1, True, 2.5]", "['a', 'é']", "[1, 10**30]", "[0.5, -1e300]", "{1: (2, {'a': None})}",
     "range(5)", "float('inf')", "()", "{}", "set()", "-(2**62)", "2**62", "[[], [()]]"],
)  # fmt: skip
def test_values_cross_to_the_assertions_and_back(value):
    program = f"def get(): return {value}\ndef same(x): return x"
    kind = "range" if value.startswith("range") else None
    returned = f"assert get() == {value} and type(get()) is type({value})"
    given = f"assert same({value}) == {f'list({value})' if kind else value}"
    assert scores(program, "assert", tests=[returned, given]) == [1.0, 1.0]


def test_a_test_may_have_variables_with_the_name_of_what_it_tests():
    setup = "def reference(x):\n    count = x + 1\n    return count\ndef check(x):\n    assert count(x) == reference(x)"
    tests = ["check(1)", "assert [f for f in (count,)][0](2) == 3", "count = count(3)\nassert count == 4"]
    assert scores("def count(x): return x + 1", "assert", setup=setup, tests=tests[:2]) == [1.0, 1.0]
    assert scores("def count(x): return x + 1", "assert", setup=setup, tests=tests[2:]) == [0.0]  # now it is the test's


def test_large_values_cross_and_larger_ones_fail():
    program = "def words(n): return 'abcdefg ' * n\ndef many(n): return list(range(n)) + [0.5, -1e300]"
    tests = [
        "assert words(10**6) == 'abcdefg ' * 10**6",
        "assert many(10**6) == [*range(10**6), 0.5, -1e300]",
        "assert words(3 * 10**6) == 'abcdefg ' * (3 * 10**6)",
        "assert len(many(3 * 10**6)) == 3 * 10**6 + 2",
        "assert words(1) == 'abcdefg '",
    ]
    assert scores(program, "assert", tests=tests, memory_mb=1024) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_setup_and_expectations_stay_away_from_the_program():
    program = "import gc\ndef f():\n    return [o for o in gc.get_objects() if isinstance(o, list) and o == [271, 828]]"
    fields = {"setup": "secret = [271, 828]", "tests": ["assert f() == []"]}
    assert scores(program, "assert", **fields) == [1.0]


def test_checkers():
    function = (
        "def check(input, expected, output):\n    a, b = map(int, output.split())\n    return a * b == int(input)"
    )
    script = (
        "import sys\nfiles = [open(name).read() for name in sys.argv[1:]]\nassert files[1] == 'any'\n"
        "a, b = map(int, files[2].split())\nprint(1 if a * b == int(files[0]) else 0)"
    )
    inputs = ["12", "35", "10"]
    program = "n = int(input())\nprint(*{'12': (3, 4), '35': (7, 5), '10': ('x', 5)}[str(n)])"
    for checker in (function, script):
        got = scores(program, "stdin", inputs=inputs, outputs=["any"] * 3, checker=checker)
        assert got == [1.0, 1.0, 0.0]


def test_a_checker_may_give_parts():
    checker = "def check(input, expected, output): return len(output) / 4"
    assert scores("print('ab', end='')", "stdin", inputs=[""], outputs=[""], checker=checker) == [0.5]


def test_broken_tests_are_no_fault_of_the_program():
    program = "def f(x): return x"
    with pytest.raises(sandbox.SandboxError, match="no_such_module"):
        judge(program, code.Tests("assert", tests=["assert f(1)"], setup="import no_such_module", total_limit=LIMIT))
    with pytest.raises(sandbox.SandboxError, match="SyntaxError"):
        judge(program, code.Tests("assert", tests=["assert f("], total_limit=LIMIT))
    assert scores(program, "assert", tests=["assert f(1)"]) == [1.0]  # the tester is none the worse


def test_limits():
    slow = "import sys\nif input() == 'slow':\n    while True: pass\nprint(1)"
    fields = {"inputs": ["quick", "slow", "quick"], "outputs": ["1"] * 3}
    verdict = judge(slow, code.Tests("stdin", time_limit=2.0, total_limit=LIMIT, **fields))
    assert (verdict.scores, verdict.why, verdict.passed) == ([1.0, 0.0, 1.0], "ok", False)
    assert verdict.fraction == pytest.approx(2 / 3)
    verdict = judge(slow, code.Tests("stdin", total_limit=2.0, **fields))
    assert (verdict.why, verdict.fraction, verdict.scores[0]) == ("time", 0.0, 1.0)  # [V1]


def test_what_does_not_compile_or_run():
    verdict = judge("def f(:", code.Tests("call", [[1]], [1], fn="f", total_limit=LIMIT))
    assert (verdict.why, verdict.fraction) == ("syntax", 0.0)
    verdict = judge("1 / 0", code.Tests("call", [[1]], [1], fn="f", total_limit=LIMIT))
    assert "ZeroDivisionError" in verdict.why and verdict.fraction == 0.0


def test_scorers(tmp_path):
    tests = {"kind": "call", "fn": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 4, 9, 0], "total_limit": LIMIT}
    prompt = Prompt("p", None, "", "", "code", "s", {"tests": tests})
    for name, score in (("code", 0.75), ("code_all", 0.0)):
        verifier = rewards.get(name)
        answer = verifier.extract("so:\n```python\ndef f(x): return x * x\n```\n", truncated=False)
        assert verifier.score(answer, prompt) == score
    tests["outputs"][3] = 16
    assert all(rewards.get(name).score(answer, prompt) == 1.0 for name in ("code", "code_all"))


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"kind": "stdout"}, "stdout"),
        ({"kind": "assert"}, "no tests"),
        ({"kind": "stdin"}, "0 inputs"),
        ({"kind": "stdin", "inputs": [""], "outputs": ["", ""]}, "1 inputs for 2 outputs"),
        ({"kind": "call", "inputs": [[]], "outputs": [1]}, "fn"),
        ({"kind": "stdin", "inputs": [""], "outputs": [""], "total_limit": 0}, "seconds"),
        ({"kind": "stdin", "inputs": [""], "outputs": [""], "total_limit": 61}, "seconds"),
        ({"kind": "stdin", "inputs": [""], "outputs": [""], "timeout": 1}, "timeout"),
    ],
)
def test_tests_that_make_no_sense(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        code.Tests.of(fields)


# --- the public sets -------------------------------------------------------------------------------------------------

ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_forms_of_rows():
    apps = json.dumps({"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]})
    contests = {name: {"input": ["1 2"], "output": ["3"]} for name in ("public_tests", "private_tests")}
    contests |= {"generated_tests": {"input": [], "output": []}, "time_limit": {"seconds": 2, "nanos": 500_000_000}}
    forces = {"official_tests": [{"input": "1 2", "output": "3"}], "time_limit": 2.0, "memory_limit": 256.0}
    forces["generated_checker"] = "def check(input, expected, output): return output.strip() == expected"
    rows = [code_tests.input_output(apps), code_tests.code_contests(contests), code_tests.codeforces(forces)]
    assert [tests["time_limit"] for tests in rows] == [0.0, 2.5, 2.0]
    for tests in rows:
        assert judge(ADD, code.Tests.of(tests | {"total_limit": LIMIT, "time_limit": 0.0})).passed
        assert not judge("print(3.5)", code.Tests.of(tests | {"total_limit": LIMIT})).passed
    with pytest.raises(ValueError, match="interaction"):
        code_tests.codeforces(forces | {"interaction_format": "asks"})


@pytest.mark.parametrize("inputs, outputs", [([[1, 2], [3, 4]], [3, 7]), (["1\n2", "3\n4"], ["3", "7"])])
def test_form_of_functions(inputs, outputs):
    tests = code_tests.input_output({"fn_name": "add", "inputs": inputs, "outputs": outputs})
    assert scores("def add(a, b): return a + b", **tests) == [1.0, 1.0]


def humaneval(path):
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {r["task_id"]: (code_tests.humaneval_gold(r), code_tests.humaneval(r)) for r in rows}


def mbpp(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {r["task_id"]: (r["code"], code_tests.mbpp(r)) for r in rows}


SETS = {"HumanEval.jsonl.gz": humaneval, "mbpp.jsonl": mbpp}


def failing(problems):
    verdicts = {
        key: judge(gold, code.Tests.of(tests | {"total_limit": 60.0})) for key, (gold, tests) in problems.items()
    }
    return {key: verdict.why for key, verdict in verdicts.items() if not verdict.passed}


@pytest.mark.parametrize("name", SETS)
def test_some_canonical_solutions_pass(shared_data, name):
    problems = SETS[name](shared_data / name)
    assert not failing({key: problems[key] for key in [*problems][::80]})


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_all_canonical_solutions_pass(shared_data, name):
    assert not failing(SETS[name](shared_data / name))


@pytest.mark.parametrize("name", SETS)
def test_stubs_fail(shared_data, name):
    """A function of the right name that does nothing, or returns what equals everything, passes nothing."""
    everything = "class E:\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = None\n"
    for _, tests in [*SETS[name](shared_data / name).values()][::40]:
        names = set(re.findall(r"(\w+)\(", tests["fn"] + "(" + "".join(tests["tests"]))) - {"assert", "check", "set"}
        stub = "".join(f"def {n}(*a, **k): return E()\n" for n in names)
        assert judge(everything + stub, code.Tests.of(tests | {"total_limit": LIMIT})).fraction == 0.0


# --- in workers ------------------------------------------------------------------------------------------------------


def test_workers_judge_alike():
    """Right and wrong programs of the benchmark, by the grading service."""
    rate, wrong = sandbox_benchmark.measure("assert", 4, 1)
    assert rate > 0 and wrong == 0


def descendants(pid):
    """Processes below ``pid``, with their command lines."""
    found, pending = {}, [pid]
    while pending:
        try:
            for task in os.listdir(f"/proc/{(parent := pending.pop())}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                pending += children
                found |= {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
        except OSError:
            continue
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow  # it waits for a deadline
def test_a_killed_worker_takes_its_sandbox_along():
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["1"], "total_limit": 60.0}
    groups, _ = sandbox_benchmark.batch("stdin", 1, 0)
    groups[0].prompt.meta["tests"] = tests
    groups[0].samples[0].text = "```\nimport time\ntime.sleep(1000)\n```"
    seen = {}
    with rewards.Grader(workers=1, deadline_factor=0.1) as grader:
        grader.wait([grader.submit(groups[0])], lambda: seen.update(descendants(os.getpid())))
        assert groups[0].samples[0].status is Status.TIMEOUT
        inside = [pid for pid, command in seen.items() if "/usr" in command and "-I" in command.split("\0")]
        assert inside and not any(map(alive, inside))


# --- the machine -----------------------------------------------------------------------------------------------------


def test_without_isolation_nothing_starts(monkeypatch):
    monkeypatch.setattr(isolation, "find_bwrap", lambda: None)
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        sandbox.check()
    with pytest.raises(sandbox.SandboxError):
        judge(ADD, code.Tests("stdin", ["1 2"], ["3"]))


def test_a_run_does_not_start_without_isolation(monkeypatch):
    monkeypatch.setattr(isolation, "find_bwrap", lambda: None)
    prompt = Prompt("p", None, "", "", "code", "s", {})
    with pytest.raises(UserError, match="isolated"):
        rewards.self_test([prompt])


def test_isolation_is_switched_off_by_name_only(monkeypatch):
    monkeypatch.setattr(isolation, "find_bwrap", lambda: None)
    for name in (isolation._ISOLATION, isolation._PACKAGES):
        monkeypatch.setenv(name, "")
    with pytest.raises(UserError, match="nsjail"):
        sandbox.configure("nsjail", "")
    sandbox.configure("none", "")
    sandbox.check()
    assert scores(ADD, "stdin", inputs=["1 2"], outputs=["3"]) == [1.0]
    sandbox.configure("bwrap", "")
    with pytest.raises(UserError):
        sandbox.check()


def test_packages(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    (folder / "shelf.py").write_text("answer = 42")
    for path in (folder, *folder.parents[:3]):
        path.chmod(0o755)
    monkeypatch.setenv(isolation._PACKAGES, str(folder))
    assert scores("import shelf\nprint(shelf.answer)", "stdin", inputs=[""], outputs=["42"]) == [1.0]


@pytest.mark.parametrize("machine, architecture, clone", [("x86_64", 0xC000003E, 56), ("aarch64", 0xC00000B7, 220)])
def test_filter_of_system_calls(machine, architecture, clone):
    """The assembled filter, run by hand."""
    kill, allow, eperm, enosys = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
    socket, read, clone3 = {"x86_64": (41, 0, 435), "aarch64": (198, 63, 435)}[machine]
    program = seccomp.program(machine)

    def outcome(arch, number, argument=0):
        data, at, accumulator = {0: number, 4: arch, 16: argument}, 0, 0
        while True:
            operation, true, false, value = struct.unpack_from("=HBBI", program, 8 * at)
            at += 1
            if operation == 0x20:
                accumulator = data[value]
            elif operation == 0x06:
                return value
            else:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
                at += true if holds[operation] else false

    assert outcome(architecture, read) == allow
    assert outcome(architecture, socket) == eperm
    assert outcome(architecture, clone3) == enosys
    assert outcome(architecture, clone, 17) == allow  # SIGCHLD: fork
    assert outcome(architecture, clone, 0x10000000 | 17) == eperm  # a user namespace
    assert outcome(0x40000003, read) == kill  # 32-bit calls
    if machine == "x86_64":
        assert outcome(architecture, 0x40000000 | read) == kill
    with pytest.raises(UserError, match="riscv64"):
        seccomp.program("riscv64")
