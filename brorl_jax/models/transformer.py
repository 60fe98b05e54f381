"""One decoder for the Qwen2, Qwen3 and Llama families: pure functions over a dictionary of stacked weights.

Weights (``L`` layers stacked on axis 0, matrices stored ``[in, out]``)::

    embed [V, D]        layers/attn_norm [L, D]   layers/q [L, D, H*h]   layers/k, v [L, D, K*h]   layers/o [L, H*h, D]
    final_norm [D]      layers/mlp_norm  [L, D]   layers/gate, up [L, D, F]   layers/down [L, F, D]
    head [D, V]         only if the embedding is not tied
    layers/q_bias, k_bias, v_bias   only with attention bias (Qwen2)
    layers/q_norm, k_norm [L, h]    only with per-head norms (Qwen3)

The training pass (``forward``, ``forward_rows``) scans over the layers; decoding (``rollout.local``) unrolls the same
``block`` and brings its own attention over caches. So there is one definition of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from brorl_jax.models.attention import ATTENTION, attend, segment_mask
from brorl_jax.models.config import ModelConfig
from brorl_jax.models.placement import Placement

Params = dict[str, Any]
Rotary = tuple[Float[Array, "*b T h2"], Float[Array, "*b T h2"]]

REMAT = {
    "none": None,  # keep every activation
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep matrix products, recompute the rest
    "full": jax.checkpoint_policies.nothing_saveable,  # keep one hidden state per layer
}


def shapes(cfg: ModelConfig) -> Params:
    """The weight tree with a shape tuple in place of each array."""
    d, layers, q, kv = cfg.hidden, cfg.layers, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "q": (d, q),
        "k": (d, kv),
        "v": (d, kv),
        "o": (q, d),
        "mlp_norm": (d,),
        "gate": (d, cfg.ffn),
        "up": (d, cfg.ffn),
        "down": (cfg.ffn, d),
    }
    if cfg.attention_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if cfg.qk_norm:
        layer |= {"q_norm": (cfg.head_dim,), "k_norm": (cfg.head_dim,)}
    tree: Params = {
        "embed": (cfg.vocab_size, d),
        "layers": {name: (layers, *shape) for name, shape in layer.items()},
        "final_norm": (d,),
    }
    if not cfg.tied:
        tree["head"] = (d, cfg.vocab_size)
    return tree


def init(key: Array, cfg: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random weights: normal with deviation 0.02, outputs of residual branches scaled by 1/sqrt(2 L), norms one."""

    def leaf(path: tuple[Any, ...], shape: tuple[int, ...], key: Array) -> Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        scale = 0.02 / (2 * cfg.layers) ** 0.5 if name in ("o", "down") else 0.02
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    tree = shapes(cfg)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(paths))
    return jax.tree_util.tree_unflatten(treedef, [leaf(p, s, k) for (p, s), k in zip(paths, keys, strict=True)])


def unembed(params: Params) -> Float[Array, "D V"]:
    """The output projection: its own matrix, or the transposed embedding if tied."""
    return params["head"] if "head" in params else params["embed"].T


