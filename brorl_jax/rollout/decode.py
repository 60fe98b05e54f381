"""The device side of the embedded engine: caches, and a compiled loop that extends every live row by some tokens.

Rows are grouped in slots: a slot is one prompt, its rows are samples of it. The prompt's keys and values are stored
once per slot (``prefix``) and read by all its rows. Each row's own keys and values live in a ring over time: at every
step all rows write the same column, ``clock mod W``, and a row sees the columns written since it started. So a row can
end and another start in its place at any step without moving the others, and nothing depends on how long a row is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from brorl_jax.models.config import ModelConfig
from brorl_jax.models.transformer import Params, block, prefill, rms_norm, rotary, unembed
from brorl_jax.rollout import sampling


class Cache(NamedTuple):
    """Keys and values: one pair of arrays per layer, heads before time.

    Attributes:
        prefix: ``L`` pairs ``[S, K, P, h]``, shared by a slot's rows.
        ring: ``L`` pairs ``[S, n, K, W, h]``, each row's own.
    """

    prefix: tuple[tuple[Array, Array], ...]
    ring: tuple[tuple[Array, Array], ...]


class Rows(NamedTuple):
    """Where every row stands. Small, rewritten by the host between calls.

    Attributes:
        token: int32 ``[S, n]``, next input.
        position: int32 ``[S, n]``, its position in the whole sequence.
        start: int32 ``[S, n]``, clock at the row's first step.
        live: bool ``[S, n]``, still generating.
        words: uint32 ``[S, n, 2]``, seed.
        prefix_len: int32 ``[S]``.
        clock: int32 ``[]``, steps run so far.
    """

    token: Int[Array, "S n"]
    position: Int[Array, "S n"]
    start: Int[Array, "S n"]
    live: Bool[Array, "S n"]
    words: UInt32[Array, "S n 2"]
    prefix_len: Int[Array, " S"]
    clock: Int[Array, ""]


class Knobs(NamedTuple):
    """Sampling settings as arrays, so that changing them does not recompile."""

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    top_k: Int[Array, ""]
    min_p: Float[Array, ""]
    max_tokens: Int[Array, ""]
    stop_ids: Int[Array, " stops"]


def empty_cache(cfg: ModelConfig, slots: int, rows: int, prefix: int, window: int, dtype: Any) -> Cache:
    """A cache of zeros."""

    def pair(*shape: int) -> tuple[Array, Array]:
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    heads, dim = cfg.kv_heads, cfg.head_dim
    return Cache(
        prefix=tuple(pair(slots, heads, prefix, dim) for _ in range(cfg.layers)),
        ring=tuple(pair(slots, rows, heads, window, dim) for _ in range(cfg.layers)),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"), donate_argnames="cache")
@functools.partial(jax.named_call, name="prefill")
def insert_prompts(
    params: Params,
    cache: Cache,
    slot_ids: Int[Array, " k"],
    prefix: Int[Array, "k P"],
    prefix_len: Int[Array, " k"],
    *,
    cfg: ModelConfig,
    dtype: Any,
) -> Cache:
    """Prefills ``k`` prompts into their slots; a slot id out of range is padding and goes nowhere."""
    keys, values = prefill(params, cfg, prefix, prefix_len, compute_dtype=dtype)  # [L, k, P, K, h]

    def put(old: Array, new: Array) -> Array:
        return old.at[slot_ids].set(new.swapaxes(1, 2), mode="drop")

    pairs = tuple((put(k_old, keys[i]), put(v_old, values[i])) for i, (k_old, v_old) in enumerate(cache.prefix))
    return cache._replace(prefix=pairs)


@functools.partial(jax.jit, static_argnames="window")
def grow(cache: Cache, clock: Int[Array, ""], *, window: int) -> Cache:
    """The same cache with a ring of ``window`` columns: every column moves to its clock modulo the new size."""
    old = cache.ring[0][0].shape[3]
    column = jnp.arange(window)
    written = clock - 1 - (clock - 1 - column) % window  # the last clock that maps to this column
    return cache._replace(ring=jax.tree.map(lambda x: jnp.take(x, written % old, axis=3), cache.ring))


@jax.jit
def select(cache: Cache, slots: Int[Array, " s"], rows: Int[Array, "s m"]) -> Cache:
    """The cache of some rows of some slots only."""
    return Cache(
        prefix=jax.tree.map(lambda x: x[slots], cache.prefix),
        ring=jax.tree.map(lambda x: x[slots[:, None], rows], cache.ring),
    )


def _attention(cached: Cache, layer: int, visible: Array, ring_visible: Array, column: Array, updated: list) -> Any:
    """Attention of one new token per row over its slot's prefix, its own ring and itself; writes it into the ring."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        slots, rows, _, heads, dim = q.shape
        kv_heads = k.shape[3]
        old_k, old_v = cached.ring[layer]
        updated.append(
            tuple(
                jax.lax.dynamic_update_slice_in_dim(old, new.swapaxes(2, 3), column, axis=3)
                for old, new in ((old_k, k), (old_v, v))
            )
        )
        q = q.reshape(slots, rows, kv_heads, heads // kv_heads, dim) * (dim**-0.5)
        k, v = k[:, :, 0], v[:, :, 0, :, None]
        prefix_k, prefix_v = cached.prefix[layer]

        def product(spec: str, a: Array, b: Array) -> Array:
            return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

        # One softmax over prefix, ring and the token itself. The ring is read as it was before this token: a read of
        # the updated one would make XLA:CPU copy all of it at every step. Scores stay in the order of their products.
        on_prefix = jnp.where(visible[:, None, None, None], product("snkgh,skph->skngp", q, prefix_k), -jnp.inf)
        on_ring = jnp.where(ring_visible[:, :, None, None], product("snkgh,snkwh->snkgw", q, old_k), -jnp.inf)
        on_self = product("snkgh,snkh->snkg", q, k)
        top = jnp.maximum(jnp.maximum(on_prefix.max(-1).swapaxes(1, 2), on_ring.max(-1)), on_self)
        on_prefix = jnp.exp(on_prefix - top.swapaxes(1, 2)[..., None])
        on_ring = jnp.exp(on_ring - top[..., None])
        on_self = jnp.exp(on_self - top)
        total = on_prefix.sum(-1).swapaxes(1, 2) + on_ring.sum(-1) + on_self
        out = product("skngp,skph->skngh", on_prefix.astype(v.dtype), prefix_v).swapaxes(1, 2)
        out = out + product("snkgw,snkwh->snkgh", on_ring.astype(v.dtype), old_v)
        out = out + on_self[..., None] * v.astype(jnp.float32)
        return (out / total[..., None]).astype(v.dtype).reshape(slots, rows, 1, heads, dim)

    return attention


def _step(layers: list[Params], params: Params, cfg: ModelConfig, cache: Cache, rows: Rows, dtype: Any) -> Any:
    """Logits ``[S*n, V]`` of the next token of every row, and the cache with this step written."""
    window = cache.ring[0][0].shape[3]
    column = rows.clock % window
    age = (rows.clock - jnp.arange(window)) % window  # steps since a column was written
    ring_visible = (age > 0) & (age <= (rows.clock - rows.start)[..., None])
    visible = jnp.arange(cache.prefix[0][0].shape[2]) < rows.prefix_len[:, None]
    rope = rotary(cfg, rows.position[..., None])
    x = params["embed"][rows.token][:, :, None].astype(dtype)
    updated: list[tuple[Array, Array]] = []
    for i, w in enumerate(layers):
        x = block(w, cfg, x, rope, _attention(cache, i, visible, ring_visible, column, updated))
    x = rms_norm(x, params["final_norm"], cfg.rms_eps).reshape(-1, cfg.hidden)
    logits = jnp.matmul(x, unembed(params).astype(dtype), preferred_element_type=jnp.float32)
    return logits, cache._replace(ring=tuple(updated))


@functools.partial(jax.jit, static_argnames=("cfg", "steps", "mode", "real_vocab", "dtype"), donate_argnames=("cache",))
@functools.partial(jax.named_call, name="generation")
def decode(
    params: Params,
    cache: Cache,
    rows: Rows,
    knobs: Knobs,
    *,
    cfg: ModelConfig,
    steps: int,
    mode: str,
    real_vocab: int,
    dtype: Any,
) -> tuple[Cache, Rows, Int[Array, "steps S n"], Float[Array, "steps S n"]]:
    """Extends every live row by up to ``steps`` tokens; returns early when no row lives.

    Args:
        mode: ``full`` samples from the whole softmax, ``restricted`` applies top-k, top-p and min-p, ``greedy`` takes
            the most likely token.
        real_vocab: Ids from here on are padding of the embedding and are never sampled.

    Returns:
        The new cache and rows, and what was sampled: ``tokens`` (-1 where a row was not live) and ``logp`` under the
        distribution that was sampled from.
    """
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(cfg.layers)]

    def body(carry: Any) -> Any:
        i, cache, rows, tokens, logps = carry
        logits, cache = _step(layers, params, cfg, cache, rows, dtype)
        if real_vocab < cfg.vocab_size:
            logits = jnp.where(jnp.arange(cfg.vocab_size) < real_vocab, logits, -jnp.inf)
        count = rows.position - rows.prefix_len[:, None]  # tokens the row has already
        if mode == "greedy":
            token, logp = sampling.greedy(logits)
        else:
            logits = logits / knobs.temperature
            if mode == "restricted":
                logits = sampling.restrict(logits, knobs.top_p, knobs.top_k, knobs.min_p)
            token, logp = sampling.draw(logits, sampling.uniforms(rows.words, count).reshape(-1, 2))
        token = token.astype(jnp.int32).reshape(rows.token.shape)
        logp = logp.reshape(rows.token.shape)
        tokens = tokens.at[i].set(jnp.where(rows.live, token, -1))
        logps = logps.at[i].set(jnp.where(rows.live, logp, 0.0))
        stopped = jnp.any(token[..., None] == knobs.stop_ids, axis=-1) | (count + 1 >= knobs.max_tokens)
        rows = rows._replace(token=token, position=rows.position + 1, live=rows.live & ~stopped, clock=rows.clock + 1)
        return i + 1, cache, rows, tokens, logps

    shape = (steps, *rows.token.shape)
    start = (jnp.int32(0), cache, rows, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, cache, rows, tokens, logps = jax.lax.while_loop(
        lambda carry: (carry[0] < steps) & jnp.any(carry[2].live), body, start
    )
    return cache, rows, tokens, logps


def knobs(settings: Any) -> Knobs:
    """``rollout.api.Sampling`` as arrays; the stop ids are padded to a multiple of 8 so that shapes repeat."""
    stops = sorted(settings.stop_ids)
    stops += [-2] * (-len(stops) % 8 or (0 if stops else 8))
    return Knobs(
        temperature=np.float32(settings.temperature),
        top_p=np.float32(settings.top_p),
        top_k=np.int32(settings.top_k),
        min_p=np.float32(settings.min_p),
        max_tokens=np.int32(settings.max_tokens),
        stop_ids=np.asarray(stops, np.int32),
    )
