"""Tiny models of each family: their Hugging Face configs, and weights that need no file (from a fixed bit stream)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, LENGTH = 48, 24
TOKENS = (np.arange(LENGTH) * 29 + 3)[None] % VOCAB
GOLDENS = Path(__file__).parent / "goldens.npz"

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN2 = _SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 12}
_LLAMA = _SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# Rotary context extensions come in both layouts, with scales so small that 24 tokens feel them.
CASES: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen2-tied": _QWEN2 | {"tie_word_embeddings": True},
    "qwen2-yarn": _QWEN2 | {"rope_scaling": _YARN},
    "qwen3": _QWEN3,
    "qwen3-tied": _QWEN3 | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3-yarn": _QWEN3
    | {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama-llama3": _LLAMA | {"rope_scaling": _LLAMA3},
}
SCALED = {"qwen2-yarn": "qwen2", "qwen3-yarn": "qwen3", "llama-linear": "llama", "llama-llama3": "llama"}

# Rotary settings of published models, and corners; (config fields, transformers gives inv_freq and the factor).
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama-3.1": {
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "llama-3.2": {
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "qwen2.5-yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn-mscale": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "yarn-factor": {"rope_theta": 1e4, "rope_scaling": _YARN | {"attention_factor": 0.9}},
    "yarn-untruncated": {"rope_theta": 150e3, "rope_scaling": _YARN | {"factor": 32.0, "truncate": False}},
    "yarn-no-original": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}


def rope_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A config with realistic heads (128 wide) and the given rotary settings."""
    return _LLAMA | {"head_dim": 128, "max_position_embeddings": 131072} | fields


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, as `transformers` stores it; written out independently of the package."""
    d, heads, kv, f = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    head_dim = config.get("head_dim", d // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, d)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (heads * head_dim, d),
            "self_attn.k_proj.weight": (kv * head_dim, d),
            "self_attn.v_proj.weight": (kv * head_dim, d),
            "self_attn.o_proj.weight": (d, heads * head_dim),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if config["model_type"] == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": layer[f"self_attn.{n}_proj.weight"][:1] for n in "qkv"}
        if config["model_type"] == "qwen3":
            layer |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights that depend on nothing but the shapes: raw PCG64 bits, whose stream NumPy guarantees.

    Large enough that attention is far from uniform; norm weights differ from one and biases from zero.
    """
    bits = np.random.PCG64(20240607)
    out = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        uniform = (bits.random_raw(int(np.prod(shape))) >> np.uint64(11)).astype(np.float64) / 2**53
        centred = (uniform.reshape(shape) - 0.5) * 12**0.5  # variance 1
        norm = name.endswith("norm.weight")
        scale = 0.2 if norm or name.endswith("bias") else 1.5 / shape[-1] ** 0.5
        out[name] = (norm + scale * centred).astype(np.float32)
    return out


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A Hugging Face model directory, written without the package under test."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
