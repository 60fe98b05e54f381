"""What a partitioned program multiplies and sends, read from its HLO text.

A loop's body counts as often as it runs. Loops whose length is only known at run time (a train step's loop over
micro-batches) are counted apart, per turn. XLA's own cost analysis counts every body once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16},
}
# Bytes that a device sends in a ring of n, as a multiple of the array's whole size.
RING = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}

_EVERYWHERE = 1 << 30  # more loops than any program has

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class _Repeated:
    """What runs ``times`` times, or, if ``turns``, that often in every turn of a loop of unknown length."""

    times: int
    turns: bool

    def runs(self, length: int) -> int:
        """How often it runs in all, if that loop takes ``length`` turns."""
        return self.times * (length if self.turns else 1)


@dataclasses.dataclass(frozen=True)
class Product(_Repeated):
    """A matrix product on one device.

    Attributes:
        flops: 2 per multiplication and addition.
        traffic: Bytes of its operands and its result.
        batched: It has batch dimensions, as attention's have and those of a layer's weights have not.
        times: How often it runs.
        turns: Whether that is per turn of a loop of unknown length.
    """

    flops: int
    traffic: int
    batched: bool
    times: int
    turns: bool


@dataclasses.dataclass(frozen=True)
class Collective(_Repeated):
    """An exchange between devices.

    Attributes:
        kind: A key of ``RING``. An all-reduce of which every device keeps a slice only counts as a reduce-scatter,
            which is what XLA:GPU makes of it.
        size: Bytes of the whole array: a gather's result, a scatter's operand.
        group: Devices that take part in one exchange, numbers in the mesh's order.
        times: How often it runs.
        turns: Whether that is per turn of a loop of unknown length.
        where: ``op_name`` of the program's source.
    """

    kind: str
    size: int
    group: tuple[int, ...]
    times: int
    turns: bool
    where: str

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one run, in a ring."""
        return RING[self.kind](len(self.group)) * self.size if len(self.group) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    types: str
    op: str
    rest: str
    root: bool

    @property
    def arguments(self) -> str:
        """What stands between the parentheses."""
        depth = 1
        for i, c in enumerate(self.rest):
            depth += (c == "(") - (c == ")")
            if not depth:
                return self.rest[:i]
        return self.rest

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments) or re.findall(r"([A-Za-z_][\w.\-]*)(?:,|$)", self.arguments)

    @property
    def called(self) -> list[str]:
        if self.op not in ("while", "call", "fusion", "conditional"):
            return []
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


def size(types: str) -> int:
    """Bytes of an array or a tuple of arrays, written as in HLO: ``f32[2,3]{1,0}``."""
    arrays = _ARRAY.findall(types)
    return sum(BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in arrays)


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if line.startswith("}"):
            body = None
        elif body is None:
            if head := _HEAD.match(line):
                body = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            body[found[2]] = _Instruction(found[2], found[3], found[4], found[5], bool(found[1]))
    return computations, entry


def _used(body: dict[str, _Instruction]) -> dict[str, list[_Instruction]]:
    """Instructions that the result depends on, each with those that read it."""
    waiting = [i.name for i in body.values() if i.root]
    readers: dict[str, list[_Instruction]] = {name: [] for name in waiting}
    while waiting:
        instruction = body[waiting.pop()]
        for name in instruction.operands:
            if name in body:
                if name not in readers:
                    readers[name] = []
                    waiting.append(name)
                readers[name].append(instruction)
    return readers


def _length(condition: dict[str, _Instruction]) -> int | None:
    """Turns of a loop ``i = 0; i < n``, as jax writes a scan; None where ``n`` is not a constant."""
    root = next(i for i in condition.values() if i.root)
    while root.op == "copy":
        root = condition[root.operands[0]]
    for name in root.operands if root.op == "compare" else ():
        if condition[name].op == "constant":
            return int(condition[name].arguments)
    return None


def _levels(body: dict[str, _Instruction], outside: dict[int, int]) -> dict[str, int]:
    """Out of how many loops each value can be taken, because nothing in them changes it.

    Args:
        body: Of a loop.
        outside: Of each value that the loop carries unchanged, the loops around that do not change it either.
    """
    levels: dict[str, int] = {}
    for i in body.values():
        index = re.search(r"index=(\d+)", i.rest)
        if i.op in ("constant", "iota", "partition-id"):
            levels[i.name] = _EVERYWHERE
        elif i.op == "get-tuple-element" and index and body[i.operands[0]].op == "parameter":
            levels[i.name] = outside.get(int(index[1]), 0)
        elif i.op in ("parameter", "while", "rng-bit-generator", "call", "conditional"):
            levels[i.name] = 0
        else:
            levels[i.name] = min((levels.get(name, 0) for name in i.operands), default=0)
    return levels


