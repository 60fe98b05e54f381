"""Programs: their tests in the form of :class:`brorl_jax.rewards.code.Tests`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from brorl_jax.data import code_tests
from brorl_jax.data.prepare.families import Hub, Item, Row, Skip, column, family

# [V1] asks for triple backticks; the sentence is ours.
CODE = "{question}\n\nWrite Python code that solves the problem, between lines of triple backticks."

# The sentence that Eurus-2 puts after its problems; white space differs from row to row.
_EURUS_REQUEST = re.compile(r"\s*Write Python code to solve the problem\. Present the code in.*\Z", re.DOTALL)
_MBPP_TRAIN = range(601, 975)  # task ids; 1 to 600 are few-shot examples, test and validation


@family(
    "eurus_code",
    verifier="code",
    prompt=CODE,
    hub=Hub("PRIME-RL/Eurus-2-RL-Data"),
    licence="MIT by its card; problems of APPS, CodeContests, TACO and Codeforces",
    about="ProRL's 24k of the 27k programming problems of Eurus-2-RL-Data, with their tests",
)
def eurus_code(row: Row) -> Item:
    if column(row, "ability") != "code":
        raise Skip("not_code")
    question = _EURUS_REQUEST.sub("", column(row, "prompt")[-1]["content"]).strip()
    tests = _tests(column(row, "reward_model")["ground_truth"])
    return Item(question, meta={"origin": column(row, "data_source"), "tests": tests}, said=_with_name(question, tests))


def _tests(truth: Any) -> dict[str, Any]:
    """The row's tests.

    Raises:
        Skip: there are none, or they can't be read.
    """
    try:
        tests = code_tests.input_output(truth)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Skip("tests_unreadable") from error
    if not tests["inputs"]:
        raise Skip("no_tests")
    return tests


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
    question, shown = column(row, "text").strip(), column(row, "test_list")[0]
    return Item(
        question,
        gold=column(row, "code").replace("\r\n", "\n"),
        key=str(number),
        meta={"tests": code_tests.mbpp(dict(row))},
        said=f"{question}\nIt must pass tests such as `{shown}`.",
    )
