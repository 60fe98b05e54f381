"""Where questions come from: sources by kind, each an indexable sequence of records.

A source is described by a mapping (a ``ConfigDict`` of ``config.data``). Every kind reads the common fields

========== ========= =====================================================================================
kind       required  one of :func:`kinds`
verifier   ""        ``<scorer>[:<answer format>]``, see :mod:`brorl_jax.rewards`; "" is the row's own, or the kind's
weight     1.0       share of the training mixture, relative to the other sources
prompt     {question} what the user says; ``{question}`` stands for the question, everything else is literal
heading    ""        what evaluations average the source under, such as ``math`` or ``reasoning_gym/algebra``
========== ========= =====================================================================================

and the fields of its own dataclass, below or in :mod:`brorl_jax.data.procedural`. An unknown field is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from brorl_jax import rewards
from brorl_jax.config import SOURCE_FIELDS
from brorl_jax.data import (
    files,
    procedural,  # noqa: F401  # registers its kinds
)
from brorl_jax.data.records import KINDS, Record, Source, hash_records, register


def kinds() -> list[str]:
    """The registered kinds, sorted."""
    return sorted(KINDS)


def check(name: str, config: Mapping[str, Any]) -> None:
    """Validates the description of a source without touching files or importing anything large.

    Raises:
        ValueError: unknown kind, field or verifier, a prompt without ``{question}``, a weight that is not positive, or
            a reasoning-gym task that can't be trained on.
    """
    cls, own = _own_fields(name, config)
    weight, prompt = config.get("weight", 1.0), config.get("prompt", "{question}")
    if not weight > 0:
        raise ValueError(f"data source {name!r}: weight must be positive, got {weight}")
    if prompt.count("{question}") != 1:
        raise ValueError(f"data source {name!r}: prompt must contain {{question}} exactly once, got {prompt!r}")
    try:
        if verifier := config.get("verifier") or cls.default_verifier:
            rewards.get(verifier)
        if hasattr(cls, "check"):
            cls.check(own)
    except ValueError as error:
        raise ValueError(f"data source {name!r}: {error}") from error


def load(name: str, config: Mapping[str, Any]) -> Source:
    """The source that ``config`` describes.

    Raises:
        ValueError: as :func:`check`, or the data is missing, empty or of another shape than described.
    """
    check(name, config)
    cls, own = _own_fields(name, config)
    try:
        source = cls(**own)
    except ValueError as error:
        raise ValueError(f"data source {name!r}: {error}") from error
    if len(source) == 0:
        why = f"left out: {dict(source.dropped)}" if source.dropped else "it is empty, or ends before its start"
        raise ValueError(f"data source {name!r} has no usable rows ({why})")
    return source


def verifier_name(config: Mapping[str, Any], record: Record) -> str:
    """The full name of the verifier that scores answers to a record of the source that ``config`` describes."""
    return rewards.get(config.get("verifier") or record.verifier or KINDS[config["kind"]].default_verifier).name


def _own_fields(name: str, config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    kind = config.get("kind", "")
    if kind not in KINDS:
        raise ValueError(f"data source {name!r}: unknown kind {kind!r}; known: {', '.join(kinds())}")
    cls = KINDS[kind]
    fields = {f.name for f in dataclasses.fields(cls) if f.init} | set(SOURCE_FIELDS)
    for key in config:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; fields: {', '.join(sorted(fields))}"
            raise ValueError(f"data source {name!r}: kind {kind!r} has no field {key!r}{hint}")
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.init
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in config
    ]
    if missing:
        raise ValueError(f"data source {name!r}: kind {kind!r} needs {', '.join(missing)}")
    return cls, {key: config[key] for key in config if key not in SOURCE_FIELDS}


# --- tables ------------------------------------------------------------------------------------------------------

# Fields of well-known files: what the user sets wins. "tolerance" names a column with each row's own.
PRESETS: dict[str, dict[str, str]] = {
    "gsm8k": {"gold": "after:####"},
    "svamp": {"question": "{Body}. {Question}", "answer": "Answer"},
    "math_train": {"question": "problem", "verifier": "math"},
    "math500": {"question": "problem", "verifier": "math"},
    "deepmath": {"question": "prompt", "answer": "ground_truth", "verifier": "math"},
    "aime": {"question": "problem", "answer": "expected_answer"},
    "amc23": {"question": "problem"},
    "minerva": {"question": "problem", "answer": "solution", "gold": "boxed", "verifier": "math"},
    "olympiadbench": {"answer": "final_answer", "tolerance": "error", "verifier": "math"},
    "mmlu_pro": {"options": "options", "verifier": "choice"},
}


@dataclasses.dataclass
class _Table:
    """Rows with a question and an answer column.

    Attributes:
        preset: Name in :data:`PRESETS`; supplies the verifier and the fields below where they are left empty.
        question: Column with the question, or several columns as ``"{Body} {Question}"``; "" is ``question``.
        answer: Column with the answer; "" is ``answer``.
        gold: How to get the gold from the answer: "" as it is, ``after:<marker>`` the text after the last marker,
            ``regex:<pattern>`` the first group of the last match, ``boxed`` the content of the last ``\\boxed{}``. Rows
            without a gold are left out and counted.
        options: Column with the list of a multiple-choice question's options. They are put below the question, with
            letters; an answer column that holds a whole number counts them from 0.
        start: First row to use.
        size: Number of rows to use from there on; 0 is all.
        tolerance: Largest absolute difference that the ``numeric`` and ``math`` verifiers accept, in the gold's unit.
        relative: The same as a share of the larger number.
    """

    preset: str = ""
    question: str = ""
    answer: str = ""
    gold: str = ""
    options: str = ""
    start: int = 0
    size: int = 0
    tolerance: float = 0.0
    relative: float = 0.0

    default_verifier: ClassVar[str] = "numeric:boxed"
    lazy: ClassVar[bool] = False

    @classmethod
    def check(cls, own: Mapping[str, Any]) -> None:
        preset, gold = own.get("preset", ""), own.get("gold", "")
        if preset and preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; known: {', '.join(sorted(PRESETS))}")
        if gold and gold != "boxed" and not gold.startswith(("after:", "regex:")):
            raise ValueError(f"gold must be empty, 'boxed', 'after:<marker>' or 'regex:<pattern>', got {gold!r}")
        if gold == "after:":
            raise ValueError("gold 'after:' needs the marker that the gold answer stands behind, such as 'after:####'")
        if gold.startswith("regex:") and _compiled(gold).groups < 1:
            raise ValueError(f"gold {gold!r} needs a group (...) around the gold answer")

    def rows(self) -> Sequence[Mapping[str, Any]]:
        raise TypeError("a table kind defines rows()")

    def __post_init__(self) -> None:
        preset = PRESETS.get(self.preset, {})
        question = self.question or preset.get("question", "question")
        answer = self.answer or preset.get("answer", "answer")
        extract = self.gold or preset.get("gold", "")
        options = self.options or preset.get("options", "")
        rows = self.rows()
        stop = self.start + self.size if self.size else len(rows)
        self.dropped: dict[str, int] = {}
        self._records: list[Record] = []
        for index in range(self.start, min(stop, len(rows))):
            row = rows[index]
            try:
                text, gold = _question(row, question), _gold(_column(row, answer), extract)
                choices = _options(row, options) if options else []
                own = row.get(preset["tolerance"]) if "tolerance" in preset else None
                tolerance = self.tolerance or float(own or 0)
            except ValueError as error:
                raise ValueError(f"row {index} {error}") from error
            if not text or not gold:
                reason = "no_gold" if text else "no_question"
                self.dropped[reason] = self.dropped.get(reason, 0) + 1
                continue
            meta: dict[str, Any] = {"tolerance": tolerance, "relative": self.relative}
            meta = {key: value for key, value in meta.items() if value}
            if options:
                meta |= {"question": text, "options": choices}
                lettered = list(zip(rewards.choice.LETTERS, meta["options"], strict=False))
                text = "\n".join((text, "", *(f"{letter}. {option}" for letter, option in lettered)))
                gold = lettered[int(gold)][0] if gold.isdecimal() and int(gold) < len(lettered) else gold
            self._records.append(Record(str(index), text, gold, meta, preset.get("verifier", "")))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def content_hash(self) -> str:
        return hash_records(self._records)


@register("jsonl")
@dataclasses.dataclass
class JsonLines(_Table):
    """A file of JSON lines or one JSON list, plain or gzipped. ``path`` is relative to the working directory."""

    path: str = dataclasses.field(kw_only=True)

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return files.read_rows(self.path)


@register("prepared")
@dataclasses.dataclass
class Prepared:
    """What ``python -m brorl_jax.data.prepare`` wrote: every row brings its prompt, verifier and gold with it.

    Attributes:
        path: The directory, or its data file, relative to the working directory.
        start: First row to use.
        size: Number of rows to use from there on; 0 is all.
    """

    path: str
    start: int = 0
    size: int = 0

    default_verifier: ClassVar[str] = ""
    lazy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        rows = files.read_prepared(self.path)
        self.dropped: dict[str, int] = {}
        self._records = [_prepared_record(row) for row in rows[self.start :][: self.size or None]]
        for name in {record.verifier for record in self._records}:
            rewards.get(name)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def content_hash(self) -> str:
        return hash_records(self._records)


def _prepared_record(row: Mapping[str, Any]) -> Record:
    *history, last = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    return Record(row["id"], last["content"], row["gold"], row["meta"], row["verifier"], tuple(history))


@register("huggingface")
@dataclasses.dataclass
class HuggingFace(_Table):
    """A data set of the Hugging Face hub, or a local directory that ``datasets`` reads."""

    path: str = dataclasses.field(kw_only=True)
    name: str = ""
    split: str = "train"
    revision: str = ""

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return files.read_hub(self.path, self.name, self.split, self.revision)


def _compiled(gold: str) -> re.Pattern[str]:
    try:
        return re.compile(gold[6:])
    except re.error as error:
        raise ValueError(f"gold {gold!r} is no regular expression: {error}") from error


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"has no field {name!r}; it has {', '.join(map(repr, row))}")
    return row[name]


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = _column(row, name)
    try:
        return files.cell_text(value)
    except ValueError as error:
        raise ValueError(f"field {name!r} {error}") from error


def _question(row: Mapping[str, Any], spec: str) -> str:
    if "{" not in spec:
        return _cell(row, spec)

    def column(match: re.Match[str]) -> str:
        text = _cell(row, match[1])
        return text if text.endswith((".", "?", "!")) else text + match[2]  # one full stop where two columns meet

    return re.sub(r"\{(\w+)\}(\.?)", column, spec)


def _options(row: Mapping[str, Any], name: str) -> list[str]:
    options = _column(row, name)
    if not isinstance(options, (list, tuple)):
        raise ValueError(f"field {name!r} must be the list of options, got {options!r:.80}")
    return [str(option) for option in options]


def _gold(answer: Any, extract: str) -> str:
    """The gold answer, "" where there is none; of a list, its only item.

    Raises:
        ValueError: several answers, or an object.
    """
    if isinstance(answer, list) and len(answer) < 2:
        answer = answer[0] if answer else None
    try:
        text = files.cell_text(answer)
    except ValueError as error:
        raise ValueError(f"has an answer that {error}; a gold is one answer") from error
    if extract == "boxed":
        return (rewards.FORMATS["boxed"].find(text, False) or "").strip()
    if extract.startswith("after:"):
        _, marker, text = text.rpartition(extract[6:])
        return text.strip() if marker else ""
    if extract.startswith("regex:"):
        found = list(re.finditer(extract[6:], text))
        return (found[-1][1] or "").strip() if found else ""
    return text
