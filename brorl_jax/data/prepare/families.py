"""The training families: where their rows come from and how one becomes a prompt, a gold and what a verifier needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.data import files
from brorl_jax.rewards.formats import FORMATS
from brorl_jax.rewards.ifeval import check_instructions

Row = Mapping[str, Any]

BOXED = "{question}\nLet's think step by step and output the final answer within \\boxed{}."  # [V1] asks for both
TAG = "{question}\nGive the final answer within <answer> </answer> tags."  # [V1] the tags; the sentence is ours
PLAIN = "{question}"


class Skip(Exception):
    """This row can't be used; the argument is the reason that the manifest counts."""


@dataclasses.dataclass(frozen=True)
class Item:
    """What a family makes of a row.

    Attributes:
        question: Bare: what repeats and benchmark questions are recognised by.
        gold: Reference answer; "" where the verifier judges by ``meta`` alone.
        key: Of the row in its source; "" for its position.
        meta: What the verifier needs besides.
        history: Messages before the question.
        said: What stands for the question in the family's template, where that says more than the bare question.
        verifier: Where it is not the family's.
        source: Where it is not the family.
        confirm: Another answer to the question, which must score 1 against ``gold`` for the row to be kept.
    """

    question: str
    gold: str = ""
    key: str = ""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    history: Sequence[Mapping[str, str]] = ()
    said: str = ""
    verifier: str = ""
    source: str = ""
    confirm: str = ""


@dataclasses.dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub."""

    path: str
    name: str = ""
    split: str = "train"
    data_files: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """A training set.

    Attributes:
        convert: Makes an item of a row, or raises :class:`Skip`.
        verifier: Its full or short name.
        licence: Of the source, as its own page states it.
        about: One line: what it is, whose it is.
        prompt: Template of what the user says.
        hub: Where its rows are, if the user has the hub.
        generate: Makes its rows instead of reading them: ``(size, seed, tasks) -> rows``.
        benchmark: It is evaluated on: no row is left out as a repeat.
    """

    convert: Callable[[Row], Item]
    verifier: str
    licence: str
    about: str
    prompt: str = PLAIN
    hub: Hub | None = None
    generate: Callable[[int, int, Sequence[str]], Iterable[Row]] | None = None
    benchmark: bool = False


FAMILIES: dict[str, Family] = {}


def family(name: str, **fields: Any) -> Callable[[Callable[[Row], Item]], Callable[[Row], Item]]:
    """Registers the decorated conversion as the family ``name``; ``fields`` are those of :class:`Family`."""

    def add(convert: Callable[[Row], Item]) -> Callable[[Row], Item]:
        FAMILIES[name] = Family(convert, **fields)
        return convert

    return add


def column(row: Row, *names: str) -> Any:
    """The first of the columns that the row has and that is not null.

    Raises:
        ValueError: it has none of them: these are not the family's rows.
    """
    found = [name for name in names if name in row]
    if not found:
        raise ValueError(f"a row has none of the fields {', '.join(names)}; it has {', '.join(row)}")
    return next((row[name] for name in found if row[name] is not None), None)


def gold_text(answer: Any) -> str:
    """An answer as text; a table's 27.0 is 27.

    Raises:
        Skip: there is none, or there are several.
    """
    try:
        text = files.cell_text(answer)
    except ValueError as error:
        raise Skip("several_answers") from error
    if not text:
        raise Skip("no_gold")
    return text


def boxed(solution: Any) -> str:
    """What stands in the last box of a solution.

    Raises:
        Skip: there is no box.
    """
    return gold_text(FORMATS["boxed"].find(str(solution or ""), False))


# --- math --------------------------------------------------------------------------------------------------------


@family(
    "deepscaler",
    verifier="math:boxed",
    prompt=BOXED,
    hub=Hub("agentica-org/DeepScaleR-Preview-Dataset"),
    licence="MIT",
    about="ProRL's 40k competition problems: AIME and AMC before 2023, Omni-MATH, STILL",
)
def deepscaler(row: Row) -> Item:
    return Item(column(row, "problem"), gold_text(column(row, "answer")))


@family(
    "gsm8k",
    verifier="numeric:boxed",
    prompt=BOXED,
    hub=Hub("openai/gsm8k", "main"),
    licence="MIT",
    about="grade-school word problems, the 7,473 of the training split",
)
def gsm8k(row: Row) -> Item:
    _, marker, gold = str(column(row, "answer")).rpartition("####")
    return Item(column(row, "question"), gold_text(gold if marker else None))


@family(
    "math",
    verifier="math:boxed",
    prompt=BOXED,
    hub=Hub("DigitalLearningGmbH/MATH-lighteval"),
    licence="MIT by its authors; the hub took their own copy down in January 2025 on a claim by AoPS",
    about="MATH (Hendrycks et al. 2021), training split: competition problems; no part of MATH-500",
)
def math(row: Row) -> Item:
    answer = row["answer"] if "answer" in row else boxed(column(row, "solution"))
    difficulty = {key: row[key] for key in ("level", "difficulty", "type", "subject") if row.get(key) is not None}
    return Item(column(row, "problem"), gold_text(answer), meta=difficulty)


@family(
    "deepmath",
    verifier="math:boxed",
    prompt=BOXED,
    hub=Hub("zwhe99/DeepMath-103K"),
    licence="MIT",
    about="DeepMath-103K: hard problems with decontaminated, verifiable answers",
)
def deepmath(row: Row) -> Item:
    question, answer = column(row, "question", "prompt"), column(row, "final_answer", "ground_truth")
    difficulty = {"difficulty": float(row["difficulty"])} if row.get("difficulty") is not None else {}
    return Item(question, gold_text(answer), meta=difficulty)


# --- STEM --------------------------------------------------------------------------------------------------------

_SHORT = 120  # characters: a longer solution is a derivation, not an answer


@family(
    "scp116k",
    verifier="math:boxed",
    prompt=BOXED,
    hub=Hub("EricLu/SCP-116K"),
    licence="CC-BY-NC-SA-4.0 by its card: no commercial use",
    about="ProRL's 25k of 274k problems of science textbooks, answers confirmed by DeepSeek-R1's",
)
def scp116k(row: Row) -> Item:
    """The paper keeps rows where GPT-4o finds R1's answer to agree with the textbook; here the flags of the set say so,
    or else the boxed answer of a model's response that the rows carry must be the gold, checked by the verifier."""
    flags = [row[key] for key in row if key.startswith("is_") and "_same_with" in key]
    if flags and not any(flags):
        raise Skip("not_confirmed")
    solution = str(column(row, "matched_solution", "extracted_solution", "extract_solution", "solution") or "").strip()
    found = FORMATS["boxed"].find(solution, False)
    if not found and len(solution) > _SHORT:
        raise Skip("no_short_answer")
    response = next((row[key] for key in ("r1_response", "r1_solution") if row.get(key)), None)
    confirm = boxed(response) if response and not flags else ""
    return Item(column(row, "problem"), gold_text(found or solution), confirm=confirm)