def _carried(
    body: dict[str, _Instruction], levels: dict[str, int], start: list[str], around: dict[str, int]
) -> dict[int, int]:
    """The values that a loop hands on unchanged, see ``_levels``. ``start`` are its first ones, of the body around."""
    root = next(i for i in body.values() if i.root)
    unchanged = {}
    for k, name in enumerate(root.operands if root.op == "tuple" else ()):
        value = body[name]
        while value.op == "copy":
            value = body[value.operands[0]]
        if value.op == "get-tuple-element" and re.search(rf"index={k}\b", value.rest):
            unchanged[k] = 1 + around.get(start[k], 0)
    return unchanged


def _walk(
    computations: dict[str, dict[str, _Instruction]],
    name: str,
    loops: tuple[int | None, ...] = (),
    outside: dict[int, int] | None = None,
) -> Iterator[tuple[dict[str, _Instruction], dict[str, list[_Instruction]], _Instruction, tuple[int | None, ...], int]]:
    """Every used instruction with its computation, its readers, the lengths of the loops around it, and its level."""
    body = computations[name]
    readers, levels = _used(body), _levels(body, outside or {})
    for i in body.values():
        if i.name not in readers:
            continue
        yield body, readers, i, loops, min(levels[i.name], len(loops))
        if i.op == "while":
            condition, inner = (re.search(rf"{key}=%?([\w.\-]+)", i.rest) for key in ("condition", "body"))
            assert condition and inner
            start = body[i.operands[0]]
            first = start.operands if start.op == "tuple" else []
            unchanged = _carried(computations[inner[1]], levels, first, levels) if first else {}
            yield from _walk(computations, inner[1], (*loops, _length(computations[condition[1]])), unchanged)
        else:
            for called in i.called:
                yield from _walk(computations, called, loops)


def groups(text: str, devices: int) -> np.ndarray:
    """The devices that exchange with one another, ``[groups, members]``, from an instruction's attributes.

    Understands XLA's three ways to write them: a list, an iota ``[2,4]<=[4,2]T(1,0)``, and axes of a mesh.
    """

    def iota(dims: str, order: str | None) -> np.ndarray:
        shape = [int(d) for d in dims.split(",")]
        ids = np.arange(math.prod(shape)).reshape(shape)
        return ids.transpose([int(d) for d in order.split(",")]) if order else ids

    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text
    ):
        axes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        ids = iota(found[2], found[3]) if found[2] else np.arange(math.prod(axes.values()))
        ids = ids.reshape(list(axes.values()))
        names = list(axes)
        chosen = [names.index(name) for name in re.findall(r"'([^']+)'", found[4])]
        rest = [i for i in range(len(names)) if i not in chosen]
        return ids.transpose(rest + chosen).reshape(-1, math.prod(ids.shape[i] for i in chosen))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return iota(found[2], found[3]).reshape([int(d) for d in found[1].split(",")])
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        return np.array([[int(d) for d in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", found[1])])
    return np.arange(devices)[None]


def _times(loops: tuple[int | None, ...]) -> tuple[int, bool]:
    return math.prod(n for n in loops if n is not None), None in loops


def _product(body: dict[str, _Instruction], dot: _Instruction, times: int, turns: bool) -> Product:
    left = body[dot.operands[0]]
    dims = [int(d) for d in _ARRAY.findall(left.types)[0][1].split(",") if d]
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    over = math.prod(dims[int(i)] for i in contracting[1].split(",") if i) if contracting else 1
    result = math.prod(int(d) for d in _ARRAY.findall(dot.types)[0][1].split(",") if d)
    traffic = size(dot.types) + sum(size(body[name].types) for name in dot.operands)
    return Product(2 * result * over, traffic, "lhs_batch_dims={" in dot.rest, times, turns)


def _collective(readers: dict, i: _Instruction, body: dict, devices: int, times: int, turns: bool) -> Collective:
    kind = i.op
    bytes_ = size(i.types)
    if kind == "all-reduce":
        after = readers[i.name]
        while len(after) == 1 and after[0].op in ("copy", "reshape", "bitcast"):
            after = readers[after[0].name]
        if after and all(reader.op == "dynamic-slice" for reader in after):
            kind = "reduce-scatter"
    elif kind == "reduce-scatter":
        bytes_ = sum(size(body[name].types) for name in i.operands)
    where = re.search(r'op_name="([^"]*)"', i.rest)
    members = tuple(int(d) for d in groups(i.rest, devices)[0])
    return Collective(kind, bytes_, members, times, turns, where[1] if where else "")


def analyse(text: str, devices: int) -> tuple[list[Product], list[Collective]]:
    """Matrix products and collectives of a module, for one device of ``devices``."""
    computations, entry = _parse(text)
    products, collectives = [], []
    for body, readers, i, loops, level in _walk(computations, entry):
        if i.op == "dot":
            products.append(_product(body, i, *_times(loops)))
        elif i.op in RING:  # one of what a loop does not change is taken out of it: XLA's loop-invariant code motion
            collectives.append(_collective(readers, i, body, devices, *_times(loops[: len(loops) - level])))
    return products, collectives
