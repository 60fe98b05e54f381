"""Benchmarks: what evaluations ask. Every row is kept, repeats included; never train on these."""

from __future__ import annotations

import hashlib
from typing import Any

from brorl_jax.data import code_tests
from brorl_jax.data.prepare.code import CODE
from brorl_jax.data.prepare.families import BOXED, Hub, Item, Row, Skip, boxed, column, family, gold_text

_MATH = {"verifier": "math:boxed", "prompt": BOXED, "benchmark": True}
_CODE = {"verifier": "code", "prompt": CODE, "benchmark": True}
_PLUS_LIMIT = 30.0  # seconds for all tests; ours: EvalPlus has thousands, and five canonical solutions need more than 5
_CHOICE = (
    "{question}\n\nThink step by step. End with a line 'Answer: X', where X is the letter of the right option."  # ours
)


def _expected(row: Row) -> Item:
    answer = column(row, "expected_answer", "answer", "final_answer")
    if isinstance(answer, list) and len(answer) == 1:  # OlympiadBench
        answer = answer[0]
    tolerance = {"tolerance": float(row["error"])} if row.get("error") else {}  # OlympiadBench, of one row
    return Item(column(row, "problem", "question"), gold_text(answer), meta=tolerance)


_AIME = "problems © Mathematical Association of America: evaluation only"
for _name, _hub, _licence, _about in (
    ("aime24", Hub("HuggingFaceH4/aime_2024"), _AIME, "30 problems of AIME I and II, 2024"),
    ("aime25", Hub("yentinglin/aime_2025"), _AIME, "30 problems of AIME I and II, 2025"),
    ("amc23", Hub("math-ai/amc23", split="test"), _AIME, "40 problems of AMC 12, 2023"),
    ("math500", Hub("HuggingFaceH4/MATH-500", split="test"), "MIT by its authors", "500 problems of MATH's test split"),
    ("olympiadbench", None, "MIT", "674 English text-only problems of OlympiadBench with final answers"),
):
    family(_name, **_MATH, hub=_hub, licence=_licence, about=_about)(_expected)


@family("minerva", **_MATH, licence="CC BY-NC-SA 4.0 (MIT OpenCourseWare)", about="272 problems of MIT courses")
def minerva(row: Row) -> Item:
    return Item(column(row, "problem"), boxed(column(row, "solution")))


@family(
    "gsm8k_test",
    verifier="numeric:boxed",
    prompt=BOXED,
    benchmark=True,
    hub=Hub("openai/gsm8k", "main", split="test"),
    licence="MIT",
    about="the 1,319 grade-school word problems of the test split",
)
def gsm8k_test(row: Row) -> Item:
    _, marker, gold = str(column(row, "answer")).rpartition("####")
    return Item(column(row, "question"), gold_text(gold if marker else None))


@family("humaneval", **_CODE, hub=Hub("openai/openai_humaneval", split="test"), licence="MIT", about="164 functions")
def humaneval(row: Row) -> Item:
    stub = f"Complete this function.\n```python\n{column(row, 'prompt')}```"
    meta = {"tests": code_tests.humaneval(dict(row))}
    return Item(stub, code_tests.humaneval_gold(dict(row)), key=_key(row), meta=meta)


@family(
    "humanevalplus",
    **_CODE,
    hub=Hub("evalplus/humanevalplus", split="test"),
    licence="Apache-2.0",
    about="HumanEval with many more tests; HumanEval/32's test is wrong in some releases and then left out",
)
def humanevalplus(row: Row) -> Item:
    item = humaneval(row)
    item.meta["tests"]["total_limit"] = _PLUS_LIMIT
    return item


@family(
    "mbppplus",
    **_CODE,
    hub=Hub("evalplus/mbppplus", split="test"),
    licence="Apache-2.0",
    about="378 short functions of MBPP with many more tests",
)
def mbppplus(row: Row) -> Item:
    """The prompt shows the first of MBPP's tests: it says what the function is called and takes."""
    shown = column(row, "test_list")[0]
    tests = {"kind": "assert", "fn": code_tests.mbpp(dict(row))["fn"], "setup": "", "tests": [column(row, "test")]}
    tests["total_limit"] = _PLUS_LIMIT
    question = column(row, "prompt", "text").strip()
    said = f"{question}\nIt must pass tests such as `{shown}`."
    return Item(question, column(row, "code").replace("\r\n", "\n"), key=_key(row), meta={"tests": tests}, said=said)


def _program(row: Row, tests: dict[str, Any]) -> Item:
    if not tests["inputs"]:
        raise Skip("no_tests")
    question = column(row, "question", "description", "prompt")
    name = f"\n\nName the function `{tests['fn']}`." if tests.get("fn") else ""
    return Item(question, key=_key(row), meta={"tests": tests}, said=question + name)


@family("apps", **_CODE, hub=Hub("codeparrot/apps", split="test"), licence="MIT", about="APPS, test split")
def apps(row: Row) -> Item:
    """``input_output`` as APPS and TACO write it."""
    try:
        return _program(row, code_tests.input_output(column(row, "input_output")))
    except (ValueError, KeyError, TypeError) as error:
        raise Skip("tests_unreadable") from error


@family("taco", **_CODE, hub=Hub("BAAI/TACO", split="test"), licence="Apache-2.0", about="TACO, test split")
def taco(row: Row) -> Item:
    return apps(row)


@family(
    "codecontests",
    **_CODE,
    hub=Hub("deepmind/code_contests", split="test"),
    licence="CC BY 4.0",
    about="CodeContests, test split",
)
def codecontests(row: Row) -> Item:
    return _program(row, code_tests.code_contests(dict(row)))


@family(
    "codeforces",
    **_CODE,
    hub=Hub("open-r1/codeforces", "verifiable", split="test"),
    licence="CC BY 4.0",
    about="Codeforces problems with their checkers, test split",
)
def codeforces(row: Row) -> Item:
    try:
        return _program(row, code_tests.codeforces(dict(row)))
    except ValueError as error:
        raise Skip("interactive_or_files") from error


@family(
    "ifeval", verifier="ifeval", benchmark=True, hub=Hub("google/IFEval"), licence="Apache-2.0", about="541 prompts"
)
def ifeval(row: Row) -> Item:
    kwargs = [{k: v for k, v in (entry or {}).items() if v is not None} for entry in column(row, "kwargs")]
    meta = {"instruction_id_list": list(column(row, "instruction_id_list")), "kwargs": kwargs}
    return Item(column(row, "prompt"), key=_key(row), meta=meta)


@family(
    "gpqa",
    verifier="choice",
    prompt=_CHOICE,
    benchmark=True,
    hub=Hub("Idavidrein/gpqa", "gpqa_diamond"),
    licence="CC BY 4.0; its authors ask not to publish the questions",
    about="198 graduate science questions (diamond); options are shuffled by the question's hash",
)
def gpqa(row: Row) -> Item:
    question = column(row, "Question")
    wrong = [row[f"Incorrect Answer {i}"] for i in (1, 2, 3)]
    options = [str(option).strip() for option in (column(row, "Correct Answer"), *wrong)]
    order = sorted(options, key=lambda option: hashlib.sha256(f"{question}\n{option}".encode()).digest())
    gold = "ABCD"[order.index(options[0])]
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", order, strict=True))
    return Item(f"{question.strip()}\n\n{listed}", gold, meta={"options": order})


def _key(row: Row) -> str:
    found = next(
        (row[name] for name in ("task_id", "problem_id", "id", "key", "name") if row.get(name) is not None), ""
    )
    return str(found).replace("/", "-")