# --- instruction following ---------------------------------------------------------------------------------------


@family(
    "nemotron_if",
    verifier="ifeval",
    hub=Hub(
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        data_files="RL/instruction_following/instruction_following.jsonl",
    ),
    licence="ODC-BY",
    about="ProRL's 10k of 56k prompts with IFEval's verifiable instructions; no format is asked for",
)
def nemotron_if(row: Row) -> Item:
    *history, last = column(row, "input", "messages")
    args = column(row, "args", "ground_truth")
    args = json.loads(args) if isinstance(args, str) else args
    kwargs = args.get("instruction_kwargs", args.get("kwargs"))
    # A table fills the fields that an instruction does not take with null.
    plain = [{k: v for k, v in (entry or {}).items() if v is not None} for entry in kwargs]
    meta = {"instruction_id_list": list(args["instruction_id_list"]), "kwargs": plain}
    try:
        check_instructions(meta["instruction_id_list"], plain)
    except ValueError as error:
        raise Skip("unknown_instruction") from error
    return Item(last["content"], meta=meta, history=history)


# --- what is prepared already ------------------------------------------------------------------------------------


@family(
    "prepared",
    verifier="",
    licence="of its sources",
    about="rows that are prepared already, to be joined, cleaned or filtered again",
)
def prepared(row: Row) -> Item:
    *history, last = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    question = row["meta"].get("question", last["content"])
    fields = {key: row[key] for key in ("gold", "verifier", "source", "meta")}
    return Item(question, key=row["id"], history=history, said=last["content"], **fields)
