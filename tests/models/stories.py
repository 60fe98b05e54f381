"""Reads llama2.c's legacy checkpoint and tokenizer files: a trained story model of 260 K parameters, for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from brorl_jax.models.config import ModelConfig
from brorl_jax.models.smollm2 import pairs_to_halves
from brorl_jax.models.transformer import Params


def read_model(path: Path) -> tuple[ModelConfig, Params]:
    """The shape and weights of a ``.bin`` file: seven int32, then float32 matrices ``[out, in]``, tied head."""
    raw = path.read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, seq = struct.unpack("<7i", raw[:28])
    hd, kv = dim // heads, dim // heads * kv_heads
    config = ModelConfig(
        "llama",
        vocab_size=vocab,
        hidden=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hd,
        ffn=ffn,
        rms_eps=1e-5,
        max_positions=seq,
    )
    values = np.frombuffer(raw, np.float32, offset=28)
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return values[at - int(np.prod(shape)) : at].reshape(shape)

    embed, attn_norm = take(vocab, dim), take(layers, dim)
    q, k, v, o = take(layers, dim, dim), take(layers, kv, dim), take(layers, kv, dim), take(layers, dim, dim)
    mlp_norm = take(layers, dim)
    gate, down, up = take(layers, ffn, dim), take(layers, dim, ffn), take(layers, ffn, dim)  # w1, w2, w3
    final_norm = take(dim)
    q, k = (np.stack([pairs_to_halves(w, hd) for w in stack]) for stack in (q, k))
    matrices = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
    tree = {name: stack.swapaxes(1, 2) for name, stack in matrices.items()}
    return config, {
        "embed": embed,
        "layers": tree | {"attn_norm": attn_norm, "mlp_norm": mlp_norm},
        "final_norm": final_norm,
    }


def read_vocabulary(path: Path) -> list[bytes]:
    """The pieces of a ``tok*.bin`` file by id; byte pieces are returned as that byte."""
    raw = path.read_bytes()
    at, pieces = 4, []
    while at < len(raw):
        (length,) = struct.unpack_from("<i", raw, at + 4)
        piece = raw[at + 8 : at + 8 + length]
        byte = piece.startswith(b"<0x") and piece.endswith(b">") and len(piece) == 6
        pieces.append(bytes([int(piece[3:5], 16)]) if byte else piece)
        at += 8 + length
    return pieces
