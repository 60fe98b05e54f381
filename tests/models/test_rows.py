"""Shared prefixes against plain sequences: attention, hidden states, caches, and their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_cases as tiny

from brorl_jax.models.attention import attend, attend_with_prefix, segment_mask
from brorl_jax.models.transformer import block, forward, forward_rows, prefill, rms_norm, rotary

FAMILIES = pytest.mark.parametrize("cfg", [tiny.QWEN2, tiny.QWEN3, tiny.LLAMA], ids=lambda cfg: cfg.family)

# --- attention ---

S, ROWS, T, P, H, K, HD = 2, 3, 5, 4, 4, 2, 6
rng = np.random.default_rng(0)
Q, OWN_K, OWN_V, PREFIX_K, PREFIX_V = (
    rng.standard_normal(shape).astype(np.float32)
    for shape in [(S, ROWS, T, H, HD), (S, ROWS, T, K, HD), (S, ROWS, T, K, HD), (S, P, K, HD), (S, P, K, HD)]
)
SEGMENTS = np.array([[[1, 1, 1, 2, 2], [3, 4, 4, 4, 0], [0, 0, 0, 0, 0]], [[1] * 5, [2, 2, 0, 0, 0], [3, 0, 0, 0, 0]]])
VISIBLE = np.array([[True, True, True, False], [False] * 4])
MASK = np.asarray(segment_mask(jnp.asarray(SEGMENTS)))


with_prefix = jax.jit(attend_with_prefix)


def exact_attention(q, k, v, mask, prefix_k, prefix_v, visible):
    """One query at a time, keys gathered in a list, softmax in float64; zeros where nothing is visible."""
    out = np.zeros(q.shape)
    for s, r, t, h in np.ndindex(q.shape[:-1]):
        kv = h * k.shape[3] // q.shape[3]
        keys = [prefix_k[s, p, kv] for p in np.flatnonzero(visible[s])] + [
            k[s, r, u, kv] for u in np.flatnonzero(mask[s, r, t])
        ]
        values = [prefix_v[s, p, kv] for p in np.flatnonzero(visible[s])] + [
            v[s, r, u, kv] for u in np.flatnonzero(mask[s, r, t])
        ]
        if keys:
            scores = np.array(keys, np.float64) @ q[s, r, t, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[s, r, t, h] = weights / weights.sum() @ np.array(values, np.float64)
    return out


def sees_something():
    return MASK.any(-1) | VISIBLE.any(-1)[:, None, None]


def test_segment_mask_is_causal_within_segments_and_blind_in_padding():
    ids = SEGMENTS[0, 1]
    by_hand = [[i >= j and ids[i] == ids[j] != 0 for j in range(T)] for i in range(T)]
    np.testing.assert_array_equal(MASK[0, 1], by_hand)
    assert not MASK[0, 2].any()


def test_attention_with_prefix_is_one_softmax_over_prefix_and_row():
    ours = with_prefix(Q, OWN_K, OWN_V, MASK, PREFIX_K, PREFIX_V, VISIBLE)
    theirs = exact_attention(Q, OWN_K, OWN_V, MASK, PREFIX_K, PREFIX_V, VISIBLE)
    seen = sees_something()
    np.testing.assert_allclose(np.asarray(ours)[seen], theirs[seen], rtol=1e-5, atol=1e-6)
    assert not seen.all() and np.isfinite(ours).all()  # the blind ones are finite


def test_its_gradient_is_that_of_plain_attention_over_the_repeated_prefix():
    """Scores of prefix and row share their denominator: a gradient that forgets that is off by half."""
    cotangent = np.where(sees_something()[..., None, None], rng.standard_normal(Q.shape), 0).astype(np.float32)

    def shared(q, k, v, prefix_k, prefix_v):
        return jnp.sum(cotangent * attend_with_prefix(q, k, v, MASK, prefix_k, prefix_v, VISIBLE))

    def repeated(q, k, v, prefix_k, prefix_v):
        def join(prefix, own):
            whole = jnp.concatenate([jnp.repeat(prefix[:, None], ROWS, 1), own], axis=2)
            return whole.reshape(S * ROWS, P + T, K, HD)

        visible = np.broadcast_to(VISIBLE[:, None, None], (S, ROWS, T, P))
        mask = np.zeros((S, ROWS, P + T, P + T), bool)
        mask[:, :, P:] = np.concatenate([visible, MASK], axis=-1)
        queries = jnp.pad(q, [(0, 0), (0, 0), (P, 0), (0, 0), (0, 0)]).reshape(S * ROWS, P + T, H, HD)
        out = attend(queries, join(prefix_k, k), join(prefix_v, v), mask.reshape(S * ROWS, P + T, P + T))
        return jnp.sum(cotangent * out[:, P:].reshape(q.shape))

    arguments = (Q, OWN_K, OWN_V, PREFIX_K, PREFIX_V)
    ours, theirs = (jax.jit(jax.grad(f, argnums=range(5)))(*arguments) for f in (shared, repeated))
    tiny.assert_same(ours, theirs, 1e-5)


def test_gradients_of_fully_masked_queries_are_finite():
    """The blind third row included: whatever cotangent reaches it, nothing becomes NaN, in either attention."""

    def total(q, k, v, prefix_k, prefix_v):
        out = attend_with_prefix(q, k, v, jnp.zeros_like(MASK), prefix_k, prefix_v, jnp.zeros_like(VISIBLE))
        flat = attend(q[0], k[0], v[0], jnp.zeros((ROWS, T, T), bool))
        return jnp.sum(out**2) + jnp.sum(flat**2)

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=range(5)))(Q, OWN_K, OWN_V, PREFIX_K, PREFIX_V)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


def test_invisible_keys_and_values_may_hold_anything():
    arguments = [Q, OWN_K, OWN_V, PREFIX_K, PREFIX_V]
    clean = with_prefix(Q, OWN_K, OWN_V, MASK, PREFIX_K, PREFIX_V, VISIBLE)
    dirty = [x.copy() for x in arguments]
    for x in dirty[1:3]:
        x[SEGMENTS == 0] = 1e4
    for x in dirty[3:]:
        x[~VISIBLE] = -1e4
    again = with_prefix(Q, dirty[1], dirty[2], MASK, dirty[3], dirty[4], VISIBLE)
    seen = sees_something()
    np.testing.assert_array_equal(np.asarray(again)[seen], np.asarray(clean)[seen])


def test_bfloat16_attention_keeps_scores_and_softmax_in_float32():
    arguments = [jnp.asarray(x, jnp.bfloat16) for x in (3 * Q, OWN_K, OWN_V, PREFIX_K, PREFIX_V)]
    q, k, v, prefix_k, prefix_v = arguments
    ours = with_prefix(q, k, v, MASK, prefix_k, prefix_v, VISIBLE)
    assert ours.dtype == jnp.bfloat16
    q, k, v, prefix_k, prefix_v = (np.asarray(x, np.float64) for x in arguments)
    theirs, seen = exact_attention(q, k, v, MASK, prefix_k, prefix_v, VISIBLE), sees_something()
    # Scale, weights and partial sums are rounded to 8 bits each; scores of +-10 in bfloat16 would be far worse.
    error = np.abs(np.asarray(ours, np.float64) - theirs)[seen]
    assert error.max() < 4 * 2**-8 * np.abs(theirs).max() and error.mean() < 2**-8 * np.abs(theirs).mean()


# --- hidden states ---

PREFIX_LEN = np.array([6, 0, 3])
ROW_SEGMENTS = np.array(
    [
        [[1, 1, 1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3, 3, 3]],
        [[4, 5, 5, 6, 6, 6, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
        [[7, 7, 7, 7, 7, 8, 9, 9], [10, 10, 0, 0, 0, 0, 0, 0]],
    ]
)


@functools.cache
def rows():
    """Arguments of ``forward_rows``: three slots, ten responses; ids of padding are random like all others."""
    rng = np.random.default_rng(4)
    prefix = rng.integers(0, tiny.VOCAB, (3, 7))
    inputs = rng.integers(0, tiny.VOCAB, ROW_SEGMENTS.shape)
    positions = np.zeros_like(ROW_SEGMENTS)
    for s, r, t in np.ndindex(ROW_SEGMENTS.shape):
        first = np.flatnonzero(ROW_SEGMENTS[s, r] == ROW_SEGMENTS[s, r, t])[0]
        positions[s, r, t] = PREFIX_LEN[s] + t - first
    return prefix, PREFIX_LEN, inputs, ROW_SEGMENTS, positions


def repeated():
    """The ten responses as sequences of their own, ``[10, 16]``, and where each one's part is in both layouts."""
    prefix, lengths, inputs, segments, _ = rows()
    tokens, valid, where = np.zeros((10, 16), int), np.zeros((10, 16), int), []
    for segment in range(1, 11):
        s, r, t = np.nonzero(segments == segment)
        n = lengths[s[0]]
        tokens[segment - 1, : n + len(t)] = np.concatenate([prefix[s[0], :n], inputs[s, r, t]])
        valid[segment - 1, : n + len(t)] = 1
        where.append(((s, r, t), (segment - 1, slice(n, n + len(t)))))
    return tokens, valid, np.broadcast_to(np.arange(16), tokens.shape), where


