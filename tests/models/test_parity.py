"""Our logits and rotary frequencies are those of `transformers`: from stored goldens, and live where torch is there."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from safetensors.numpy import load_file

from brorl_jax.models import ModelConfig, from_pretrained, hf_tensors, save_pretrained, transformer
from brorl_jax.models.transformer import Params

NEEDS_TORCH = "parity against transformers needs torch (pip install torch); the goldens are checked without it"


@functools.partial(jax.jit, static_argnums=1)
def logits(
    params: Params, config: ModelConfig, tokens: jax.Array, segments: jax.Array, positions: jax.Array
) -> jax.Array:
    return transformer.forward(params, config, tokens, segments, positions) @ transformer.unembed(params)


def row_logits(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits of whole rows of one sequence each."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(logits(params, config, tokens, np.ones_like(tokens), positions))


@pytest.fixture(scope="module")
def goldens() -> dict[str, np.ndarray]:
    return dict(np.load(model_cases.GOLDENS))


@pytest.mark.parametrize("name", model_cases.CASES)
def test_logits_equal_goldens(name: str, goldens: dict[str, np.ndarray], tmp_path: Path) -> None:
    config, params = from_pretrained(model_cases.write_checkpoint(tmp_path, model_cases.CASES[name]))
    ours, theirs = row_logits(params, config, model_cases.TOKENS), goldens[f"logits/{name}"]
    assert theirs.std() > 0.5  # logits that say something
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("scaled", "plain"), model_cases.SCALED.items())
def test_goldens_feel_the_rope_scaling(scaled: str, plain: str, goldens: dict[str, np.ndarray]) -> None:
    """Otherwise the test above would pass for a reader that drops the scaling."""
    assert np.abs(goldens[f"logits/{scaled}"] - goldens[f"logits/{plain}"]).max() > 0.05


@pytest.mark.parametrize("name", model_cases.ROPES)
def test_rope_equals_goldens(name: str, goldens: dict[str, np.ndarray]) -> None:
    inv_freq, factor = ModelConfig.from_hf(model_cases.rope_config(model_cases.ROPES[name])).rope()
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, goldens[f"rope/{name}"], rtol=5e-7)
    assert factor == pytest.approx(float(goldens[f"factor/{name}"]), rel=1e-12)


def test_goldens_are_current(tmp_path: Path) -> None:
    """With torch at hand, the stored goldens are recomputed from `transformers`."""
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    import make_goldens

    stored = np.load(model_cases.GOLDENS)
    expected = {f"logits/{n}" for n in model_cases.CASES} | {
        f"{k}/{n}" for k in ("rope", "factor") for n in model_cases.ROPES
    }
    assert set(stored.files) == expected
    for name, fields in model_cases.ROPES.items():
        directory = model_cases.write_checkpoint(tmp_path / name, model_cases.rope_config(fields), {})
        inv_freq, factor = make_goldens.reference_rope(directory)
        np.testing.assert_array_equal(stored[f"rope/{name}"], inv_freq)
        assert float(stored[f"factor/{name}"]) == factor


@pytest.mark.parametrize("name", model_cases.CASES)
def test_both_directions_with_transformers(name: str, goldens: dict[str, np.ndarray], tmp_path: Path) -> None:
    """transformers writes -> we read; we write -> transformers reads; same weights, configs and logits throughout."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    import make_goldens
    from transformers import AutoModelForCausalLM

    source = model_cases.write_checkpoint(tmp_path / "source", model_cases.CASES[name])
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "rope_parameters" in written  # the layout of transformers 5; the cases mostly have the older one
    config, params = from_pretrained(tmp_path / "theirs")
    assert config == ModelConfig.from_hf(model_cases.CASES[name])
    np.testing.assert_allclose(row_logits(params, config, model_cases.TOKENS), goldens[f"logits/{name}"], atol=1e-4)

    save_pretrained(tmp_path / "ours", config, params, max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    theirs = make_goldens.reference_logits(tmp_path / "ours", model_cases.TOKENS)
    np.testing.assert_allclose(theirs, goldens[f"logits/{name}"], atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "llama"])
def test_tensors_leave_as_they_came(name: str, tmp_path: Path) -> None:
    source = model_cases.write_checkpoint(tmp_path, model_cases.CASES[name])
    config, params = from_pretrained(source)
    exported, original = dict(hf_tensors(config, params)), load_file(source / "model.safetensors")
    assert exported.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(exported[key], value)
        assert exported[key].flags.c_contiguous


def test_alone_padded_and_packed_third_agree(tmp_path: Path) -> None:
    """The same sequence alone, right-padded, and third in a packed row has the same logits."""
    config, params = from_pretrained(model_cases.write_checkpoint(tmp_path, model_cases.CASES["llama-llama3"]))
    lengths, width = (7, 5, 9), 24
    sequences = [(np.arange(n) * 31 + 5 * n) % model_cases.VOCAB for n in lengths]
    alone = row_logits(params, config, sequences[2][None])[0]

    def fill(parts: list[np.ndarray]) -> np.ndarray:
        joined = np.concatenate(parts)
        return np.pad(joined, (0, width - len(joined)))[None]

    padded = logits(params, config, fill([sequences[2]]), fill([np.ones(9, int)]), fill([np.arange(9)]))
    segments = fill([np.full(n, i + 1) for i, n in enumerate(lengths)])
    packed = logits(params, config, fill(sequences), segments, fill([np.arange(n) for n in lengths]))
    np.testing.assert_allclose(np.asarray(padded)[0, :9], alone, atol=1e-5)
    np.testing.assert_allclose(np.asarray(packed)[0, 12:21], alone, atol=1e-5)


def test_nnx_module_is_the_pure_function(tmp_path: Path) -> None:
    from flax import nnx

    from brorl_jax.models import Transformer

    source = model_cases.write_checkpoint(tmp_path / "source", model_cases.CASES["qwen3"])
    config, params = from_pretrained(source)
    model = Transformer.from_pretrained(source)
    tokens = jnp.asarray(model_cases.TOKENS)
    expected = row_logits(params, config, model_cases.TOKENS)
    np.testing.assert_allclose(nnx.jit(lambda m, t: m(t))(model, tokens), expected, atol=1e-5)
    assert model.hidden(tokens).shape == (1, model_cases.LENGTH, config.hidden)
    model.save_pretrained(tmp_path / "again")
    again = from_pretrained(tmp_path / "again")[1]
    jax.tree.map(np.testing.assert_array_equal, again, params)
    trainable = nnx.to_pure_dict(nnx.state(model, nnx.Param))["weights"]
    assert jax.tree.structure(trainable) == jax.tree.structure(params)


def test_nnx_module_needs_one_source_of_weights() -> None:
    from brorl_jax.models import Transformer

    config = ModelConfig.from_hf(model_cases.CASES["llama"])
    with pytest.raises(ValueError, match="either rngs"):
        Transformer(config)