def rms_norm(x: Float[Array, "*b D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*b D"]:
    """``weight * x / sqrt(mean(x^2) + eps)``, computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * (x32 * scale).astype(x.dtype)


@jax.custom_vjp
def linear(x: Float[Array, "*b I"], w: Float[Array, "I O"]) -> Float[Array, "*b O"]:
    """``x @ w``. The weights' gradient is taken so that the narrower of ``x`` and the cotangent is the transposed one.

    By itself JAX always transposes the cotangent, which XLA:CPU writes to memory: for the wide half of an MLP, and for
    several products of one ``x``, that costs more than the product.
    """
    return x @ w


def _linear_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _linear_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    tokens = tuple(range(x.ndim - 1))
    contract = (tokens, tokens), ((), ())
    narrow = x.shape[-1] <= g.shape[-1]
    d_weight = jax.lax.dot_general(x, g, contract) if narrow else jax.lax.dot_general(g, x, contract).T
    return g @ w.T, d_weight


linear.defvjp(_linear_forward, _linear_backward)


def rotary(cfg: ModelConfig, positions: Int[Array, "*b T"]) -> Rotary:
    """Cosines and sines of the rotary embedding at ``positions``, float32."""
    frequencies, factor = cfg.rope()
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "*b T n h"], rope: Rotary) -> Float[Array, "*b T n h"]:
    """Rotates each head by its position; the first and second half of a head form the pairs (Hugging Face layout)."""
    cos, sin = (part[..., None, :] for part in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def block(
    w: Params,
    cfg: ModelConfig,
    x: Float[Array, "*b T D"],
    rope: Rotary,
    attention: Callable[[Array, Array, Array], Float[Array, "*b T H h"]],
) -> Float[Array, "*b T D"]:
    """One layer. ``attention(q, k, v)`` sees heads split and rotated; it decides what attends to what."""
    dtype = x.dtype

    def project(name: str, heads: int) -> Array:
        y = linear(h, w[name].astype(dtype))
        if cfg.attention_bias:
            y = y + w[f"{name}_bias"].astype(dtype)
        return y.reshape(*y.shape[:-1], heads, cfg.head_dim)

    with jax.named_scope("attention"):
        h = rms_norm(x, w["attn_norm"], cfg.rms_eps)
        q, k, v = project("q", cfg.heads), project("k", cfg.kv_heads), project("v", cfg.kv_heads)
        if cfg.qk_norm:
            q, k = rms_norm(q, w["q_norm"], cfg.rms_eps), rms_norm(k, w["k_norm"], cfg.rms_eps)
        out = attention(rotate(q, rope), rotate(k, rope), v)
        x = x + linear(out.reshape(*out.shape[:-2], -1), w["o"].astype(dtype))
    with jax.named_scope("mlp"):
        h = rms_norm(x, w["mlp_norm"], cfg.rms_eps)
        gated = jax.nn.silu(linear(h, w["gate"].astype(dtype))) * linear(h, w["up"].astype(dtype))
        return x + linear(gated, w["down"].astype(dtype))


def _scan(body: Callable[[Any, Params], tuple[Any, Any]], carry: Any, layers: Params, remat: str) -> tuple[Any, Any]:
    policy = REMAT[remat]
    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jax.lax.scan(body, carry, layers)


@functools.partial(jax.named_call, name="transformer")
def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    compute_dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, for rows of packed sequences.

    Args:
        tokens: Token ids.
        segment_ids: 0 for padding, otherwise which sequence of the row a token belongs to.
        positions: Position of each token within its own sequence.
        compute_dtype: Dtype of activations and matrix products; norms, softmax and rotary angles stay float32.
        remat: ``none``, ``dots`` or ``full``: what the backward pass recomputes.
    """
    rope, mask = rotary(cfg, positions), segment_mask(segment_ids)

    def layer(x: Array, w: Params) -> tuple[Array, None]:
        return block(w, cfg, x, rope, lambda q, k, v: attend(q, k, v, mask)), None

    x, _ = _scan(layer, params["embed"][tokens].astype(compute_dtype), params["layers"], remat)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


@functools.partial(jax.named_call, name="transformer_rows")
def forward_rows(
    params: Params,
    cfg: ModelConfig,
    prefix: Int[Array, "S P"],
    prefix_len: Int[Array, " S"],
    inputs: Int[Array, "S rows T"],
    segment_ids: Int[Array, "S rows T"],
    positions: Int[Array, "S rows T"],
    *,
    compute_dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    attention: str = "xla",
    attention_block: int = 512,
    sharding: NamedSharding | None = None,
) -> Float[Array, "S rows T D"]:
    """Hidden states of packed responses, each attending to its slot's prefix (computed once) and to itself.

    Equal to ``forward`` on sequences that repeat the prefix before every response; ``prefix_len`` may be 0.

    Args:
        attention: ``xla``, ``blockwise`` or ``cudnn``, see ``models.attention``.
        attention_block: Queries and keys at a time in ``blockwise``.
        sharding: Of the rows, along slots and perhaps tokens; prompts are whole on every device that has their slot.
            Without it the compiler may follow the weights' instead, and give every device all slots and a part of the
            width.
    """
    where = Placement(sharding)
    columns = jnp.arange(prefix.shape[1])
    prefix_rope = rotary(cfg, jnp.broadcast_to(columns, prefix.shape))
    rope = rotary(cfg, positions)
    bind = functools.partial(ATTENTION[attention], block=attention_block, shards=where.shards)
    attend_to = bind(segment_ids, prefix_len, prefix.shape[1])

    def layer(carry: tuple[Array, Array], w: Params) -> tuple[tuple[Array, Array], None]:
        x_prefix, x = carry
        cached: list[Array] = []

        def on_prefix(q: Array, k: Array, v: Array) -> Array:
            cached.extend((k, v))
            return attend_to.prompts(q, k, v)

        def on_rows(q: Array, k: Array, v: Array) -> Array:
            return attend_to.rows(q, where.gather(k), where.gather(v), cached[0], cached[1])

        x_prefix = where.slots(block(w, cfg, x_prefix, prefix_rope, on_prefix))
        return (x_prefix, where.rows(block(w, cfg, x, rope, on_rows))), None

    embed = params["embed"]
    start = where.slots(embed[prefix].astype(compute_dtype)), where.rows(embed[inputs].astype(compute_dtype))
    (_, x), _ = _scan(layer, start, params["layers"], remat)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def prefill(
    params: Params,
    cfg: ModelConfig,
    prefix: Int[Array, "S P"],
    prefix_len: Int[Array, " S"],
    *,
    compute_dtype: jnp.dtype = jnp.float32,
) -> tuple[Float[Array, "L S P K h"], Float[Array, "L S P K h"]]:
    """Keys and values of every layer for a batch of prompts; places beyond ``prefix_len`` hold rubbish."""
    columns = jnp.arange(prefix.shape[1])
    rope = rotary(cfg, jnp.broadcast_to(columns, prefix.shape))
    mask = segment_mask((columns[None, :] < prefix_len[:, None]).astype(jnp.int32))

    def layer(x: Array, w: Params) -> tuple[Array, tuple[Array, Array]]:
        cached: list[Array] = []

        def attention(q: Array, k: Array, v: Array) -> Array:
            cached.extend((k, v))
            return attend(q, k, v, mask)

        x = block(w, cfg, x, rope, attention)
        return x, (cached[0], cached[1])

    _, (keys, values) = _scan(layer, params["embed"][prefix].astype(compute_dtype), params["layers"], "none")
    return keys, values