run_rows = jax.jit(forward_rows, static_argnames=("cfg", "compute_dtype", "remat"))
run_plain = jax.jit(forward, static_argnames=("cfg", "compute_dtype", "remat"))


@FAMILIES
def test_rows_equal_whole_sequences(cfg):
    params = tiny.weights(cfg)
    ours = np.asarray(run_rows(params, cfg, *rows()))
    *arguments, where = repeated()
    theirs = np.asarray(run_plain(params, cfg, *arguments))
    for mine, their in where:
        np.testing.assert_allclose(ours[mine], theirs[their], rtol=1e-4, atol=1e-5)
    assert np.isfinite(ours).all()


@FAMILIES
def test_gradients_of_rows_equal_those_of_whole_sequences(cfg):
    *arguments, where = repeated()
    direction = np.random.default_rng(6).standard_normal(cfg.hidden).astype(np.float32) / cfg.hidden

    def shared(params):
        hidden = forward_rows(params, cfg, *rows())
        return sum(jnp.sum(jnp.sin(hidden[mine] @ direction)) for mine, _ in where)

    def plain(params):
        hidden = forward(params, cfg, *arguments)
        return sum(jnp.sum(jnp.sin(hidden[their] @ direction)) for _, their in where)

    params = {k: v for k, v in tiny.weights(cfg).items() if k != "head"}
    tiny.assert_same(jax.jit(jax.grad(shared))(params), jax.jit(jax.grad(plain))(params))


