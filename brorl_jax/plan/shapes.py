"""The shape of a config's model, without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brorl_jax import assemble
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.models import hf
from brorl_jax.models.config import ModelConfig, UnsupportedModel


def _qwen2(hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 28,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }


# The fields of each repository's config.json that decide the shape.
KNOWN: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 12, 2, 151_936),
    "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B": _qwen2(1536, 8960, 12, 2, 151_936),  # trained from the one above
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(3584, 18_944, 28, 4, 152_064),
}


def model_config(config: Config, file: str | None) -> tuple[ModelConfig, str]:
    """The model's shape, and where it comes from.

    Args:
        file: A ``config.json``; it wins. Otherwise ``model.path`` as a directory, then as a key of ``KNOWN``, then
            ``model.new``.

    Raises:
        UserError: None of them gives a shape.
    """
    path = config.model.path
    try:
        if file is not None:
            return ModelConfig.from_hf(json.loads(Path(file).read_text())), file
        if not path:
            return assemble.new_model(config, config.model.new.vocab_size), "model.new"
        if Path(path).expanduser().is_dir():
            return hf.load_config(path), path
        if path in KNOWN:
            return ModelConfig.from_hf(KNOWN[path]), f"{path}, as published"
    except (OSError, ValueError, UnsupportedModel) as error:
        raise UserError(f"no model shape in {file or path}: {error}") from error
    raise UserError(
        f"model.path = {path}: no such directory here, and not one of the shapes that are known without a download "
        f"({', '.join(KNOWN)}); give its config.json as --model_config=FILE"
    )
