"""Model FLOPs in closed form: what the matrix products of a pass need, however it is computed.

Forward, with a multiplication and an addition counted as two::

    2 * L * (2 D H h + 2 D K h + 3 D F) * tokens  +  2 * D V * predictions  +  4 * L * H h * pairs

(``L`` layers, ``D`` width, ``H`` and ``K`` query and key heads of width ``h``, ``F`` inner width of the MLP, ``V``
vocabulary.) The backward pass needs twice as much, so training needs 6 per parameter and token. What a program does
beyond that is not counted: recomputed activations and logits, masked scores, padding, norms, softmax, optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from brorl_jax.models.config import ModelConfig

BACKWARD = 2  # a product's two gradients cost a product each


class Work(NamedTuple):
    """What a pass is asked for.

    Attributes:
        tokens: Inputs that go through the layers.
        predictions: Outputs that go through the language-model head.
        pairs: (query, key) that attention looks at.
    """

    tokens: int
    predictions: int
    pairs: int

    def __add__(self, other: tuple[int, ...]) -> Work:  # not a concatenation
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def layer_params(cfg: ModelConfig) -> int:
    """Parameters of all layers' matrices."""
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    return cfg.layers * cfg.hidden * (2 * q + 2 * kv + 3 * cfg.ffn)


def head_params(cfg: ModelConfig) -> int:
    """Parameters of the language-model head, a matrix of its own or not."""
    return cfg.hidden * cfg.vocab_size


def group(prompt: int, responses: Iterable[int]) -> Work:
    """Responses to one prompt, which is computed once for all: its last token is each response's first input.

    Args:
        prompt: Tokens of the prompt.
        responses: Tokens of each response, all of them predicted.
    """
    prefix = prompt - 1
    work = Work(prefix, 0, prefix * (prefix + 1) // 2)
    for length in responses:
        work += Work(length, length, length * prefix + length * (length + 1) // 2)
    return work


def forward(cfg: ModelConfig, work: Work) -> int:
    """FLOPs of a forward pass."""
    products = layer_params(cfg) * work.tokens + head_params(cfg) * work.predictions
    return 2 * products + 4 * cfg.layers * cfg.heads * cfg.head_dim * work.pairs


def train(cfg: ModelConfig, work: Work) -> int:
    """FLOPs of a forward and a backward pass."""
    return (1 + BACKWARD) * forward(cfg, work)
