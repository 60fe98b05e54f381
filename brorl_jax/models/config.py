"""What a decoder looks like: the fields our one transformer needs, read from and written to a Hugging Face config.

The reader is strict. A value we do not implement, and a key we have never heard of, is refused by name: a field that
is silently ignored gives a model that loads, runs and is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class UnsupportedModel(ValueError):
    """A checkpoint this package would run wrongly, or cannot run; the message names the field and its value."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Context extension of the rotary embedding, with the meaning `transformers` gives the fields.

    Attributes:
        type: ``linear`` | ``llama3`` | ``yarn``.
        factor: How many times longer the context becomes.
        original_max_positions: Context length before the extension (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band limits, in turns over the original context.
        beta_fast, beta_slow: yarn's band limits, in turns over the original context.
        attention_factor: yarn's multiplier of cos and sin; None derives it from ``factor`` and the mscales.
        mscale, mscale_all_dim: yarn; the derived multiplier is their ratio when both are set and non-zero.
        truncate: yarn; round the band limits to whole dimensions.
    """

    type: str
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES[1:]:
            raise UnsupportedModel(f"rope type {self.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_positions"),
        }
        for field in needed[self.type]:
            if not getattr(self, field):
                raise UnsupportedModel(
                    f"rope type {self.type!r} needs a positive {field}, got {getattr(self, field)!r}"
                )
        if self.type == "llama3" and self.high_freq_factor == self.low_freq_factor:
            raise UnsupportedModel(f"llama3 rope needs high_freq_factor != low_freq_factor, got {self.low_freq_factor}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder; hashable, so it can be a static argument of jit.

    Attributes:
        family: ``qwen2`` (biases on q, k, v), ``qwen3`` (RMS norm on the heads of q and k) or ``llama`` (neither).
        vocab_size: Rows of the embedding, ``V``; may exceed the number of tokenizer ids.
        hidden: Model width ``D``.
        layers: Number of blocks ``L``.
        heads: Query heads ``H``.
        kv_heads: Key/value heads ``K``; divides ``heads``.
        head_dim: Width of one head, even.
        ffn: Inner width ``F`` of the gated (SiLU) feed-forward block.
        rms_eps: Added to the mean square in RMS norm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Context extension, or None.
        max_positions: Longest context the model was made for; rollouts may not exceed it.
        tied: The output head is the embedding.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 4096
    tied: bool = True

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise UnsupportedModel(
                f"model family {self.family!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        for field in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.rope_theta <= 0 or self.rms_eps < 0:
            raise UnsupportedModel(f"rope_theta must be > 0 and rms_eps >= 0, got {self.rope_theta}, {self.rms_eps}")

    @property
    def attention_bias(self) -> bool:
        """Biases on q, k and v (none on o)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """RMS norm over ``head_dim`` of q and k before rotation."""
        return self.family == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face ``config.json``; see `brorl_jax.models.hf_config.read`."""
        from brorl_jax.models import hf_config

        return hf_config.read(config)

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The ``config.json`` of this model; see `brorl_jax.models.hf_config.write`."""
        from brorl_jax.models import hf_config

        return hf_config.write(self, dtype)

    def rope(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies float32 ``[head_dim / 2]`` (radians per position) and the multiplier of cos and sin.

        ``angle[p, i] = p * inv_freq[i]``; dimension ``i`` is rotated with dimension ``i + head_dim / 2``.
        Computed in float32, in the order `transformers` computes it, so that long contexts agree to rounding.
        """
        dims = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        wavelength = np.float32(self.rope_theta) ** dims
        inv_freq = (np.float32(1) / wavelength).astype(np.float32)
        scaling = self.rope_scaling
        if scaling is None:
            return inv_freq, 1.0
        if scaling.type == "linear":
            return inv_freq / np.float32(scaling.factor), 1.0
        if scaling.type == "llama3":
            return _llama3(inv_freq, scaling), 1.0
        return _yarn(inv_freq, scaling, self.head_dim, self.rope_theta)


def _llama3(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Keep fast frequencies, divide slow ones by ``factor``, blend linearly (in turns) in between."""
    factor, low, high = (np.float32(x) for x in (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor))
    turns = np.float32(scaling.original_max_positions) / (np.float32(2 * math.pi) / inv_freq)
    keep = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _yarn(inv_freq: np.ndarray, scaling: RopeScaling, head_dim: int, theta: float) -> tuple[np.ndarray, float]:
    """YaRN: a linear ramp over dimensions from kept to divided frequencies, and a hotter softmax."""

    original = scaling.original_max_positions or 0  # RopeScaling has checked that yarn has one

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # the constant is transformers' own
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    attention = scaling.attention_factor
    if attention is None:
        if scaling.mscale and scaling.mscale_all_dim:
            attention = mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
        else:
            attention = mscale()
    return inv_freq / np.float32(scaling.factor) * ramp + inv_freq * (1 - ramp), float(attention)
