"""Programs: the fraction of their tests that they pass, in a sandbox.

The tests of a problem are in ``prompt.meta["tests"]``, see :class:`Tests`; the gold, where there is one, is a program
that passes them. The program's process never holds what is expected: outputs and return values come out as bytes and
are compared here, and assertions run in another sandbox (the tester) that reaches the program through a pipe. So a
verdict can't be forged by anything the program prints, returns, patches or reads; it can only be earned.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brorl_jax.rewards import compare, sandbox
from brorl_jax.rewards.registry import register
from brorl_jax.rewards.sandbox import Ended, OutOfTime, Sandbox, SandboxError
from brorl_jax.types import Prompt

MAX_LIMIT_S = 60.0  # of all tests of one problem
# Beyond the tests' own limit, which is kept within: starting a sandbox and the tester on a busy machine.
_DEADLINE_S = MAX_LIMIT_S + 45.0

_GRACE_S = 0.5  # beyond a test's limit, for the driver to report it
_TESTER_MB = 2048  # address space of one problem's assertions


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of one problem; ``meta["tests"]`` of a prompt holds these fields as a JSON object.

    ``kind`` says how a program is run:

    - ``"stdin"``: a script. ``inputs[i]`` (text) is given on standard input; standard output must be ``outputs[i]``:
      text, or a list of texts any of which is right. Compared word by word, see :func:`compare.same_output`; or by
      ``checker``, Python source for problems with many answers: it defines ``check(input, expected, output)``, which
      gives a bool or a score in [0, 1], or is a script that gets the paths of the three as arguments and prints one.
    - ``"call"``: defines the function ``fn`` (or a class ``Solution`` with such a method). ``inputs[i]`` is the list of
      its arguments, ``outputs[i]`` the JSON value it must return, see :func:`compare.same_value`.
    - ``"assert"``: defines what ``tests`` use: Python sources each of which passes if it runs without an exception,
      after ``setup`` (helpers, imports). ``fn`` names the functions under test, several separated by commas: needed
      where ``prefix`` has a stub of them or Python a built-in. Other names are, in this order, those of ``prefix``,
      built-in ones, modules of the standard library, and last the program's: it can't redefine what tests rest on.

    Attributes:
        kind: ``"stdin"``, ``"call"`` or ``"assert"``.
        inputs: Of ``stdin`` and ``call``.
        outputs: As many as inputs.
        checker: Of ``stdin``.
        fn: Of ``call`` and ``assert``.
        tests: Of ``assert``.
        setup: Of ``assert``; never seen by the program.
        prefix: Source executed before the program (HumanEval's prompt: imports, helpers, stub).
        time_limit: Seconds for one test of ``stdin`` and ``call``, 0 for no limit but the total.
        total_limit: Seconds for all tests, at most 60; a program that needs longer earns nothing [V1].
        memory_mb: Memory of the program.
    """

    kind: str
    inputs: list[Any] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    checker: str = ""
    fn: str = ""
    tests: list[str] = dataclasses.field(default_factory=list)
    setup: str = ""
    prefix: str = ""
    time_limit: float = 0.0
    total_limit: float = 5.0
    memory_mb: int = 512

    def __post_init__(self) -> None:
        """Raises ValueError where the fields make no tests."""
        if self.kind not in ("stdin", "call", "assert"):
            raise ValueError(f"tests of kind {self.kind!r}; known: stdin, call, assert")
        if self.kind == "assert" and not self.tests:
            raise ValueError("no tests")
        if self.kind != "assert" and not 0 < len(self.inputs) == len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs for {len(self.outputs)} outputs")
        if self.kind == "call" and not self.fn:
            raise ValueError("tests of kind 'call' need the name of a function, fn")
        if not 0 < self.total_limit <= MAX_LIMIT_S or not self.time_limit >= 0:
            raise ValueError(f"limits of {self.time_limit} and {self.total_limit} seconds (at most {MAX_LIMIT_S:g})")

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Tests:
        """From ``meta["tests"]``.

        Raises:
            ValueError: an unknown field, or fields that make no tests.
        """
        unknown = fields.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"tests have no field {', '.join(sorted(unknown))}")
        return cls(**fields)

    def __len__(self) -> int:
        return len(self.tests or self.inputs)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        scores: One per test, in [0, 1]; tests that did not run have 0.
        why: ``"ok"``, or why it earned nothing or was stopped: ``"syntax"``, ``"time"``, or words on how it ended.
        seconds: From the program's start to the verdict.
    """

    scores: list[float]
    why: str
    seconds: float

    @property
    def fraction(self) -> float:
        """The mean score over tests; 0 for a program that does not compile or needs more than the total limit [V1]."""
        return 0.0 if self.why in ("syntax", "time") else sum(self.scores) / len(self.scores)

    @property
    def passed(self) -> bool:
        """Whether every test is passed within the limits."""
        return self.fraction == 1.0


@register("code", default_format="code", deadline=_DEADLINE_S, check=sandbox.check)
def code(answer: str, prompt: Prompt) -> float:
    """The fraction of tests passed; 0 for a program that does not compile or runs longer than the total limit [V1].

    Raises:
        ValueError: the prompt's tests make no sense.
        SandboxError: the sandbox or the problem's own test code does not work.
    """
    return judge(answer, Tests.of(prompt.meta["tests"])).fraction


@register("code_all", default_format="code", deadline=_DEADLINE_S, check=sandbox.check)
def code_all(answer: str, prompt: Prompt) -> float:
    """1 if every test is passed, else 0; ends at the first that is not.

    Raises:
        ValueError, SandboxError: as :func:`code`.
    """
    return float(judge(answer, Tests.of(prompt.meta["tests"]), stop_early=True).passed)


def judge(program: str, tests: Tests, *, stop_early: bool = False) -> Verdict:
    """Runs ``program`` against ``tests``; ``stop_early`` ends at the first test that fails.

    Raises:
        SandboxError: the sandbox, or the problem's own test code, does not work; says nothing about the program.
    """
    scores = [0.0] * len(tests)
    why = "ok"
    start = time.monotonic()
    try:
        with _started(tests) as box:
            start = time.monotonic()
            deadline = start + tests.total_limit
            why = _load(box, program, tests, deadline)
            if why == "ok":
                run = {"stdin": _outputs, "call": _values, "assert": _assertions}[tests.kind]
                for i, score in enumerate(run(box, tests, deadline)):
                    scores[i] = score
                    if stop_early and score < 1.0:
                        break
    except OutOfTime:
        why = "time"
    except Ended as error:
        why = str(error)
    return Verdict(scores, why, time.monotonic() - start)


def _started(tests: Tests) -> Sandbox:
    cpu = int(tests.total_limit) + 2
    return Sandbox(sandbox.Limits(cpu_s=cpu, memory_mb=tests.memory_mb))


def _load(box: Sandbox, program: str, tests: Tests, deadline: float) -> str:
    """Compiles, and but for scripts executes, the program; "ok" or what is wrong with it."""
    program, prefix = (text.encode("utf-8", "replace").decode() for text in (program, tests.prefix))
    kind, data = _ask(box, deadline, "load", prefix, program, tests.kind != "stdin")
    if kind == b"v":
        return "ok"
    return "syntax" if kind == b"c" else f"it raises {data[:200].decode(errors='replace')}"


def _ask(box: Sandbox, deadline: float, *request: Any) -> tuple[bytes, bytes]:
    box.send(marshal.dumps(request, 2), deadline)
    return box.receive(deadline)


def _run(box: Sandbox, tests: Tests, deadline: float, *request: Any) -> bytes | None:
    """What the program wrote in one test; None if it failed or ran out of the test's time."""
    left = deadline - time.monotonic()
    seconds = min(tests.time_limit or left, left)
    is_last = seconds == left
    try:
        kind, data = _ask(box, deadline if is_last else time.monotonic() + seconds + _GRACE_S, *request, seconds)
    except OutOfTime:
        if is_last:
            raise
        raise Ended("the program stopped its driver") from None
    if kind == b"t" and is_last:
        raise OutOfTime
    return data[4:] if kind == b"o" and data[:4] == bytes(4) else None


