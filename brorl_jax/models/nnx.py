"""The decoder as a Flax NNX module, for notebooks and code that expects one; the trainer uses the pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from brorl_jax.models import hf, transformer
from brorl_jax.models.config import ModelConfig


class Transformer(nnx.Module):
    """A decoder-only language model.

    Attributes:
        config: Its shape.
        weights: The stacked weights of `brorl_jax.models.transformer`, each an `nnx.Param`.
        compute_dtype: Dtype of activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        params: transformer.Params | None = None,
        compute_dtype: Any = jnp.float32,
    ) -> None:
        """Wraps ``params``, or draws new weights from ``rngs``; exactly one of the two."""
        if rngs is not None and params is None:
            params = transformer.init(rngs.params(), config)
        elif params is None or rngs is not None:
            raise ValueError("give either rngs (new weights) or params (existing weights)")
        self.config = config
        self.compute_dtype = compute_dtype
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    def params(self) -> transformer.Params:
        """The weights as a plain tree of arrays, as the pure functions take them."""
        return jax.tree.map(lambda p: p[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm.

        Args:
            tokens: Token ids.
            segment_ids: 0 for padding, otherwise which sequence of the row; None: each row is one full sequence.
            positions: Place of each token in its sequence; None: counted from the row's start.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return transformer.forward(
            self.params(), self.config, tokens, segment_ids, positions, compute_dtype=self.compute_dtype
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits float32: ``logits[:, t]`` scores the token after ``tokens[:, t]``. Arguments as in `hidden`."""
        hidden = self.hidden(tokens, segment_ids, positions)
        weights = transformer.unembed(self.params()).astype(hidden.dtype)
        return jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, revision: str | None = None, dtype: Any = jnp.float32, compute_dtype: Any = jnp.float32
    ) -> Transformer:
        """Read a model directory or hub id; see `hf.from_pretrained`."""
        config, params = hf.from_pretrained(path, revision, dtype)
        return cls(config, params=params, compute_dtype=compute_dtype)

    def save_pretrained(self, directory: str | Path, tokenizer_dir: str | Path | None = None, **options: Any) -> None:
        """Write a model directory; see `hf.save_pretrained`."""
        hf.save_pretrained(directory, self.config, self.params(), tokenizer_dir, **options)
