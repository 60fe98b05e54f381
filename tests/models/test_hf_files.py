"""Model directories: strict about tensors, sharded, carrying the tokenizer, replaced whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import model_cases
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from brorl_jax import atomic
from brorl_jax.models import from_pretrained, hf, resolve, save_pretrained
from brorl_jax.models.config import UnsupportedModel

CASE = model_cases.CASES["qwen2"]


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return model_cases.write_checkpoint(tmp_path / "source", CASE)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(b'{"odd":   "spacing"}')
    (folder / "tokenizer_config.json").write_bytes(b'{"chat_template": "{{ x }}"}')
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "additional_chat_templates" / "tool.jinja").write_bytes(b"tool")
    (folder / "generation_config.json").write_bytes(b'{"eos_token_id": [2, 5], "bos_token_id": 1}')
    (folder / "unrelated.bin").write_bytes(b"no")
    return folder


def test_sharded_round_trip(checkpoint: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    save_pretrained(tmp_path / "out", config, params, max_shard_bytes=12_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    assert [p.name for p in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    assert len(shards) > 3
    held = {name: path.name for path in shards for name in load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model_cases.weights(CASE).values())
    assert all(sum(v.nbytes for v in load_file(path).values()) <= 12_000 for path in shards)
    again, loaded = from_pretrained(tmp_path / "out")
    assert again == config
    same(loaded, params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_stored_dtypes_convert_once(dtype: Any, checkpoint: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    save_pretrained(tmp_path / "half", config, params, dtype=dtype)
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {v.dtype for v in stored.values()} == {jnp.dtype(dtype)}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == jnp.dtype(dtype).name
    same(from_pretrained(tmp_path / "half")[1], jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params))
    narrow = from_pretrained(checkpoint, dtype=dtype)[1]
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(dtype)}


def test_leaves_are_born_with_their_sharding(checkpoint: Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    config, plain = from_pretrained(checkpoint)
    shardings = jax.tree.map(lambda _: whole, plain) | {"embed": rows}
    params = from_pretrained(checkpoint, shardings=shardings)[1]
    assert params["embed"].sharding == rows
    same(params, plain)
    assert dict(hf.hf_tensors(config, params)).keys() == model_cases.weights(CASE).keys()


def changed(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors: dict[str, Any] = model_cases.weights(CASE) | {k.replace("__", "."): v for k, v in changes.items()}
    return {k: v for k, v in tensors.items() if v is not None}


BAD_TENSORS = {
    "missing": (
        changed(model__layers__1__self_attn__q_proj__bias=None),
        r"lacks model\.layers\.1\.self_attn\.q_proj\.bias",
    ),
    "missing head": (changed(lm_head__weight=None), r"lacks lm_head\.weight; .*tie_word_embeddings"),
    "unexpected": (
        changed(model__layers__2__mlp__up_proj__weight=np.zeros(1)),
        r"not account for: model\.layers\.2\.mlp",
    ),
    "shape": (changed(model__norm__weight=np.zeros(31, np.float32)), r"model\.norm\.weight \(31,\), expected \(32,\)"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_wrong_tensors_are_named(tensors: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        from_pretrained(model_cases.write_checkpoint(tmp_path, CASE, tensors))


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    tensors = changed(model__norm__weight=np.zeros(32, np.int8))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as I8"):
        from_pretrained(model_cases.write_checkpoint(tmp_path, CASE, tensors))


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Path, tmp_path: Path) -> None:
    tensors = changed(model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(4, np.float32))
    old = model_cases.write_checkpoint(tmp_path / "old", CASE, tensors)
    same(from_pretrained(old)[1], from_pretrained(checkpoint)[1])


def test_tied_models_accept_an_identical_head_and_refuse_another(tmp_path: Path) -> None:
    tied = model_cases.CASES["qwen2-tied"]
    tensors = model_cases.weights(tied)
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    _, params = from_pretrained(model_cases.write_checkpoint(tmp_path / "copy", tied, copy))
    assert "head" not in params
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + np.float32(1e-3)}
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs.*tie_word_embeddings=true"):
        from_pretrained(model_cases.write_checkpoint(tmp_path / "other", tied, other))


def test_exported_weights_must_belong_to_the_config(checkpoint: Path) -> None:
    config, params = from_pretrained(checkpoint)
    headless = {k: v for k, v in params.items() if k != "head"}
    with pytest.raises(ValueError, match="separate head False, tied False"):
        next(hf.hf_tensors(config, headless))


def test_missing_files_say_what_is_missing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no model directory at"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_pretrained(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"hf download owner/name --revision main"):
        resolve("owner/name", "main")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors; it has pytorch_model\.bin.*converted"):
        from_pretrained(checkpoint)


def test_damaged_files_are_refused(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        from_pretrained(checkpoint)
    (checkpoint / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        from_pretrained(checkpoint)
    save_file({"b": np.zeros(1, np.float32)}, weights)
    (checkpoint / hf.INDEX).write_text(json.dumps({"weight_map": {"a": weights.name}}))
    with pytest.raises(ValueError, match="do not hold: a"):
        from_pretrained(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        from_pretrained(checkpoint)


def test_tokenizer_files_travel_byte_for_byte(checkpoint: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    out = tmp_path / "out"
    save_pretrained(out, config, params, tokenizer_dir)
    carried = [p.relative_to(tokenizer_dir) for p in tokenizer_dir.rglob("*") if p.is_file() and p.suffix != ".bin"]
    assert len(carried) == 5
    for path in carried:
        assert (out / path).read_bytes() == (tokenizer_dir / path).read_bytes()
    assert not (out / "unrelated.bin").exists()
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (1, [2, 5], None)
    save_pretrained(out, config, params, out)  # an export can be its own source
    assert (out / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        save_pretrained(out, config, params, tmp_path / "source")


def test_export_leaves_other_files_alone(checkpoint: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"more than a model export \(checkpoints\)"):
        save_pretrained(workdir, config, params)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        save_pretrained(tmp_path / "file", config, params)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwriting_replaces_everything(
    exchange: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    config, params = from_pretrained(checkpoint)
    out = tmp_path / "exports" / "model"
    save_pretrained(out, config, params, max_shard_bytes=12_000)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    save_pretrained(out, config, doubled)
    same(from_pretrained(out)[1], doubled)
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(out.parent) == ["model"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_failing_save_leaves_the_previous_export(
    exchange: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    config, params = from_pretrained(checkpoint)
    out = tmp_path / "exports" / "model"
    save_pretrained(out, config, params)
    calls = []

    def full_disk(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(out, config, jax.tree.map(jnp.zeros_like, params), max_shard_bytes=12_000)
    assert len(calls) == 3
    same(from_pretrained(out)[1], params)
    assert os.listdir(out.parent) == ["model"]


KILLED = """
import os, signal, sys
from brorl_jax.models import from_pretrained, hf, save_pretrained
config, params = from_pretrained(sys.argv[1])
write, calls = hf.save_file, []
def dying(*args, **kwargs):
    write(*args, **kwargs)
    calls.append(args)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
