"""What a source of prompts is, and the register of its kinds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One question of a source.

    Attributes:
        key: Stable within the source, for every run that uses the same data.
        question: What the user says last, without the source's template.
        gold: Reference answer; may be empty where the verifier needs none.
        meta: What the verifier needs besides (JSON-serialisable). ``meta["question"]`` is the bare question where
            ``question`` holds instructions, too.
        verifier: Of this record; "" leaves it to the source.
        history: Messages before the question, ``{"role": ..., "content": ...}`` each.
    """

    key: str
    question: str
    gold: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    verifier: str = ""
    history: tuple[Mapping[str, str], ...] = ()

    @property
    def bare(self) -> str:
        """The question without any instruction: what makes two records the same question."""
        return self.meta.get("question", self.question)


class Source(Protocol):
    """An indexable sequence of records; ``source[i]`` is a pure function of the configuration and ``i``.

    Attributes:
        default_verifier: Used where neither the configuration nor the record names one; "" if every record does.
        lazy: Records are made on access and there may be very many: they are filtered on access, not at load.
        dropped: Rows left out at load, by reason.
    """

    default_verifier: ClassVar[str]
    lazy: ClassVar[bool]
    dropped: dict[str, int]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Record: ...
    def content_hash(self) -> str:
        """Changes when the records do."""
        ...


KINDS: dict[str, type] = {}


def register(kind: str) -> Callable[[type], type]:
    """Registers a dataclass with the :class:`Source` interface; its fields are the configuration fields."""

    def add(cls: type) -> type:
        KINDS[kind] = cls
        return cls

    return add


def hash_records(records: Iterator[Record] | Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for r in records:
        fields = [r.key, r.question, r.gold, r.meta, r.verifier, r.history]
        digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()[:16]