def test_a_segment_hears_nothing_from_its_neighbours():
    """Other ids in one response, its positions included, leave every other response bit-identical."""
    params, cfg = tiny.weights(), tiny.QWEN2
    prefix, lengths, inputs, segments, positions = rows()
    before = np.asarray(run_rows(params, cfg, *rows()))
    other = segments == 2
    after = np.asarray(
        run_rows(params, cfg, prefix, lengths, np.where(other, 50, inputs), segments, np.where(other, 99, positions))
    )
    np.testing.assert_array_equal(after[~other], before[~other])
    assert (after[other] != before[other]).any(-1).all()


def test_a_place_sees_what_came_before_it_and_its_prefix_only():
    params, cfg = tiny.weights(), tiny.QWEN2
    prefix, lengths, inputs, segments, positions = rows()
    before = np.asarray(run_rows(params, cfg, *rows()))
    later = inputs.copy()
    later[0, 1, 4] = (later[0, 1, 4] + 1) % tiny.VOCAB
    after = np.asarray(run_rows(params, cfg, prefix, lengths, later, segments, positions))
    changed = (after != before).any(-1)
    np.testing.assert_array_equal(np.argwhere(changed), [[0, 1, t] for t in range(4, 8)])
    first = prefix.copy()
    first[2, 0] = (first[2, 0] + 1) % tiny.VOCAB
    after = np.asarray(run_rows(params, cfg, first, lengths, inputs, segments, positions))
    changed = (after != before).any(-1)
    assert changed[2][segments[2] > 0].all() and not changed[:2].any()
    unseen = prefix.copy()
    unseen[2, 3:] = 5
    unseen[1] = 7  # a slot without a prefix
    after = np.asarray(run_rows(params, cfg, unseen, lengths, inputs, segments, positions))
    np.testing.assert_array_equal(after[segments > 0], before[segments > 0])


