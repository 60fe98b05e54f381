"""Sources that make their questions: every item on access, from a seed, so that a huge ``size`` costs nothing.

Item i is made from ``seed + i``: training and validation sets are disjoint where their ranges ``seed`` to
``seed + size`` are, which the config check demands. Tasks with few questions repeat them all the same; so held-out
questions are kept out of training by their text, too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from brorl_jax.data import instructions
from brorl_jax.data.records import Record, hash_records, register
from brorl_jax.rewards import reasoning_gym

_HASHED = 8  # first items that tell another version of the package, or another hash seed


class _Procedural:
    """What the kinds below share.

    Attributes:
        size: Number of items; keep it when resuming.
        seed: Of the first item.
    """

    size: int
    seed: int

    default_verifier: ClassVar[str] = "reasoning_gym"
    lazy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.dropped: dict[str, int] = {}

    @classmethod
    def check(cls, own: Mapping[str, Any]) -> None:
        if not 0 < own.get("size", 1) < 2**32:
            raise ValueError(f"size must lie between 1 and 2**32 - 1, got {own['size']}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Record:
        raise TypeError("a procedural kind defines __getitem__")

    def content_hash(self) -> str:
        return hash_records(self[i] for i in range(min(self.hashed(), self.size)))

    def hashed(self) -> int:
        """Number of items that the hash looks at."""
        return _HASHED


@register("reasoning_gym")
@dataclasses.dataclass
class ReasoningGym(_Procedural):
    """One task of the reasoning-gym package.

    Attributes:
        task: Registered task, such as ``chain_sum``.
        params: The task's own parameters.
    """

    task: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.params = _plain(self.params)
        reasoning_gym.dataset(self.task, self.params, self.seed, self.size)  # does it take them?

    @classmethod
    def check(cls, own: Mapping[str, Any]) -> None:
        super().check(own)
        reasoning_gym.check_task(own["task"])

    def __getitem__(self, index: int) -> Record:
        return _gym_record(str(int(index)), self.task, self.params, self.seed, self.size, int(index))


@register("reasoning_gym_category")
@dataclasses.dataclass
class ReasoningGymCategory(_Procedural):
    """All tasks of one of the paper's categories in turn, see :mod:`brorl_jax.rewards.reasoning_gym.categories`.

    With n tasks, item i is item ``i // n`` of task ``i % n``.

    Attributes:
        category: Such as ``algebra``.
        params: Parameters by task, ``{"chain_sum": {"max_terms": 4}}``; the other tasks have their defaults.
    """

    category: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.params = _plain(self.params)
        self._tasks = reasoning_gym.CATEGORIES[self.category]
        self._each = -(-self.size // len(self._tasks))
        for task in self._tasks:
            reasoning_gym.dataset(task, self.params.get(task, {}), self.seed, self._each)

    @classmethod
    def check(cls, own: Mapping[str, Any]) -> None:
        super().check(own)
        known = reasoning_gym.CATEGORIES
        if own["category"] not in known:
            raise ValueError(f"unknown category {own['category']!r}; known: {', '.join(known)}")
        if strange := set(own.get("params", {})) - set(known[own["category"]]):
            raise ValueError(f"params name {sorted(strange)}, which are no tasks of category {own['category']!r}")

    def __getitem__(self, index: int) -> Record:
        each, which = divmod(int(index), len(self._tasks))
        task = self._tasks[which]
        return _gym_record(f"{task}.{each}", task, self.params.get(task, {}), self.seed, self._each, each)

    def hashed(self) -> int:
        return 2 * len(self._tasks)


@register("instructions")
@dataclasses.dataclass
class Instructions(_Procedural):
    """Writing tasks with one to ``most`` of IFEval's verifiable instructions, see :mod:`brorl_jax.data.instructions`.

    Attributes:
        most: Instructions in one prompt, at most.
    """

    size: int = 1_000_000
    seed: int = 0
    most: int = 3

    default_verifier: ClassVar[str] = "ifeval"

    @classmethod
    def check(cls, own: Mapping[str, Any]) -> None:
        super().check(own)
        if not 1 <= own.get("most", 1) <= instructions.MOST:
            raise ValueError(f"most must lie between 1 and {instructions.MOST}, got {own['most']}")

    def __getitem__(self, index: int) -> Record:
        prompt = instructions.make(self.seed + int(index), self.most)
        meta = {"instruction_id_list": prompt.kinds, "kwargs": prompt.kwargs}
        return Record(str(int(index)), prompt.text, "", meta)


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON whatever mapping came in (a ConfigDict nests its own kind): it travels in Prompt.meta."""
    return json.loads(json.dumps(dict(params), default=dict))


def _gym_record(key: str, task: str, params: Mapping[str, Any], seed: int, size: int, index: int) -> Record:
    meta = {"task": task, "params": params, "seed": seed, "size": size, "index": index}
    entry = reasoning_gym.entry(meta)
    return Record(key, entry["question"], "" if entry["answer"] is None else str(entry["answer"]), meta)
