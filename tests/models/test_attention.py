"""The forms of attention that hold no scores, against the one that holds them all and against float64."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rows as rows
import tiny_cases as tiny

from brorl_jax.models import attention, blockwise
from brorl_jax.models.transformer import forward_rows

ARRAYS = (rows.Q, rows.OWN_K, rows.OWN_V, rows.PREFIX_K, rows.PREFIX_V)
SEGMENTS, PREFIX_LEN = jnp.asarray(rows.SEGMENTS), jnp.asarray(rows.VISIBLE.sum(-1))
TRAINED = rows.SEGMENTS > 0
COTANGENT = np.random.default_rng(1).standard_normal(rows.Q.shape).astype(np.float32)

FORMS = {f"blocks-of-{n}": functools.partial(blockwise.attend, block=n) for n in (2, 64)}
FORMS["shards"] = functools.partial(blockwise.attend, block=2, shards=rows.T)
# What cuDNN is asked for: the same masks, without a GPU.
FORMS["joined"] = functools.partial(attention.attend_joined, implementation="xla")
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def value_and_gradients(form, arrays):
    """Output, and the gradient of a random function of the outputs of real tokens."""
    gradients, out = compiled(form)(*arrays)
    return np.asarray(out, np.float32), [np.asarray(g, np.float32) for g in gradients]


@functools.cache
def compiled(form):
    def total(*arrays):
        q, k, v, prefix_k, prefix_v = arrays
        out = form(q, k, v, SEGMENTS, prefix_k, prefix_v, PREFIX_LEN)
        return jnp.sum(jnp.where(TRAINED[..., None, None], COTANGENT * out.astype(jnp.float32), 0.0)), out

    return jax.jit(jax.grad(total, argnums=range(5), has_aux=True))


def all_scores(q, k, v, _, prefix_k, prefix_v, __):
    return attention.attend_with_prefix(q, k, v, rows.MASK, prefix_k, prefix_v, rows.VISIBLE)


@functools.cache
def reference():
    return value_and_gradients(all_scores, ARRAYS)


@EACH
def test_values_and_gradients_are_those_of_one_softmax(form):
    """Rows of several segments, one of padding alone, one slot without a prefix."""
    out, gradients = value_and_gradients(form, ARRAYS)
    exact = rows.exact_attention(*ARRAYS[:3], rows.MASK, *ARRAYS[3:], rows.VISIBLE)
    np.testing.assert_allclose(out[TRAINED], exact[TRAINED], rtol=1e-5, atol=1e-6)
    tiny.assert_same(gradients, reference()[1])


@EACH
def test_padding_may_hold_anything(form):
    """NaN in padding, and in what is left of the prefix: outputs and gradients are 0 there and the same elsewhere."""
    clean, gradients = value_and_gradients(form, ARRAYS)
    dirty = [x.copy() for x in ARRAYS]
    for x in dirty[:3]:
        x[~TRAINED] = np.nan
    for x in dirty[3:]:
        x[~rows.VISIBLE] = np.nan
    out, after = value_and_gradients(form, dirty)
    np.testing.assert_array_equal(out, clean)
    assert not out[~TRAINED].any() and (~TRAINED).any()
    tiny.assert_identical(after, gradients)
    assert not any(g[~TRAINED].any() for g in after[:3]) and not any(g[~rows.VISIBLE].any() for g in after[3:])


@EACH
def test_bfloat16_is_as_near_to_float64_as_the_form_with_all_scores(form):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in ARRAYS]
    rounded = [np.asarray(x, np.float64) for x in arrays]
    exact = rows.exact_attention(*rounded[:3], rows.MASK, *rounded[3:], rows.VISIBLE)
    ours, plain = value_and_gradients(form, arrays), value_and_gradients(all_scores, arrays)
    errors = [np.abs(out - exact)[TRAINED].mean() for out, _ in (ours, plain)]
    assert errors[0] < 1.5 * errors[1] < 2**-8 * np.abs(exact[TRAINED]).mean() * 1.5
    tiny.assert_same(ours[1], reference()[1], 0.02)  # a few of the 8 bits, over sums of a few terms


def test_two_attentions_merged_by_their_log_sum_exp_have_a_wrong_gradient():
    """Why there is one softmax: jax's log-sum-exp carries no gradient, so the parts' shares would be constants."""
    q, k, v = (jnp.asarray(x[0]) for x in ARRAYS[:3])

    def one(q):
        return jnp.sum(COTANGENT[0] * jax.nn.dot_product_attention(q, k, v))

    def merged(q):
        parts = [
            jax.nn.dot_product_attention(q, k[:, part], v[:, part], return_residual=True)
            for part in (slice(0, 2), slice(2, None))
        ]
        share = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)[..., None]
        return jnp.sum(COTANGENT[0] * sum(w * out for w, (out, _) in zip(share, parts, strict=True)))

    np.testing.assert_allclose(one(q), merged(q), rtol=1e-5)
    right, wrong = jax.grad(one)(q), jax.grad(merged)(q)
    assert np.linalg.norm(wrong - right) > 0.1 * np.linalg.norm(right)


@pytest.mark.parametrize("name", ["xla", "blockwise"])
def test_no_scores_of_a_whole_row_in_the_compiled_program(name):
    """Rows of 96 tokens beside prompts of 80, in blocks of 16: the program and its gradient hold nothing [96, 96].

    The form that holds all scores is looked at, too: the search finds what must not be there.
    """
    length, prefix = 96, 80

    def total(params, tokens, segments):
        hidden = forward_rows(
            params, tiny.QWEN2, jnp.zeros((1, prefix), jnp.int32), jnp.full(1, prefix), tokens, segments, tokens,
            attention=name, attention_block=16, remat="full",
        )  # fmt: skip
        return jnp.sum(hidden)

    ids = jnp.ones((1, 2, length), jnp.int32)
    text = jax.jit(jax.grad(total)).lower(tiny.weights(), ids, ids).compile().as_text()
    found = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)]
    squares = [dims for dims in found if dims.count(length) > 1 or (length in dims and prefix in dims) or
               dims.count(prefix) > 1]  # fmt: skip
    assert bool(squares) == (name == "xla")
    assert any(dims.count(16) > 1 for dims in found) == (name == "blockwise")
