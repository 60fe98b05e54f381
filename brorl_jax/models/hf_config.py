"""Hugging Face ``config.json`` <-> `ModelConfig`: what is read, what must have one value, what is harmless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl_jax.models.config import ARCHITECTURES, ROPE_TYPES, ModelConfig, RopeScaling, UnsupportedModel

_FAMILIES = {architecture: family for family, architecture in ARCHITECTURES.items()}

# Keys that decide the shape; absent ones have no safe default.
_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "rms_norm_eps": "rms_eps",
    "max_position_embeddings": "max_positions",
}
_READ = {
    *_REQUIRED,
    "architectures",
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
}
_SIZES = (*(key for key in _REQUIRED if key != "rms_norm_eps"), "num_key_value_heads", "head_dim")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_SIZES, (int, "a whole number")),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), ((int, float), "a number")),
    **dict.fromkeys(("architectures", "layer_types"), ((list, tuple), "a list of names")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (Mapping, "an object")),
}
# Keys we implement for one value only (None or absence is that value too), and why another is refused.
_ONLY: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "only the SiLU activation is implemented"),
    "partial_rotary_factor": (1.0, "all of a head is rotated"),
    "rope_interleaved": (False, "only the rotate-half layout is implemented"),
    "use_mrope": (False, "multimodal rotary positions are not implemented"),
    "mlp_bias": (False, "the feed-forward block has no biases"),
    "pretraining_tp": (1, "sliced matrix products of tensor-parallel pretraining are not reproduced"),
    "attention_dropout": (0.0, "dropout would make the first policy ratio differ from 1"),
    "quantization_config": (None, "quantised weights cannot be trained; use the unquantised checkpoint"),
    "attn_logit_softcapping": (None, "logit softcapping is not implemented"),
    "final_logit_softcapping": (None, "logit softcapping is not implemented"),
    "num_experts": (None, "mixture-of-experts models are not implemented"),
    "num_local_experts": (None, "mixture-of-experts models are not implemented"),
    "num_experts_per_tok": (None, "mixture-of-experts models are not implemented"),
    "moe_intermediate_size": (None, "mixture-of-experts models are not implemented"),
    "is_encoder_decoder": (False, "only decoders are implemented"),
    "add_cross_attention": (False, "only decoders are implemented"),
    "pruned_heads": ({}, "pruned heads are not implemented"),
    "auto_map": (None, "models with code of their own are not run"),
}
# Keys with no bearing on the logits of a causal language model: bookkeeping, generation defaults, classifier heads.
_HARMLESS_TEXT = (
    "_name_or_path name_or_path _commit_hash transformers_version transformers.js_config torch_dtype dtype "
    "use_bfloat16 use_cache initializer_range bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id max_window_layers is_llama_config attn_implementation _attn_implementation "
    "_attn_implementation_autoset _attn_implementation_internal _experts_implementation experts_implementation "
    "unsloth_fixed unsloth_version output_hidden_states output_attentions return_dict return_dict_in_generate "
    "output_scores torchscript tf_legacy_loss chunk_size_feed_forward is_decoder cross_attention_hidden_size "
    "tie_encoder_decoder finetuning_task id2label label2id num_labels problem_type tokenizer_class prefix "
    "task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens"
)
_HARMLESS = frozenset(_HARMLESS_TEXT.split())
_ROPE_FIELDS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_ROPE_KEYS = {  # per rope type, as transformers validates them
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(_ROPE_FIELDS) - {"low_freq_factor", "high_freq_factor"},
}


def read(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face ``config.json``.

    Both layouts of rotary settings are understood: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters``.

    Raises:
        UnsupportedModel: For an architecture or value that is not implemented, a missing shape, or an unknown key.
    """
    _check_types(config)
    family = _family(config)
    for key, (allowed, why) in _ONLY.items():
        if config.get(key) is not None and config[key] != allowed:
            raise UnsupportedModel(f"config.json has {key}={config[key]!r}: {why} (supported: {allowed!r})")
    _check_attention(config, family)
    if unknown := sorted(set(config) - _READ - set(_ONLY) - _HARMLESS):
        found = ", ".join(f"{key}={config[key]!r}" for key in unknown)
        raise UnsupportedModel(
            f"config.json has fields this package does not know and would silently ignore: {found}. If they do not "
            f"change the logits of {ARCHITECTURES[family]}, remove them from config.json"
        )
    if missing := [key for key in _REQUIRED if config.get(key) is None]:
        raise UnsupportedModel(f"config.json lacks {', '.join(missing)}")
    shape = {field: config[key] for key, field in _REQUIRED.items()}
    theta, scaling = _rope(config)
    default_head_dim = 128 if family == "qwen3" else shape["hidden"] // shape["heads"]  # transformers' own defaults
    return ModelConfig(
        family,
        **shape,
        kv_heads=config.get("num_key_value_heads") or shape["heads"],
        head_dim=config.get("head_dim") or default_head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def write(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The ``config.json`` of a model, in the layout that transformers 4 and 5 and the serving engines all read.

    Args:
        dtype: Recorded as ``torch_dtype``; the name of the dtype the weights are stored in.
    """
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "torch_dtype": dtype,
        **{key: getattr(model, field) for key, field in _REQUIRED.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": model.rope_theta,
        "rope_scaling": _write_rope(model.rope_scaling),
        "use_cache": True,
    }
    if model.family == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.layers}
    if model.family == "qwen3":
        config["attention_bias"] = False
    return config


def _check_types(config: Any) -> None:
    """What the shape is made of has JSON's right type, before anything is computed with it."""
    if not isinstance(config, Mapping):
        raise UnsupportedModel(f"config.json holds no object but {config!r:.80}")
    for key, (types, what) in _TYPES.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, types)):
            raise UnsupportedModel(f"config.json has {key}={value!r:.80}: must be {what}")


