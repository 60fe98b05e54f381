"""A published version on disk: what is in it, what may not be, what it costs."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sglang_cases as cases
from safetensors.numpy import load_file
from transformers import AutoConfig

from brorl_jax.errors import UserError
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.sglang import weights

PARAMS = cases.random_weights(seed=4)


def publish(folder, params=PARAMS, cfg=cases.QWEN3, tag="run.1"):
    directory = folder / f"v-{tag}"
    return directory, weights.write(directory, cases.layout(cfg), params, tag)


@pytest.mark.parametrize("cfg", [cases.QWEN3, cases.LLAMA], ids=["qwen3-untied", "llama-tied"])
def test_safetensors_reads_every_tensor_under_its_name(tmp_path, cfg):
    params = cases.random_weights(cfg, seed=4)
    directory, nbytes = publish(tmp_path, params, cfg)
    weights.verify(directory, "run.1", contents=True)
    tensors = load_file(directory / weights.FILE)
    assert nbytes == (directory / weights.FILE).stat().st_size
    count = 1 + 1 + (0 if cfg.tied else 1) + cfg.layers * (9 + 2 * cfg.qk_norm)
    assert len(tensors) == count and sum(t.size for t in tensors.values()) == sum(
        x.size for x in jax.tree.leaves(params)
    )
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed"])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], params["layers"]["down"][1].T)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (cfg.kv_heads * cfg.head_dim, cfg.hidden)
    assert ("lm_head.weight" in tensors) != cfg.tied
    read = AutoConfig.from_pretrained(directory)
    assert (read.vocab_size, read.num_hidden_layers, read.tie_word_embeddings) == (cases.VOCAB, cfg.layers, cfg.tied)
    assert read.model_type == cfg.family


def test_bfloat16_is_rounded_as_jax_rounds(tmp_path):
    layout = weights.Layout(cases.QWEN3, "bfloat16", {"eos_token_id": [cases.STOP]})
    directory = tmp_path / "v-1"
    weights.write(directory, layout, PARAMS, "1")
    raw = load_file(directory / weights.FILE)["model.norm.weight"]
    assert raw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(raw, np.asarray(PARAMS["final_norm"].astype(jnp.bfloat16)))


def test_padding_of_the_embedding_is_not_served():
    cut = weights.truncate_vocabulary(PARAMS, 200)
    assert cut["embed"].shape == (200, 32) and cut["head"].shape == (32, 200)
    np.testing.assert_array_equal(cut["head"], PARAMS["head"][:, :200])
    assert weights.truncate_vocabulary(PARAMS, cases.VOCAB) is PARAMS


@pytest.mark.parametrize(
    "change",
    [
        {"embed": jnp.zeros((cases.VOCAB + 1, 32))},
        {"layers": PARAMS["layers"] | {"gate": jnp.zeros((2, 32, 47))}},
        {"layers": {k: v for k, v in PARAMS["layers"].items() if k != "up"}},
    ],
    ids=["vocabulary", "shape", "missing"],
)
def test_nothing_incomplete_is_ever_seen(tmp_path, change):
    with pytest.raises((ValueError, KeyError)):
        publish(tmp_path, PARAMS | change)
    assert list(tmp_path.iterdir()) == []


def test_a_full_or_forbidden_file_system_is_said_before_anything_is_sent(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(weights, "RESERVE_BYTES", 1 << 60)
        with pytest.raises(UserError, match=r"GiB free, one version .*rollout.sglang.weights_dir"):
            publish(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_write_tensors", full)
    with pytest.raises(UserError, match="No space left"):
        publish(tmp_path)
    assert list(tmp_path.iterdir()) == []


def damage(directory, how):
    file, manifest = directory / weights.FILE, directory / weights.MANIFEST
    raw = bytearray(file.read_bytes())
    if how == "no manifest":
        manifest.unlink()
    elif how == "cut short":
        file.write_bytes(raw[:-1])
    elif how == "a flipped bit":
        raw[-1] ^= 1
        file.write_bytes(raw)
    elif how == "another version":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": "run.2"}))
    elif how == "a tensor renamed":
        file.write_bytes(bytes(raw).replace(b'"model.norm.weight"', b'"model.nurm.weight"'))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no manifest", "never completed"),
        ("cut short", "bytes, its manifest says"),
        ("a flipped bit", "lm_head.weight is damaged"),
        ("another version", "holds version run.2, expected run.1"),
        ("a tensor renamed", "lacks model.norm.weight"),
    ],
)
def test_damage_is_found(tmp_path, how, words):
    directory, _ = publish(tmp_path)
    damage(directory, how)
    with pytest.raises(ValueError, match=re.escape(words)):
        weights.verify(directory, "run.1", contents=True)


def test_old_versions_go_and_nothing_else_does(tmp_path):
    old, _ = publish(tmp_path, tag="run.1")
    new, _ = publish(tmp_path, tag="run.2")
    (tmp_path / ".v-run.3.partial").mkdir()
    (tmp_path / "boot").mkdir()
    (tmp_path / "thesis.txt").touch()
    weights.clear(tmp_path, keep=new)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["boot", "thesis.txt", "v-run.2"] and not old.exists()


@pytest.mark.slow  # 200 MB of weights
def test_the_host_never_holds_a_second_copy(tmp_path):
    shape = {"vocab_size": 4096, "hidden": 512, "layers": 12, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 2048}
    cfg = ModelConfig("qwen3", tied=True, rope_theta=1e4, max_positions=512, **shape)
    params = cases.random_weights(cfg)
    publish(tmp_path, params, cfg, "warm")  # compiles and imports what there is
    layout = cases.layout(cfg)
    largest = max(int(np.prod(s)) for s in layout.shapes().values()) * 4
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark of resident memory
    before = resident("VmRSS")
    publish(tmp_path, params, cfg, "measured")
    grown = resident("VmHWM") - before
    assert layout.nbytes > 20 * largest
    assert grown < 6 * largest, f"{grown / 2**20:.0f} MiB for {layout.nbytes / 2**20:.0f} MiB of weights"


def resident(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"{key}:\s+(\d+)", file.read())[1])