hf.save_file = dying
save_pretrained(sys.argv[2], config, params, max_shard_bytes=12_000)
"""


def test_a_killed_save_leaves_the_previous_export(checkpoint: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    out = tmp_path / "exports" / "model"
    halved = jax.tree.map(lambda x: x / 2, params)
    save_pretrained(out, config, halved)
    repo = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(repo), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(checkpoint), str(out)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(out.parent)) == 2  # the half-written sibling is there, and is not the export
    same(from_pretrained(out)[1], halved)
    save_pretrained(out, config, params)
    same(from_pretrained(out)[1], params)


def test_a_crash_between_two_renames_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".model.previous").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\.model\.previous is the export before an interrupted save"):
        resolve(tmp_path / "model")


def test_exports_follow_links_and_are_readable(checkpoint: Path, tmp_path: Path) -> None:
    config, params = from_pretrained(checkpoint)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    save_pretrained(tmp_path / "link", config, params)
    assert (tmp_path / "link").is_symlink()
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "disk").iterdir()}
    assert modes == {(tmp_path / "disk").stat().st_mode & 0o666}  # safetensors alone would make 0600


def test_bfloat16_checkpoints_are_read_exactly(tmp_path: Path) -> None:
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in model_cases.weights(CASE).items()}
    source = model_cases.write_checkpoint(tmp_path / "bf16", CASE, tensors)
    with safe_open(source / "model.safetensors", "np") as file:
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    _, params = from_pretrained(source, dtype=jnp.bfloat16)
    stored = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(np.asarray(params["layers"]["down"][1]), stored.T)
