"""Rows of files, and the one schema of prepared training data.

A prepared data set is a directory that ``python -m brorl_jax.data.prepare`` writes:

* ``data.jsonl``: one JSON object per line with exactly the fields of :data:`FIELDS`;
* ``manifest.json``: how it came about, its counts, and the SHA-256 of ``data.jsonl``;
* ``report.md``: the rows that were left out as repeats or as benchmark questions, for reading.

========= ======== ===================================================================================================
field     type     meaning
========= ======== ===================================================================================================
id        str      unique within the file, the same whenever the same rows are prepared again
prompt    str      what the user says, instructions about the answer included
messages  list     in its place: a conversation of ``{"role", "content"}`` that ends with the user
gold      str      reference answer; empty where the verifier judges by ``meta`` alone
verifier  str      ``<scorer>:<answer format>``, see :mod:`brorl_jax.rewards`
source    str      the family it comes from, such as ``gsm8k``
meta      object   what the verifier needs besides; ``meta["question"]`` is the bare question where ``prompt`` says more
========= ======== ===================================================================================================
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIELDS = {"id": str, "prompt": str, "messages": list, "gold": str, "verifier": str, "source": str, "meta": dict}
DATA, MANIFEST, REPORT = "data.jsonl", "manifest.json", "report.md"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines or one JSON list, plain or gzipped, or of a Parquet file.

    Raises:
        ValueError: no such file, or it can't be read; the message says where.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"no file {str(path)!r} (looked in {file.absolute().parent})")
    if file.suffix == ".parquet":
        return _parquet(file)
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if text.lstrip().startswith("["):
        rows = _json(text, f"{path}")
        return [_object(row, json.dumps(row), f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    lines = enumerate(text.split("\n"), 1)  # not splitlines: U+2028 is legal inside JSON
    named = [(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    return [_object(_json(line, where), line, where) for line, where in named]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error


def _object(row: Any, written: str, where: str) -> dict[str, Any]:
    """``row`` if it can be one.

    Raises:
        ValueError: it is no object, or has half a surrogate pair, which no tokenizer and no file takes.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be an object {{...}}, got {row!r:.80}")
    if "\\ud" in written.lower():  # only escapes can spell one
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: half a surrogate pair, {error.object[error.start]!a}") from error
    return row


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]  # optional, comes with datasets
    except ImportError as error:
        raise ValueError(f"{file} needs pyarrow: pip install 'brorl-jax[hub]'") from error
    return parquet.read_table(file).to_pylist()


def read_hub(path: str, name: str, split: str, revision: str, **more: Any) -> Sequence[Mapping[str, Any]]:
    """The rows of a data set of the Hugging Face hub; empty ``name`` and ``revision`` are its defaults.

    Raises:
        ValueError: the ``datasets`` library is missing, or it can't load the set (offline, unknown, gated).
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ValueError(f"{path!r} is on the hub, which needs the datasets library: pip install datasets") from error
    try:
        return datasets.load_dataset(path, name or None, split=split, revision=revision or None, **more)
    except Exception as error:  # hub, file and parser errors have no common base
        raise ValueError(
            f"can't load {path!r}, split {split!r} ({type(error).__name__}: {error}). Without a network, save the data "
            "set as JSON lines or Parquet and name the file instead: kind 'jsonl' in a config, --from in prepare"
        ) from error


def cell_text(value: Any) -> str:
    """A table's cell as text: "" for null and for what is no finite number, 27 for 27.0.

    Raises:
        ValueError: a list or an object.
    """
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"must be a text or a number, got {value!r:.80}")
    if isinstance(value, float):
        value = None if not math.isfinite(value) else int(value) if value.is_integer() else value
    return "" if value is None else str(value).strip()


def check_row(row: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where a row does not follow the schema."""
    wanted = FIELDS.keys() - ({"prompt"} if "messages" in row else {"messages"})
    if row.keys() != wanted:
        odd = ", ".join(sorted(wanted ^ row.keys()))
        raise ValueError(f"has not exactly the fields {', '.join(sorted(wanted))}: look at {odd}")
    for field in wanted:
        if not isinstance(row[field], FIELDS[field]):
            raise ValueError(f"{field} must be {FIELDS[field].__name__}, got {row[field]!r:.80}")
    if not row["id"] or not row["verifier"]:
        raise ValueError("id and verifier must not be empty")
    if not isinstance(row["meta"].get("question", ""), str):
        raise ValueError(f"meta['question'] must be a text, got {row['meta']['question']!r:.80}")
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt", "")}]
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or not all(isinstance(text, str) for text in message.values())
        ):
            raise ValueError(f"a message must be {{role, content}}, both texts, got {message!r:.80}")
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError("the last message must be the user's and not empty")


def read_prepared(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a prepared data set.

    Args:
        path: Its directory, or a file in the same schema (which then needs no manifest).

    Raises:
        ValueError: it is missing, a row breaks the schema, an id comes twice, or ``data.jsonl`` is not the file that
            the manifest describes.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        manifest = file / MANIFEST
        if not manifest.is_file():
            raise ValueError(f"{path} has no {MANIFEST}: prepare it with python -m brorl_jax.data.prepare")
        file = file / DATA
        description = _object(_json(manifest.read_text(encoding="utf-8"), f"{manifest}"), "", f"{manifest}")
        if file.is_file() and sha256(file) != description.get("sha256"):
            raise ValueError(
                f"{file} is not the file that its manifest describes: prepare it again, or give the file itself as path"
            )
    rows = read_rows(file)
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        try:
            check_row(row)
            if row["id"] in seen:
                raise ValueError(f"the id {row['id']!r} comes twice")
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from error
        seen.add(row["id"])
    return rows


def sha256(file: Path) -> str:
    """Of the file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
