"""Hugging Face model directories in and out: safetensors, config and tokenizer files.

Weights are streamed: reading holds one stacked leaf on the host beside what is already on the device, writing holds
one shard. Both are strict about names and shapes.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from brorl_jax import atomic
from brorl_jax.models.config import ModelConfig, UnsupportedModel
from brorl_jax.models.transformer import Params, shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What travels with an export so that the result is a whole model: tokenizer, chat template, generation settings.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k": "self_attn.k_proj.weight",
    "k_bias": "self_attn.k_proj.bias",
    "v": "self_attn.v_proj.weight",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_TRANSPOSED = frozenset({"q", "k", "v", "o", "gate", "up", "down", "head"})  # stored [in, out] here, [out, in] there
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old checkpoints; derived from config


def hf_name(leaf: str, layer: int | None = None) -> str:
    """The Hugging Face name of one of our leaves, e.g. ``("q", 3) -> model.layers.3.self_attn.q_proj.weight``."""
    return _TOP_NAMES[leaf] if layer is None else f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def resolve(path: str | Path, revision: str | None = None) -> Path:
    """The local directory of a model: ``path`` itself, or the snapshot of a hub id (downloaded if not in the cache).

    Raises:
        FileNotFoundError: With what is missing and how to get it.
    """
    text, local = str(path), Path(path).expanduser()
    if local.is_dir():
        return local
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text):
        previous = local.with_name(f".{local.name}.previous")
        hint = f" ({previous} is the export before an interrupted save; rename it)" if previous.is_dir() else ""
        raise FileNotFoundError(f"no model directory at {text!r}, and it is not a hub id of the form owner/name{hint}")
    import huggingface_hub

    at = f" --revision {revision}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(text, revision=revision, allow_patterns=["*.safetensors", *_SMALL_FILES])
        )
    except (OSError, ValueError) as error:  # hub errors are OSErrors; ValueError is an ill-formed id
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"model {text!r} is neither a local directory nor in the Hugging Face cache, and downloading it failed: "
            f"{reason}. On a machine with access run `hf download {text}{at}` and copy the cache, or put the model's "
            "files into a directory and give its path"
        ) from error


def load_config(path: str | Path, revision: str | None = None) -> ModelConfig:
    """The `ModelConfig` of a model directory or hub id."""
    return ModelConfig.from_hf(_read_json(resolve(path, revision) / "config.json"))


def from_pretrained(
    path: str | Path,
    revision: str | None = None,
    dtype: Any = jnp.float32,
    shardings: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, Params]:
    """Read a Hugging Face model directory (or hub id) into our stacked weights.

    Args:
        path: Directory with config.json and safetensors (one file, or shards with an index), or ``owner/name``.
        revision: Branch, tag or commit of a hub id.
        dtype: Floating dtype the weights are converted to while reading.
        shardings: Tree like the weights; None puts them on the default device. Of several processes, each puts its own
            part.

    Returns:
        The config and the weights, put on the device leaf by leaf: the host never holds more than one stacked leaf.

    Raises:
        UnsupportedModel: For a config or tensor dtype that is not implemented.
        ValueError: Naming missing, unexpected or wrongly shaped tensors, and a stored head that contradicts
            ``tie_word_embeddings: true`` (an identical copy is accepted).
        FileNotFoundError: If the model or one of its files is not there.
    """
    directory = resolve(path, revision)
    config = ModelConfig.from_hf(_read_json(directory / "config.json"))
    tree = shapes(config)
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(directory, stack)
        _check(tensors, config)

        def read(leaf: str, shape: tuple[int, ...], stacked: bool = False) -> np.ndarray:
            out = np.empty(shape, jnp.dtype(dtype))
            for i, place in enumerate(out) if stacked else [(None, out)]:
                value = tensors.get(hf_name(leaf, i))
                place[...] = value.T if leaf in _TRANSPOSED else value
            return out

        def put(leaf: str, value: np.ndarray, where: Mapping[str, Any] | None) -> jax.Array:
            if where is None:
                return jax.device_put(value)
            return jax.make_array_from_callback(value.shape, where[leaf], lambda place: value[place])

        params: Params = {}
        for leaf, shape in tree.items():
            if leaf == "layers":
                where = None if shardings is None else shardings["layers"]
                params[leaf] = {name: put(name, read(name, full, stacked=True), where) for name, full in shape.items()}
            else:
                params[leaf] = put(leaf, read(leaf, shape), shardings)
    return config, params


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The Hugging Face name and shape of every tensor, in the order of `hf_tensors`."""
    tree = shapes(config)

    def stored(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if leaf in _TRANSPOSED else shape

    layer = {name: stored(name, tree["layers"][name][1:]) for name in _LAYER_NAMES if name in tree["layers"]}
    out = {hf_name("embed"): tree["embed"]}
    out |= {hf_name(name, i): shape for i in range(config.layers) for name, shape in layer.items()}
    out[hf_name("final_norm")] = tree["final_norm"]
    return out if config.tied else out | {hf_name("head"): stored("head", tree["head"])}


def hf_tensors(config: ModelConfig, params: Params, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """The weights as Hugging Face names and C-contiguous host arrays, one at a time, layer by layer.

    Args:
        dtype: Floating dtype to convert to; None keeps each leaf's own.
    """
    layers = params["layers"]
    expected, found = set(shapes(config)["layers"]), set(layers)
    if expected != found or ("head" in params) == config.tied:
        raise ValueError(
            f"weights do not belong to this config: layer leaves {sorted(found)}, expected {sorted(expected)}; "
            f"separate head {'head' in params}, tied {config.tied}"
        )

    def export(leaf: str, value: Any) -> np.ndarray:
        value = value.T if leaf in _TRANSPOSED else value  # on the device, which is the faster at it
        return np.ascontiguousarray(value if dtype is None else value.astype(dtype))

    yield hf_name("embed"), export("embed", params["embed"])
    for i in range(config.layers):
        for leaf in _LAYER_NAMES:
            if leaf in layers:
                yield hf_name(leaf, i), export(leaf, layers[leaf][i])
    yield hf_name("final_norm"), export("final_norm", params["final_norm"])
    if not config.tied:
        yield hf_name("head"), export("head", params["head"])


def save_pretrained(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    tokenizer_dir: str | Path | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Write a model directory that `transformers` and the serving engines load. Atomic: see `atomic`.

    Args:
        directory: Where to; an earlier export there is replaced as a whole. A directory that holds anything an export
            does not contain is left alone and refused.
        tokenizer_dir: Whose tokenizer, chat template and generation_config are carried along byte for byte, and
            whose config.json gives the bos, eos and pad ids. None exports weights and configs only.
        dtype: Floating dtype to store; None keeps the weights' own.
        max_shard_bytes: Size of the largest weight file, and of the host memory used (a single larger tensor gets
            a file of its own).
    """
    target = Path(directory).expanduser()
    _refuse_foreign(target)
    source = None if tokenizer_dir is None else Path(tokenizer_dir)
    if source is not None and not any((source / name).is_file() for name in _TOKENIZERS):
        raise FileNotFoundError(f"no tokenizer in {source}: expected one of {', '.join(_TOKENIZERS)}")
    stored = jnp.dtype(dtype or params["embed"].dtype).name
    with atomic.replace_directory(target) as partial:
        ids = _carry(source, partial)
        _write_json(partial / "config.json", config.to_hf(stored) | ids)
        if not (partial / "generation_config.json").exists():
            known = {key: value for key, value in ids.items() if value is not None}
            _write_json(partial / "generation_config.json", {"_from_model_config": True, **known})
        _write_shards(partial, hf_tensors(config, params, dtype), max_shard_bytes)


class _Tensors:
    """All tensors of a directory by name, memory-mapped."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self._file: dict[str, Any] = {}
        index = directory / INDEX
        listed: dict[str, str] = _read_json(index)["weight_map"] if index.is_file() else {}
        for name in sorted(set(listed.values())) if listed else [SINGLE]:
            path = directory / name
            if Path(name).name != name or not path.is_file():
                raise FileNotFoundError(self._absent(name))
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a complete safetensors file ({error}); download it again") from error
            self._file |= dict.fromkeys(file.keys(), file)
        if lost := sorted(set(listed) - set(self._file)):
            raise ValueError(f"{index} lists tensors that its files do not hold: {_some(lost)}")

    def _absent(self, name: str) -> str:
        others = sorted(p.name for p in self.directory.glob("*.bin"))
        hint = f"; it has {_some(others)}, which must be converted to safetensors first" if others else ""
        return f"{self.directory} has no weight file {name}{hint}"

    def names(self) -> set[str]:
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file[name].get_slice(name).get_shape())

    def get(self, name: str) -> np.ndarray:
        kind = self._file[name].get_slice(name).get_dtype()
        if kind not in _DTYPES:
            raise UnsupportedModel(f"tensor {name} is stored as {kind}; supported: {', '.join(_DTYPES)}")
        return self._file[name].get_tensor(name)


def _check(tensors: _Tensors, config: ModelConfig) -> None:
    """Every tensor there, none too many, every shape right; a head stored beside tied embeddings equals them."""
    expected = hf_shapes(config)
    head = hf_name("head")
    found = {name for name in tensors.names() if not _BUFFERS.fullmatch(name)}
    if missing := sorted(set(expected) - found):
        tie = "; if the head is the embedding, set tie_word_embeddings in config.json" if head in missing else ""
        raise ValueError(f"{tensors.directory} lacks {_some(missing)}{tie}")
    if unexpected := sorted(found - set(expected) - ({head} if config.tied else set())):
        raise ValueError(f"{tensors.directory} has tensors its config.json does not account for: {_some(unexpected)}")
    wrong = [f"{n} {tensors.shape(n)}, expected {s}" for n, s in expected.items() if tensors.shape(n) != s]
    if wrong:
        raise ValueError(f"{tensors.directory} has tensors of the wrong shape: {_some(wrong)}")
    if config.tied and head in found and not np.array_equal(tensors.get(head), tensors.get(hf_name("embed"))):
        raise ValueError(
            f"{tensors.directory} stores an {head} that differs from the embedding although config.json has "
            "tie_word_embeddings=true; set it to false if the head is meant to be separate"
        )


def _refuse_foreign(target: Path) -> None:
    """An export replaces a directory whole, so it may only replace another export."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose a directory to export to")
    own = {"config.json", INDEX, *CARRIED}
    entries = sorted(p.name for p in target.iterdir()) if target.is_dir() else []
    if foreign := [name for name in entries if name not in own and not name.endswith(".safetensors")]:
        raise FileExistsError(f"{target} holds more than a model export ({_some(foreign)}); choose another directory")


def _carry(source: Path | None, partial: Path) -> dict[str, Any]:
    """Copy tokenizer files; returns the special token ids for config.json (explicit nulls where unknown)."""
    ids: dict[str, Any] = dict.fromkeys(_TOKEN_IDS)
    if source is None:
        return ids
    for name in CARRIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, partial / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    for name in ("generation_config.json", "config.json"):  # the later one wins
        if (source / name).is_file():
            ids |= {k: v for k, v in _read_json(source / name).items() if k in _TOKEN_IDS and v is not None}
    return ids


def _write_shards(directory: Path, tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Fill shards in order; they get their final names once their number is known."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = pending_bytes = 0

    def flush() -> None:
        save_file(pending, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, value in tensors:
        if pending and pending_bytes + value.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = value
        pending_bytes += value.nbytes
        total += value.nbytes
    flush()
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{i}.safetensors").rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: not a Hugging Face model directory")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object but {value!r:.80}")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