def _outputs(box: Sandbox, tests: Tests, deadline: float) -> Iterator[float]:
    for text, expected in zip(tests.inputs, tests.outputs, strict=True):
        out = _run(box, tests, deadline, "script", text.encode())
        if out is None:
            yield 0.0
        elif tests.checker:
            yield _checked(text, expected, out, tests.checker, deadline)
        else:
            yield float(compare.same_output(out, expected))


def _checked(text: str, expected: Any, out: bytes, source: str, deadline: float) -> float:
    """The problem's checker on one output, apart from the program."""
    case = text, expected if isinstance(expected, str) else json.dumps(expected), out.decode("utf-8", "replace")
    with _tester() as box:
        kind, data = _ask(box, deadline, _TESTER_MB << 20, "checker", source, *case)
    (score,) = _results(kind, data, 1)
    return min(max(float(score), 0.0), 1.0)


def _values(box: Sandbox, tests: Tests, deadline: float) -> Iterator[float]:
    # Some sets write each value as a list of one; it shows only over all tests of the problem.
    wrapped = all(isinstance(o, list) and len(o) == 1 for o in tests.outputs)
    for args, expected in zip(tests.inputs, tests.outputs, strict=True):
        reply = _run(box, tests, deadline, "call", tests.fn, args)
        options = [expected, *expected] if wrapped else [expected]
        yield float(reply is not None and any(compare.same_value(reply, option) for option in options))


def _assertions(box: Sandbox, tests: Tests, deadline: float) -> Iterator[float]:
    """Relays questions of the tester to the program until the tester has its results."""
    names = [name.strip() for name in tests.fn.split(",") if name.strip()]
    ended: Ended | OutOfTime | None = None
    with _tester() as tester:
        job = (_TESTER_MB << 20, "assertions", tests.prefix, tests.setup, tests.tests, names)
        kind, data = _ask(tester, deadline, *job)
        while kind == b"q":
            try:
                if ended is None:
                    box.send(data, deadline)
                    reply = b"".join(box.receive(deadline))
            except (Ended, OutOfTime) as error:
                ended, reply = error, b"x"
            tester.send(reply, deadline + _GRACE_S)
            kind, data = tester.receive(deadline + _GRACE_S if ended else deadline)
    if ended is not None:
        raise ended
    if (kind, data) == (b"r", b"null"):
        raise Ended("the program's process talks nonsense")
    yield from map(float, _results(kind, data, len(tests)))


@contextmanager
def _tester() -> Iterator[Sandbox]:
    """The tester; ended if it is left in the middle of a job."""
    try:
        yield sandbox.tester()
    except Ended as error:
        sandbox.drop_tester()
        raise SandboxError(f"the tests' process: {error}") from None
    except BaseException:
        sandbox.drop_tester()
        raise


def _results(kind: bytes, data: bytes, count: int) -> list[Any]:
    results = json.loads(data) if kind == b"r" else f"unexpected reply {kind!r}"
    if not isinstance(results, list) or len(results) != count:
        raise SandboxError(f"the problem's tests do not run: {results}")
    return results
