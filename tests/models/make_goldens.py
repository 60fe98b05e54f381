"""Writes goldens.npz: what `transformers` computes for the cases of model_cases.py. Needs torch; run by hand:

python tests/models/make_goldens.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import model_cases
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def reference_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 logits of `transformers` with plain (eager) attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def reference_rope(directory: Path) -> tuple[np.ndarray, float]:
    """Inverse frequencies and attention factor as `transformers` derives them from a config.json."""
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(directory))
    return rotary.inv_freq.numpy(), float(rotary.attention_scaling)


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in model_cases.CASES.items():
            directory = model_cases.write_checkpoint(Path(folder) / name, config)
            arrays[f"logits/{name}"] = reference_logits(directory, model_cases.TOKENS)
        for name, fields in model_cases.ROPES.items():
            directory = Path(folder) / f"rope-{name}"
            model_cases.write_checkpoint(directory, model_cases.rope_config(fields))
            arrays[f"rope/{name}"], factor = reference_rope(directory)
            arrays[f"factor/{name}"] = np.float64(factor)
    np.savez_compressed(model_cases.GOLDENS, **arrays)
    print(f"{model_cases.GOLDENS}: {len(arrays)} arrays, {model_cases.GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
