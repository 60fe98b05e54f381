"""From a family's rows to a prepared directory: convert, check golds, clean, filter, write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import brorl_jax
from brorl_jax import atomic, rewards
from brorl_jax.data import files
from brorl_jax.data.prepare import passrates, similar
from brorl_jax.data.prepare.families import Family, Item, Skip
from brorl_jax.types import Prompt

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is done to the rows; recorded in the manifest.

    Attributes:
        near: Least similarity of two rows that makes the later one a repeat; 0 keeps repeats, see ``similar``.
        templates: Rows that differ only in their numbers and gold are repeats, too.
        overlap: Least share of a benchmark question in a row that makes the row unfit.
        keep: Least and largest pass rate.
        unmeasured: ``keep`` or ``drop`` rows without a pass rate.
        limit: At most so many rows, chosen by a hash of their ids; 0 is all.
    """

    near: float = similar.NEAR
    templates: bool = False
    overlap: float = similar.OVERLAP
    keep: tuple[float, float] = (0.0, 1.0)
    unmeasured: str = "keep"
    limit: int = 0


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Questions that must not be trained on, with where each one stands, and the files they come from."""

    questions: list[str]
    places: list[str]
    sources: list[Row]


@dataclasses.dataclass
class Result:
    """Rows that are kept, and what became of the others: counts by reason, and what a reader should see of them."""

    rows: list[Row]
    rows_in: int
    dropped: Counter[str]
    failures: list[str] = dataclasses.field(default_factory=list)
    repeats: list[Row] = dataclasses.field(default_factory=list)
    benchmark: list[Row] = dataclasses.field(default_factory=list)

    def drop(self, reasons: Mapping[int, str]) -> None:
        """Leaves out the rows at the given places."""
        self.dropped.update(reasons.values())
        self.rows = [row for at, row in enumerate(self.rows) if at not in reasons]


def convert(
    name: str, fam: Family, rows: Iterable[Mapping[str, Any]], *, verifier: str = "", prompt: str = ""
) -> Result:
    """Rows in the schema of :mod:`brorl_jax.data.files`, each with a gold that its own verifier accepts.

    Args:
        name: Of the family.
        fam: Its description.
        rows: Of the source.
        verifier: In place of the family's.
        prompt: Template in place of the family's.

    Raises:
        ValueError: the rows are not the family's, an id comes twice, or a verifier is unknown.
    """
    result = Result([], 0, Counter())
    seen: set[str] = set()
    confirms: list[str] = []
    for position, raw in enumerate(rows):
        result.rows_in += 1
        try:
            item = fam.convert(raw)
            row = _row(name, position, item, verifier or item.verifier or fam.verifier, prompt or fam.prompt)
            files.check_row(row)
        except Skip as reason:
            result.dropped[str(reason)] += 1
            continue
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            kind = "" if isinstance(error, ValueError) else f"of another shape than expected, {type(error).__name__}: "
            raise ValueError(f"{name}, row {position}: {kind}{error}") from error
        if row["id"] in seen:
            raise ValueError(f"{name}, row {position}: the id {row['id']!r} comes twice")
        seen.add(row["id"])
        result.rows.append(row)
        confirms.append(item.confirm)
    _drop_wrong_golds(result, confirms)
    return result


def _row(name: str, position: int, item: Item, verifier: str, template: str) -> Row:
    question = files.cell_text(item.question)
    if not question:
        raise Skip("no_question")
    prompt = template.replace("{question}", item.said.strip() or question)
    said = {"role": "user", "content": prompt}
    text: Row = {"messages": [*map(dict, item.history), said]} if item.history else {"prompt": prompt}
    return {
        "id": item.key if item.source else f"{name}-{item.key or position}",
        **text,
        "gold": item.gold,
        "verifier": rewards.get(verifier).name,
        "source": item.source or name,
        "meta": {**item.meta, **({} if prompt == question else {"question": question})},
    }


def question(row: Mapping[str, Any]) -> str:
    """The bare question of a prepared row."""
    said = row["messages"][-1]["content"] if "messages" in row else row["prompt"]
    return row["meta"].get("question", said)


def _drop_wrong_golds(result: Result, confirms: Sequence[str]) -> None:
    """Leaves out rows whose gold, written as an answer, does not score 1, or whose confirming answer does not."""
    refused: dict[int, str] = {}
    claims: list[tuple[int, str, Prompt, str]] = []  # row, what is wrong if it is refused, prompt, response
    for at, (row, confirm) in enumerate(zip(result.rows, confirms, strict=True)):
        verifier = rewards.get(row["verifier"])
        prompt = Prompt(row["id"], np.zeros(1, np.int32), "", row["gold"], verifier.name, row["source"], row["meta"])
        try:
            gold = verifier.render(prompt)
        except Exception as error:  # a verifier that can't read the row's meta says so in its own way
            refused[at] = "gold_fails"
            result.failures.append(_failure(row, "gold_fails", f"{type(error).__name__}: {error}"))
            continue
        if gold is not None:
            claims.append((at, "gold_fails", prompt, gold))
        if confirm:
            claims.append((at, "not_confirmed", prompt, verifier.format.render(confirm)))
    answers = rewards.refusals([(prompt, response) for _, _, prompt, response in claims])
    failing = [claim for claim, refusal in zip(claims, answers, strict=True) if refusal]
    # Once more: limits of programs and graders are wall clock, and the machine may have been busy.
    again = rewards.refusals([(prompt, response) for _, _, prompt, response in failing])
    for (at, reason, _, _), refusal in zip(failing, again, strict=True):
        if refusal and at not in refused:
            refused[at] = reason
            result.failures.append(_failure(result.rows[at], reason, refusal))
    result.drop(refused)


def _failure(row: Row, reason: str, refusal: str) -> str:
    return f"`{row['id']}`, {reason.replace('_', ' ')}: {_one_line(refusal)}"


def clean(result: Result, benchmark: Benchmark, rates: Mapping[str, float], options: Options) -> None:
    """Leaves out repeats, benchmark questions, prompts that are too hard or too easy, and what is beyond the limit.

    Raises:
        ValueError: no pass rate is of any row, so that the filter would do nothing.
    """
    if rates and result.rows and not any(row["id"] in rates for row in result.rows):
        raise ValueError(
            f"--pass-rates: none of the {len(rates)} prompts measured, such as {next(iter(rates))!r}, is one of these "
            f"rows, such as {result.rows[0]['id']!r}; measure on this prepared set (a source of kind 'prepared')"
        )
    if options.near:
        _drop_repeats(result, options)
    if benchmark.questions:
        _drop_benchmark(result, benchmark, options)
    if rates:
        verdicts = enumerate(passrates.verdict(rates, row, options.keep, options.unmeasured) for row in result.rows)
        result.drop({at: why for at, why in verdicts if why})
    if options.limit and len(result.rows) > options.limit:
        order = sorted(range(len(result.rows)), key=lambda at: hashlib.sha256(result.rows[at]["id"].encode()).digest())
        result.drop(dict.fromkeys(order[options.limit :], "beyond_limit"))


def _drop_repeats(result: Result, options: Options) -> None:
    questions = list(map(question, result.rows))
    reasons: dict[int, str] = {}
    first: dict[str, int] = {}
    for at, text in enumerate(questions):
        original = first.setdefault(_identity(result.rows[at], text), at)
        if original != at:
            conflict = result.rows[at]["gold"] != result.rows[original]["gold"]
            reasons[at] = "repeat_with_another_gold" if conflict else "repeat"
            result.repeats.append(_pair(result.rows[at], result.rows[original], 1.0, reasons[at]))
    left = [at for at in range(len(questions)) if at not in reasons]
    keys = [_key(result.rows[at], questions[at], options.templates) for at in left]
    for match in similar.near_duplicates([questions[at] for at in left], keys, options.near):
        at, original = left[match.row], left[match.other]
        reasons[at] = "near_repeat"
        result.repeats.append(_pair(result.rows[at], result.rows[original], match.score, "near_repeat"))
    result.drop(reasons)


def _identity(row: Row, text: str) -> str:
    """Of exact repeats: the words of the question and what was said before it."""
    return json.dumps([similar.words(text), row.get("messages", [])[:-1]])


def _key(row: Row, text: str, templates: bool) -> str:
    """What near repeats agree in: what was said before, what the verifier judges by and, but for templates, numbers
    and gold."""
    meta = {key: value for key, value in row["meta"].items() if key in ("instruction_id_list", "kwargs", "task")}
    exact = [] if templates else [similar.numbers(text), row["gold"]]
    return json.dumps([row.get("messages", [])[:-1], meta, *exact], sort_keys=True)


def _drop_benchmark(result: Result, benchmark: Benchmark, options: Options) -> None:
    questions = list(map(question, result.rows))
    reasons: dict[int, str] = {}
    for match in similar.overlaps(questions, benchmark.questions, options.overlap, options.near or similar.NEAR):
        reasons[match.row] = "in_benchmark"
        other = {"id": benchmark.places[match.other], "text": benchmark.questions[match.other]}
        row = result.rows[match.row]
        result.benchmark.append({"id": row["id"], "text": questions[match.row], "score": match.score, "other": other})
    result.drop(reasons)


def _pair(row: Row, original: Row, score: float, reason: str) -> Row:
    other = {"id": original["id"], "text": question(original)}
    return {"id": row["id"], "text": question(row), "score": score, "other": other, "reason": reason}


def write(out: Path, name: str, result: Result, description: Mapping[str, Any]) -> Row:
    """Writes the directory in one step and returns its manifest, a pure function of the inputs.

    Raises:
        ValueError: no row is left, or ``out`` exists and is not a prepared data set.
    """
    if not result.rows:
        raise ValueError(f"{name}: no row is left of {result.rows_in} ({dict(result.dropped)})")
    if out.exists() and not (out / files.MANIFEST).is_file():
        raise ValueError(f"--out {out} exists and is not a prepared data set; choose another directory")
    with atomic.replace_directory(out) as partial:
        data = partial / files.DATA
        data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result.rows), encoding="utf-8")
        manifest = {
            "name": name,
            "made_by": f"brorl_jax {brorl_jax.__version__}",
            "rows_in": result.rows_in,
            "rows_out": len(result.rows),
            "dropped": dict(sorted(result.dropped.items())),
            "verifiers": dict(sorted(Counter(row["verifier"] for row in result.rows).items())),
            "sources": dict(sorted(Counter(row["source"] for row in result.rows).items())),
            **description,
            "sha256": files.sha256(data),
        }
        (partial / files.REPORT).write_text(_report(manifest, result), encoding="utf-8")
        (partial / files.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def _report(manifest: Row, result: Result) -> str:
    counts = [f"| {reason} | {count} |" for reason, count in manifest["dropped"].items()]
    lines = [
        f"# {manifest['name']}: {manifest['rows_out']} of {manifest['rows_in']} rows kept",
        "",
        *(["| left out | rows |", "|---|---|", *counts] if counts else ["Nothing was left out."]),
        "",
        *(["## Golds that fail", "", *(f"- {line}" for line in result.failures), ""] if result.failures else []),
        *_listing("Questions of benchmarks", "stands in", result.benchmark),
        *_listing("Repeats", "repeats", result.repeats),
    ]
    return "\n".join(lines)


def _listing(title: str, verb: str, pairs: Sequence[Row]) -> list[str]:
    if not pairs:
        return []
    lines = [f"## {title} ({len(pairs)})", ""]
    for pair in pairs:
        reason = f", {pair['reason'].replace('_', ' ')}" if "reason" in pair else ""
        lines.append(f"- `{pair['id']}` {verb} `{pair['other']['id']}` (score {pair['score']:.2f}{reason})")
        lines += [f"  - {_one_line(pair['text'])}", f"  - {_one_line(pair['other']['text'])}"]
    return [*lines, ""]


def _one_line(text: str, width: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
