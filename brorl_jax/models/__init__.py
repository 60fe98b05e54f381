"""Decoder models: one pure transformer for the Qwen2, Qwen3 and Llama families, and their Hugging Face files."""

from brorl_jax.models.config import ModelConfig, RopeScaling, UnsupportedModel
from brorl_jax.models.hf import from_pretrained, hf_tensors, load_config, resolve, save_pretrained
from brorl_jax.models.nnx import Transformer

__all__ = [
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "UnsupportedModel",
    "from_pretrained",
    "hf_tensors",
    "load_config",
    "resolve",
    "save_pretrained",
]
