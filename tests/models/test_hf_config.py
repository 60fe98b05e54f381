"""Reading and writing config.json: published models are understood, everything else is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import model_cases
import pytest

from brorl_jax.models import ModelConfig, RopeScaling, UnsupportedModel

# config.json of published checkpoints, with the bookkeeping they carry.
R1_DISTILL_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
PUBLISHED = [R1_DISTILL_QWEN, QWEN3_0_6B, LLAMA_3_2_1B]


def test_published_configs_are_read() -> None:
    qwen2, qwen3, llama = (ModelConfig.from_hf(config) for config in PUBLISHED)
    assert qwen2 == ModelConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 1e-6, 10000.0, None, 131072, False)
    assert qwen3 == ModelConfig("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 1e-6, 1e6, None, 40960, True)
    scaling = RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    assert llama == ModelConfig("llama", 128256, 2048, 16, 32, 8, 64, 8192, 1e-5, 5e5, scaling, 131072, True)
    assert [(c.attention_bias, c.qk_norm) for c in (qwen2, qwen3, llama)] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_absent_optional_fields_mean_what_transformers_means() -> None:
    dropped = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta")
    llama, qwen3 = (
        ModelConfig.from_hf({k: v for k, v in model_cases.CASES[name].items() if k not in dropped})
        for name in ("llama", "qwen3")
    )
    assert (llama.kv_heads, llama.head_dim, llama.tied, llama.rope_theta) == (4, 8, False, 10_000.0)
    assert qwen3.head_dim == 128


@pytest.mark.parametrize("config", [*PUBLISHED, *model_cases.CASES.values()])
def test_written_configs_read_back_equal(config: dict[str, Any]) -> None:
    model = ModelConfig.from_hf(config)
    written = model.to_hf("bfloat16")
    assert ModelConfig.from_hf(written) == model
    assert written["architectures"] == config["architectures"]
    assert written["torch_dtype"] == "bfloat16"


def test_configs_are_hashable_values() -> None:
    a, b = (ModelConfig.from_hf(LLAMA_3_2_1B) for _ in range(2))
    assert hash(a) == hash(b)
    assert a != dataclasses.replace(a, layers=15)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    "no architecture": ("llama", {"architectures": None}, r"architectures=\[\].*Qwen2ForCausalLM"),
    "classifier": ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    "model type": ("llama", {"model_type": "qwen2"}, "model_type='qwen2'"),
    "sliding window in use": ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True"),
    "sliding window of llama": ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
    "sliding layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "partial rotary, new layout": (
        "llama",
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor",
    ),
    "interleaved rotary": ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    "o bias of llama": ("llama", {"attention_bias": True}, "attention_bias=True.*o_proj"),
    "o bias of qwen3": ("qwen3", {"attention_bias": True}, "attention_bias=True.*o_proj"),
    "qwen2 without bias": ("qwen2", {"attention_bias": False}, "attention_bias=False"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    "dropout": ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "dynamic rope": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
    "mrope": ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "mrope"),
    "rope field": ("llama", {"rope_scaling": _YARN | {"gamma": 2}}, "gamma=2"),
    "rope field of another type": ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "mscale=1"),
    "rope per layer type": ("qwen3", {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    "rope without factor": ("llama", {"rope_scaling": {"type": "linear"}}, "without a factor"),
    "llama3 without bands": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "two thetas": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, r"\[7.0, 100.0\]"),
    "two scalings": ("llama", {"rope_scaling": _YARN, "rope_parameters": _YARN | {"factor": 2.0}}, "disagree"),
    "softcapping": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.*bits"),
    "experts": ("qwen3", {"num_experts": 64}, "num_experts=64"),
    "pretraining tp": ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
    "own code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    "unknown": ("llama", {"embedding_multiplier": 12.0}, "silently ignore: embedding_multiplier=12.0"),
    "missing shape": ("llama", {"vocab_size": None}, "lacks vocab_size"),
    "shape in words": ("llama", {"hidden_size": "64"}, "hidden_size='64': must be a whole number"),
    "half a layer": ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
    "yes for a number": ("llama", {"rms_norm_eps": True}, "rms_norm_eps=True: must be a number"),
    "architecture in words": ("llama", {"architectures": "LlamaForCausalLM"}, "must be a list"),
    "architecture as a list": ("llama", {"architectures": [["LlamaForCausalLM"]]}, "architectures="),
    "rope in words": ("llama", {"rope_scaling": "yarn"}, "rope_scaling='yarn': must be an object"),
    "head groups": ("llama", {"num_key_value_heads": 3}, r"heads \(4\).*kv_heads \(3\)"),
    "odd head": ("llama", {"head_dim": 7}, "even.*7"),
}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(model_cases.CASES[family] | change)


@pytest.mark.parametrize("config", [[1], "Qwen2ForCausalLM", None, 3])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(UnsupportedModel, match="holds no object"):
        ModelConfig.from_hf(config)


def test_harmless_values_of_refused_fields_are_accepted() -> None:
    plain = model_cases.CASES["qwen3"]
    harmless = {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "temperature": 0.6,
        "id2label": {"0": "LABEL_0"},
    }
    assert ModelConfig.from_hf(plain | harmless) == ModelConfig.from_hf(plain)


def test_another_family_is_refused() -> None:
    config = ModelConfig.from_hf(R1_DISTILL_QWEN)
    with pytest.raises(UnsupportedModel, match="family 'gemma'"):
        dataclasses.replace(config, family="gemma")


def test_yarn_null_factor_is_the_ratio_of_contexts() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    config = ModelConfig.from_hf(model_cases.CASES["llama"] | {"rope_scaling": scaling})
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 4.0  # 64 / 16
