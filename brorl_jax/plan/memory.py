"""Memory of a train step on one device, in closed form.

The state is not estimated: its bytes follow from its shapes and shardings (``program.held``). What an update needs
beside it is, in the order it lives:

- gradients: the float32 sum over micro-batches, and those of the present one;
- activations: what the backward pass keeps of every layer, by remat policy, and what one layer works with;
- temporaries: logits of a chunk of the head, and weights that fsdp gathers, with their whole gradients.

Constants (how many arrays of a kind live at the peak) are those of XLA's buffer assignment for this package's step, see
``tests/plan/test_memory.py``.
"""

from __future__ import annotations

import dataclasses

from brorl_jax.data.packing import Layout
from brorl_jax.models import flops
from brorl_jax.models.config import ModelConfig

SCORES = 4  # arrays [heads, queries, keys] in float32 at the peak of plain attention's backward pass
WIDE = 8  # arrays [tokens, F] of one MLP: gate, up, activation, their product, each with its gradient
NARROW = 6  # arrays [tokens, D] in float32 of one layer: norms and the stream's gradient
LOGITS = 3  # arrays [chunk, V] in float32: logits, probabilities, their gradient
FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device has of a micro-batch and of the model.

    Attributes:
        slots, rows, row_tokens, prefix: Of its micro-batch, prompts of ``prefix`` tokens.
        context: Devices that split the tokens of a row; each sees the keys of all of it.
        tensor: Devices that split heads, the MLP's width and the vocabulary.
        fsdp: Devices that split the stored weights.
        item: Bytes of an activation.
        head_chunk: Tokens of a chunk of the head on this device.
    """

    slots: int
    rows: int
    row_tokens: int
    prefix: int
    context: int
    tensor: int
    fsdp: int
    item: int
    head_chunk: int

    @classmethod
    def of(cls, layout: Layout, prefix: int, mesh: dict[str, int], item: int, head_chunk: int) -> Share:
        """The share of a device of a mesh."""
        shards = mesh["data"] * mesh["fsdp"]
        slots, tokens = layout.slots // shards, layout.row_tokens // mesh["context"]
        chunk = min(head_chunk, slots * layout.rows * tokens)
        split = mesh["context"], mesh["tensor"], mesh["fsdp"]
        return cls(slots, layout.rows, tokens, prefix, *split, item, chunk)

    @property
    def tokens(self) -> int:
        """Inputs that go through the layers, padding included."""
        return self.slots * (self.prefix + self.rows * self.row_tokens)

    @property
    def pairs(self) -> int:
        """(query, key) that plain attention multiplies, masked or not."""
        rows = self.slots * self.rows * self.row_tokens
        return rows * (self.row_tokens * self.context + self.prefix) + self.slots * self.prefix**2

    @property
    def work(self) -> flops.Work:
        """What the layers and the head are run on."""
        return flops.Work(self.tokens, self.slots * self.rows * self.row_tokens, self.pairs)


def gradients(shard: int) -> int:
    """Bytes: the sum and the present micro-batch's, ``shard`` weights on this device."""
    return 2 * FLOAT * shard


def kept(cfg: ModelConfig, share: Share, remat: str, *, scores: bool) -> int:
    """Bytes that the backward pass keeps of all layers.

    Args:
        scores: Attention writes its scores to memory, and without remat keeps them.
    """
    q, kv = cfg.heads * cfg.head_dim // share.tensor, cfg.kv_heads * cfg.head_dim // share.tensor
    ffn, d = cfg.ffn // share.tensor, cfg.hidden
    if remat == "full":
        layer = d * share.tokens * share.item
    elif remat == "dots":  # the stream, and the products q, k, v, o, gate, up, down
        layer = (d + q + 2 * kv + d + 2 * ffn + d) * share.tokens * share.item
    else:  # also norms, rotated heads, the MLP's activation; q, k and v before and after
        layer = (8 * d + 2 * q + 4 * kv + 4 * ffn) * share.tokens * share.item
        layer += (
            int(2.5 * FLOAT) * share.pairs * cfg.heads // share.tensor if scores else 2 * q * share.tokens * share.item
        )
    return cfg.layers * layer


def layer_work(cfg: ModelConfig, share: Share, *, scores: bool) -> int:
    """Bytes at the peak of one layer's backward pass."""
    q, kv = cfg.heads * cfg.head_dim // share.tensor, cfg.kv_heads * cfg.head_dim // share.tensor
    mlp = WIDE * (cfg.ffn // share.tensor) * share.tokens * share.item
    heads = 2 * (2 * q + 2 * kv) * share.tokens * share.item
    attention = SCORES * FLOAT * share.pairs * cfg.heads // share.tensor if scores else heads
    weights = flops.layer_params(cfg) // cfg.layers // share.tensor
    gathered = (2 * share.item + FLOAT) * weights if share.fsdp > 1 else 0
    return NARROW * FLOAT * cfg.hidden * share.tokens + max(mlp, attention) + gathered


def head_work(cfg: ModelConfig, share: Share) -> int:
    """Bytes at the peak of the head: logits of a chunk; under fsdp, also the gathered head and whole gradients."""
    vocabulary = cfg.vocab_size // share.tensor
    gathered = (share.item + 2 * FLOAT) * vocabulary * cfg.hidden if share.fsdp > 1 else FLOAT * vocabulary * cfg.hidden
    return LOGITS * FLOAT * share.head_chunk * vocabulary + gathered


def kv_bytes(cfg: ModelConfig, item: int) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * item
