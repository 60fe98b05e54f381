"""Tests of the public sets of programming problems, as the fields of :class:`brorl_jax.rewards.code.Tests`.

Each function takes a row as its set publishes it and returns the JSON object for ``meta["tests"]`` of a prompt.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from typing import Any

Row = dict[str, Any]


def humaneval(row: Row) -> Row:
    """HumanEval and HumanEval+: ``prompt`` (imports, helpers, stub), ``test`` (defines ``check``), ``entry_point``."""
    entry = row["entry_point"]
    return {
        "kind": "assert",
        "fn": entry,
        "prefix": row["prompt"] + "    pass\n",
        "setup": row["test"],
        "tests": [f"check({entry})"],
    }


def humaneval_gold(row: Row) -> str:
    """The whole program that the canonical solution completes."""
    return row["prompt"] + row["canonical_solution"]


def mbpp(row: Row) -> Row:
    """MBPP: ``test_list`` (assertions), ``test_setup_code``, ``code``. The model is shown the tests, for the names."""
    defined = (node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef))
    taken = {*dir(builtins), *sys.stdlib_module_names}  # which tests would look up elsewhere
    fn = ",".join(name for name in defined if name in taken)
    return {"kind": "assert", "fn": fn, "setup": row.get("test_setup_code") or "", "tests": list(row["test_list"])}


def input_output(tests: str | Row, *, time_limit: float = 0.0) -> Row:
    """APPS, TACO, Eurus (PRIME) and LiveCodeBench's like: ``inputs``, ``outputs`` and, for functions, ``fn_name``.

    A text of a script's input or output may be given as its list of lines; an argument of a function as JSON text. APPS
    puts the one value that is returned into a list: the judge takes either, where all outputs look so.

    Raises:
        ValueError: not as many outputs as inputs.
    """
    fields = json.loads(tests) if isinstance(tests, str) else tests
    inputs, outputs = list(fields["inputs"]), list(fields["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    if fn := fields.get("fn_name"):
        arguments = [[json.loads(line) for line in x.splitlines()] if isinstance(x, str) else x for x in inputs]
        values = [json.loads(x) if isinstance(x, str) and isinstance(inputs[0], str) else x for x in outputs]
        return {"kind": "call", "fn": fn, "inputs": arguments, "outputs": values, "time_limit": time_limit}
    return _stdin([(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)], time_limit)


def code_contests(row: Row) -> Row:
    """CodeContests: ``public_tests``, ``private_tests``, ``generated_tests`` with lists ``input`` and ``output``."""
    cases = [
        case
        for name in ("public_tests", "private_tests", "generated_tests")
        for case in zip(row[name]["input"], row[name]["output"], strict=True)
    ]
    limit = row.get("time_limit") or {}
    return _stdin(cases, limit.get("seconds", 0) + limit.get("nanos", 0) / 1e9)


def codeforces(row: Row) -> Row:
    """The open-r1 Codeforces set: ``official_tests`` of ``input`` and ``output``, limits, and perhaps a checker.

    Raises:
        ValueError: an interactive problem, or one that reads and writes files.
    """
    if row.get("input_mode") not in (None, "stdio") or row.get("interaction_format"):
        raise ValueError("neither files nor interaction can be judged")
    tests = _stdin([(t["input"], t["output"]) for t in row["official_tests"]], row.get("time_limit") or 0.0)
    if row.get("generated_checker"):
        tests["checker"] = row["generated_checker"]
    if row.get("memory_limit"):
        tests["memory_mb"] = int(row["memory_limit"])
    return tests


def _stdin(cases: list[tuple[str, str]], time_limit: float) -> Row:
    inputs, outputs = [i for i, _ in cases], [o for _, o in cases]
    return {"kind": "stdin", "inputs": inputs, "outputs": outputs, "time_limit": time_limit}


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))