def _family(config: Mapping[str, Any]) -> str:
    architectures = list(config.get("architectures") or ())
    supported = ", ".join(_FAMILIES)
    if len(architectures) != 1 or str(architectures[0]) not in _FAMILIES:
        raise UnsupportedModel(f"config.json has architectures={architectures}; supported: one of {supported}")
    family = _FAMILIES[architectures[0]]
    if config.get("model_type", family) != family:
        raise UnsupportedModel(
            f"config.json has model_type={config['model_type']!r}; architectures={architectures} expects {family!r}"
        )
    return family


def _check_attention(config: Mapping[str, Any], family: str) -> None:
    """Refuse sliding windows in use and biases that transformers would place elsewhere than we do."""
    if config.get("use_sliding_window"):
        raise UnsupportedModel("config.json has use_sliding_window=True: sliding-window attention is not implemented")
    if family == "llama" and config.get("sliding_window") is not None:
        raise UnsupportedModel(
            f"config.json has sliding_window={config['sliding_window']!r}: not implemented for Llama"
        )
    if other := sorted({*map(str, config.get("layer_types") or ())} - {"full_attention"}):
        raise UnsupportedModel(
            f"config.json has layer_types with {', '.join(other)}: only full_attention is implemented"
        )
    bias = config.get("attention_bias")
    if bias and family != "qwen2":
        raise UnsupportedModel(
            f"config.json has attention_bias={bias!r}: in {ARCHITECTURES[family]} it also adds a bias to o_proj, "
            "which is not implemented"
        )
    if family == "qwen2" and bias is not None and not bias:
        raise UnsupportedModel("config.json has attention_bias=False, but Qwen2ForCausalLM always has q, k, v biases")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from either layout; two layouts that contradict each other are refused."""
    layouts = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    parsed = {key: _read_rope(key, value, config) for key, value in layouts.items()}
    scalings = list(parsed.values())
    if len(scalings) == 2 and scalings[0][1] != scalings[1][1]:
        raise UnsupportedModel(f"config.json has rope_scaling and rope_parameters that disagree: {layouts}")
    thetas = {float(theta) for theta in (config.get("rope_theta"), *(t for t, _ in scalings)) if theta is not None}
    if len(thetas) > 1:
        raise UnsupportedModel(f"config.json has several values of rope_theta: {sorted(thetas)}")
    return thetas.pop() if thetas else 10_000.0, scalings[0][1] if scalings else None


def _read_rope(
    name: str, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[float | None, RopeScaling | None]:
    kinds = {rope[key] for key in ("rope_type", "type") if rope.get(key)} or {"default"}
    if len(kinds) > 1 or next(iter(kinds)) not in ROPE_TYPES:
        raise UnsupportedModel(f"config.json has {name} of type {sorted(kinds)}; supported: {', '.join(ROPE_TYPES)}")
    kind = kinds.pop()
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModel(
            f"config.json has {name}.partial_rotary_factor={rope['partial_rotary_factor']!r} (supported: 1.0)"
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := sorted(set(rope) - known - _ROPE_KEYS[kind]):
        found = ", ".join(f"{key}={rope[key]!r}" for key in unknown)
        raise UnsupportedModel(f"config.json has {name} fields that rope type {kind!r} does not use: {found}")
    if kind == "default":
        return rope.get("rope_theta"), None
    fields = {_ROPE_FIELDS[key]: rope[key] for key in _ROPE_KEYS[kind] if rope.get(key) is not None}
    if kind != "linear":
        fields.setdefault("original_max_positions", config.get("max_position_embeddings"))
    if kind == "yarn" and "factor" in rope and rope["factor"] is None:  # as transformers derives it
        fields["factor"] = config["max_position_embeddings"] / fields["original_max_positions"]
    if "factor" not in fields:
        raise UnsupportedModel(f"config.json has {name} of type {kind!r} without a factor")
    return rope.get("rope_theta"), RopeScaling(type=kind, **fields)


def _write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {key: getattr(scaling, _ROPE_FIELDS[key]) for key in _ROPE_FIELDS if key in _ROPE_KEYS[scaling.type]}
    return {"rope_type": scaling.type, **{key: value for key, value in values.items() if value is not None}}