@pytest.mark.parametrize("run", ["rows", "plain"])
def test_remat_recomputes_the_same_gradient(run):
    cfg = tiny.QWEN3

    def total(params, remat):
        if run == "rows":
            return jnp.sum(jnp.sin(forward_rows(params, cfg, *rows(), remat=remat)))
        return jnp.sum(jnp.sin(forward(params, cfg, *repeated()[:3], remat=remat)))

    params = {k: v for k, v in tiny.weights(cfg).items() if k != "head"}
    gradient = jax.jit(jax.grad(total), static_argnames="remat")
    plain = gradient(params, "none")
    for remat in ("dots", "full"):
        tiny.assert_same(gradient(params, remat), plain, 1e-6)


def test_bfloat16_stays_near_float32():
    params, cfg = tiny.weights(), tiny.QWEN2
    exact = np.asarray(run_rows(params, cfg, *rows()))
    rough = run_rows(params, cfg, *rows(), compute_dtype=jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    where = rows()[3] > 0
    error = (np.asarray(rough, np.float32) - exact)[where]
    assert np.sqrt((error**2).mean() / (exact[where] ** 2).mean()) < 0.03


@FAMILIES
def test_prefill_gives_the_keys_and_values_that_later_tokens_need(cfg):
    """A token that attends to the cache of its prompt, layer by layer, is the same as in the whole sequence."""
    params = tiny.weights(cfg)
    prefix, lengths, inputs, _, _ = rows()
    keys, values = jax.jit(prefill, static_argnames="cfg")(params, cfg, prefix, lengths)
    assert keys.shape == values.shape == (cfg.layers, 3, 7, cfg.kv_heads, cfg.head_dim)
    for s, n in enumerate(lengths):
        token = inputs[s, 0, 0]
        x = params["embed"][token][None, None]
        for i in range(cfg.layers):
            layer = jax.tree.map(lambda w, i=i: w[i], params["layers"])

            def attention(q, k, v, i=i, s=s, n=n):
                whole_k = np.concatenate([keys[i, s, :n], k[0]])[None, None]
                whole_v = np.concatenate([values[i, s, :n], v[0]])[None, None]
                nothing = np.zeros((1, 1, cfg.kv_heads, cfg.head_dim))
                everything, blind = np.ones((1, 1, 1, n + 1), bool), np.zeros((1, 1), bool)
                return exact_attention(np.asarray(q)[:, None], whole_k, whole_v, everything, nothing, nothing, blind)[
                    :, 0
                ].astype(np.float32)

            x = block(layer, cfg, x, rotary(cfg, jnp.full((1, 1), n)), attention)
        ours = rms_norm(x, params["final_norm"], cfg.rms_eps)[0, 0]
        whole = np.concatenate([prefix[s, :n], [token]])[None]
        padded = np.zeros((1, 16), int)
        padded[:, : n + 1] = whole
        valid = (np.arange(16) <= n)[None].astype(int)
        theirs = run_plain(params, cfg, padded, valid, np.arange(16)[None])[0, n]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_prefill_does_not_depend_on_padding():
    params, cfg = tiny.weights(), tiny.QWEN2
    prefix, lengths, *_ = rows()
    wide = np.full((3, 12), 51)
    wide[:, :7] = np.where(np.arange(7) < lengths[:, None], prefix, 52)
    run = jax.jit(prefill, static_argnames="cfg")
    for narrow, padded in zip(run(params, cfg, prefix, lengths), run(params, cfg, wide, lengths), strict=True):
        for s, n in enumerate(lengths):
            np.testing.assert_allclose(narrow[:, s, :n], padded[:, s, :n], rtol=1e-5, atol=1e-6)
