"""A version of the weights as a directory that SGLang loads: written tensor by tensor, checked, manifest last.

The file is safetensors under Hugging Face names. It is written front to back from one tensor at a time (the header
needs only shapes), so that the host never holds a second copy of the model beside the directory itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from brorl_jax.errors import UserError
from brorl_jax.models import hf
from brorl_jax.models.config import ModelConfig

FILE, MANIFEST = "model.safetensors", "manifest.json"
RESERVE_BYTES = 256 << 20  # left free on the file system
_CODES = {"float32": "F32", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a server expects: the name, dtype and shape of every tensor, and the ``config.json`` beside them.

    Attributes:
        cfg: The model as served; its vocabulary is the tokenizer's, without the padding of the embedding.
        dtype: Name of the dtype served.
        special: ``eos_token_id`` and the like, for ``config.json`` and ``generation_config.json``.
    """

    cfg: ModelConfig
    dtype: str
    special: Mapping[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name, in the order of the file."""
        return hf.hf_shapes(self.cfg)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values()) * jnp.dtype(self.dtype).itemsize

    def write_configs(self, directory: Path) -> None:
        """``config.json`` and ``generation_config.json``."""
        config = self.cfg.to_hf(self.dtype) | dict(self.special)
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        (directory / "generation_config.json").write_text(json.dumps(dict(self.special)))


def truncate_vocabulary(params: Any, vocab: int) -> Any:
    """The weights without the rows of the embedding (and columns of the head) that no token belongs to.

    A server samples from all it has; trained log-probabilities are over the real ids alone.
    """
    if vocab == params["embed"].shape[0]:
        return params
    cut = {"embed": params["embed"][:vocab]}
    if "head" in params:
        cut["head"] = params["head"][:, :vocab]
    return {**params, **cut}


def write(directory: Path, layout: Layout, params: Any, tag: str) -> int:
    """Writes and checks one version; returns its bytes.

    Args:
        directory: Must not exist; appears complete or not at all.
        params: Of the layout's shapes.
        tag: The version, as servers will report it.

    Raises:
        UserError: The file system is too small.
        ValueError: What would be written is not what the layout names.
    """
    expected = layout.shapes()
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        _check_room(partial, layout.nbytes)
        layout.write_configs(partial)
        checksums = _write_tensors(partial / FILE, hf.hf_tensors(layout.cfg, params, jnp.dtype(layout.dtype)), expected)
        manifest = {
            "version": tag,
            "dtype": layout.dtype,
            "bytes": (partial / FILE).stat().st_size,
            "tensors": {name: {"shape": shape, "crc32": checksums[name]} for name, shape in expected.items()},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest))
        partial.rename(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write weights to {directory}: {error}; set rollout.sglang.weights_dir") from error
        raise
    return manifest["bytes"]


def make_folder(folder: Path) -> None:
    """Makes a folder that only this user may enter, and what is above it; it may be there already.

    Raises:
        UserError: It cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write weights: {error}; set rollout.sglang.weights_dir to a folder of yours"
        ) from error


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + RESERVE_BYTES:
        raise UserError(
            f"{directory.parent} has {free / 2**30:.2f} GiB free, one version of the weights takes "
            f"{needed / 2**30:.2f} GiB; set rollout.sglang.weights_dir to a larger file system that every server sees"
        )


def _header(expected: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in expected.items():
        size = int(np.prod(shape)) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype.name], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_tensors(
    path: Path, tensors: Iterator[tuple[str, np.ndarray]], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Streams the tensors to the file; returns their checksums. The next one is fetched while one is written."""
    checksums: dict[str, int] = {}
    with path.open("wb") as file, concurrent.futures.ThreadPoolExecutor(1) as fetcher:
        coming = fetcher.submit(next, tensors, None)
        while (item := coming.result()) is not None:
            coming = fetcher.submit(next, tensors, None)
            name, value = item
            if not checksums:
                file.write(_header(expected, value.dtype))
            if expected.get(name) != value.shape or list(expected)[len(checksums)] != name:
                raise ValueError(f"tensor {name} {value.shape} was to be published, expected {expected.get(name)}")
            data = value.reshape(-1).view(np.uint8)
            checksums[name] = zlib.crc32(data)
            file.write(data)
            del item, value, data
    if missing := sorted(set(expected) - set(checksums)):
        raise ValueError(f"{len(missing)} tensors were not published, the first is {missing[0]}")
    return checksums


def verify(directory: Path, tag: str, *, contents: bool = False) -> None:
    """Checks a directory against its own manifest: nothing missing, nothing cut short; ``contents``: checksums, too.

    Raises:
        ValueError: What is wrong.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} has no {MANIFEST}: it was never completed, or somebody removed it")
    manifest = json.loads(path.read_text())
    if manifest["version"] != tag:
        raise ValueError(f"{directory} holds version {manifest['version']}, expected {tag}")
    size = (directory / FILE).stat().st_size if (directory / FILE).is_file() else 0
    if size != manifest["bytes"]:
        raise ValueError(f"{directory / FILE} has {size} bytes, its manifest says {manifest['bytes']}")
    with (directory / FILE).open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}
        for name, entry in manifest["tensors"].items():
            if name not in header or header[name]["shape"] != entry["shape"]:
                raise ValueError(f"{directory / FILE} lacks {name} {entry['shape']}")
            if contents:
                begin, end = header[name]["data_offsets"]
                file.seek(8 + length + begin)
                if zlib.crc32(file.read(end - begin)) != entry["crc32"]:
                    raise ValueError(f"{directory / FILE}: {name} is damaged")


def clear(folder: Path, keep: Path | None = None) -> None:
    """Removes every version in ``folder`` but ``keep``, partial ones included; nothing else is touched."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        ours = (path / MANIFEST).exists() or path.name.startswith(".v") or path.name.startswith("v-")
        if path.is_dir() and ours and path != keep:
            shutil.rmtree(path, ignore_errors=True)


def run_name(workdir: Path) -> str:
    """One name per run directory and user, found again by a resumed run."""
    return f"brorl-{os.getuid()}-{zlib.crc32(str(workdir.resolve()).encode()):08x}"


def default_folder(workdir: Path) -> Path:
    """Where a run publishes unless told otherwise: in memory."""
    shared_memory = Path("/dev/shm")
    return (shared_memory if shared_memory.is_dir() else workdir / "weights") / run_name(workdir)
