"""A reader of GGUF files (llama.cpp), for the few tensor types that small published models use. NumPy only."""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """Not a GGUF file, or one that needs something this reader does not have."""


@dataclasses.dataclass(frozen=True)
class GGUF:
    """An open file: ``metadata`` by key, ``shapes`` (as NumPy has them) by tensor name, `read` for the values."""

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    _where: dict[str, tuple[int, int]]  # ggml type, byte offset
    _bytes: mmap.mmap

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32."""
        kind, offset = self._where[name]
        count = math.prod(self.shapes[name])
        _, block, size, decode = _KINDS[kind]
        raw = np.frombuffer(self._bytes, np.uint8, count // block * size, offset).reshape(-1, size)
        return decode(raw).reshape(self.shapes[name])


def open_gguf(path: str | Path) -> GGUF:
    """Read the header of a GGUF version 2 or 3 file and map its tensors.

    Raises:
        GGUFError: If it is not such a file, is truncated, or has tensors of a type this reader cannot decode.
    """
    with Path(path).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    try:
        if data[:4] != b"GGUF" or cursor.skip(4).scalar("I") not in (2, 3):
            raise GGUFError(f"{path} is not a GGUF file of version 2 or 3")
        tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(pairs)}
        infos = []
        for _ in range(tensors):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            infos.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
    except (struct.error, UnicodeDecodeError) as error:
        raise GGUFError(f"{path} has a damaged or truncated header: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    for name, shape, kind, offset in infos:
        if kind not in _KINDS:
            known = ", ".join(entry[0] for entry in _KINDS.values())
            raise GGUFError(f"{path}: tensor {name} has ggml type {kind}; this reader knows {known}")
        _, block, size, _ = _KINDS[kind]
        if start + offset + math.prod(shape) // block * size > len(data):
            raise GGUFError(f"{path} is truncated: tensor {name} ends beyond the file")
    where = {name: (kind, start + offset) for name, _, kind, offset in infos}
    return GGUF(metadata, {name: shape for name, shape, _, _ in infos}, where, data)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, count: int) -> _Cursor:
        self.at += count
        return self

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise GGUFError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])


def _half(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """32 values: scale and minimum (float16), then 16 bytes whose low nibbles come first."""
    nibbles = np.concatenate([raw[:, 4:] & 0xF, raw[:, 4:] >> 4], axis=1).astype(np.float32)
    return _half(raw[:, :2]) * nibbles + _half(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """32 values: a float16 scale, then int8."""
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


# ggml type -> name, values per block, bytes per block, decoder of uint8 [blocks, bytes]
_KINDS: dict[int, tuple[str, int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: ("F32", 1, 4, lambda raw: np.ascontiguousarray(raw).view(np.float32)),
    1: ("F16", 1, 2, _half),
    3: ("Q4_1", 32, 20, _q4_1),
    8: ("Q8_0", 32, 34, _q8_0),
}
