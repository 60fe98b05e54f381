"""Programs: their tests in the form of :class:`brorl_jax.rewards.judge.Tests`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from brorl_jax.data.prepare.families import Hub, Item, Row, Skip, column, family

CODE = (
    "{question}\n\nWrite Python code that solves the problem, between lines of triple backticks."  # [V1] asks for them
)

# The sentence that Eurus-2 puts after its problems; white space differs from row to row.
_EURUS_REQUEST = re.compile(r"\s*Write Python code to solve the problem\. Present the code in.*\Z", re.DOTALL)
_MBPP_TRAIN = range(601, 975)  # task ids; 1 to 600 are few-shot examples, test and validation


@family(
    "eurus_code",
    verifier="code",
    prompt=CODE,
    hub=Hub("PRIME-RL/Eurus-2-RL-Data"),
    licence="MIT by its card; problems of APPS, CodeContests, TACO and Codeforces",
    about="[V1] 24k of the 27k programming problems of Eurus-2-RL-Data, with their tests",
)
def eurus_code(row: Row) -> Item:
    if column(row, "ability") != "code":
        raise Skip("not_code")
    question = _EURUS_REQUEST.sub("", column(row, "prompt")[-1]["content"]).strip()
    truth = column(row, "reward_model")["ground_truth"]
    tests = _tests(json.loads(truth) if isinstance(truth, str) else truth)
    return Item(question, meta={"origin": column(row, "data_source"), "tests": tests}, said=_with_name(question, tests))


def _tests(found: Mapping[str, Any]) -> dict[str, Any]:
    """From ``{"inputs", "outputs"[, "fn_name"]}``, as APPS and its descendants write it.

    Raises:
        Skip: there are none, or they are not one output for every input.
    """
    inputs, outputs, fn = found.get("inputs") or [], found.get("outputs") or [], found.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise Skip("no_tests")
    if not fn:
        return {"kind": "stdin", "inputs": list(map(_text, inputs)), "outputs": list(map(_text, outputs))}
    values = list(map(_value, outputs))
    if all(isinstance(value, list) and len(value) == 1 for value in values):
        values = [value[0] for value in values]  # the value is wrapped in a list
    return {"kind": "call", "fn": fn, "inputs": list(map(_arguments, inputs)), "outputs": values}


def _text(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def _arguments(entry: Any) -> list[Any]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(entry, list):
        return entry
    try:
        return [json.loads(line) for line in entry.splitlines() if line.strip()]
    except (AttributeError, ValueError) as error:
        raise Skip("arguments_unreadable") from error


def _value(entry: Any) -> Any:
    """A value, or its JSON; text that is no JSON stands for itself."""
    try:
        return json.loads(entry) if isinstance(entry, str) else entry
    except ValueError:
        return entry


def _with_name(question: str, tests: Mapping[str, Any]) -> str:
    """A function can only be found under its name: the question says it, or this does."""
    fn = tests.get("fn", "")
    return question if not fn or re.search(rf"\b{re.escape(fn)}\b", question) else f"{question}\n\nName it `{fn}`."


@family(
    "mbpp",
    verifier="code",
    prompt=CODE,
    hub=Hub("google-research-datasets/mbpp", "full"),
    licence="CC-BY-4.0",
    about="374 short functions, the training split of MBPP (task ids 601 to 974)",
)
def mbpp(row: Row) -> Item:
    """The prompt shows the first of the three tests: it says what the function is called and takes."""
    number = int(column(row, "task_id"))
    if number not in _MBPP_TRAIN:
        raise Skip("not_training_split")
    tests, program = list(column(row, "test_list")), column(row, "code").replace("\r\n", "\n")
    question = column(row, "text").strip()
    setup = str(row.get("test_setup_code") or "").replace("\r\n", "\n")
    return Item(
        question,
        gold=program,
        key=str(number),
        meta={"tests": {"kind": "assert", "fn": _under_test(program, tests), "tests": tests, "setup": setup}},
        said=f"{question}\nIt must pass tests such as `{tests[0]}`.",
    )


def _under_test(program: str, tests: list[str]) -> str:
    """The program's functions that the tests call, separated by commas."""
    defined = {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.id
        for test in tests
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return ",".join(sorted(defined & called))
