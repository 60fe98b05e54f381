"""AdamW, its learning-rate schedule, and an update that a non-finite gradient cannot touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree


def lr_schedule(lr: float, warmup_steps: int) -> optax.Schedule:
    """``lr * min(1, (update + 1) / warmup_steps)``, update counted from 0: the first one is not wasted on rate 0.

    Constant afterwards [V1]; ``warmup_steps = 0``: constant throughout. Skipped updates do not count.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}")
    return lambda count: lr * jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))


def decay_mask(params: PyTree) -> PyTree:
    """True where weight decay applies: matrices, embedding and head included; not norm scales, not biases.

    Told apart by name (``*_norm``, ``*_bias``): with layers stacked, a norm scale has two axes as well.
    """

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return not name.endswith(("_norm", "_bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(
    lr: float,
    *,
    warmup_steps: int,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
    moment_dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Clipping by global norm (``clip_norm = 0``: none), then AdamW with the rate of ``lr_schedule`` [V1: constant].

    Decoupled decay on matrices only (``decay_mask``), scaled by the learning rate as in PyTorch. Report the norm before
    clipping from ``apply_or_skip``.

    Args:
        moment_dtype: Of the stored moments, float32 or bfloat16; the arithmetic is float32 either way.
    """
    if clip_norm < 0:
        raise ValueError(f"clip_norm must be >= 0 (0 turns clipping off), got {clip_norm}")
    adamw = optax.adamw(
        lr_schedule(lr, warmup_steps), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask
    )
    adamw = _with_moments_in(adamw, jnp.dtype(moment_dtype))
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw) if clip_norm else adamw


def _with_moments_in(adamw: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """AdamW that stores its moments in ``dtype`` between updates."""

    def cast(state: Any, convert: Callable[[Array, int], Array]) -> Any:
        moments = state[0].mu, state[0].nu
        leaves, treedef = jax.tree.flatten(moments)
        mu, nu = jax.tree.unflatten(treedef, [convert(x, i) for i, x in enumerate(leaves)])
        return (state[0]._replace(mu=mu, nu=nu), *state[1:])

    def init(params: PyTree) -> Any:
        return cast(adamw.init(params), lambda x, _: x.astype(dtype))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> Any:
        result: Any = adamw.update(grads, cast(state, lambda x, _: x.astype(jnp.float32)), params)
        updates, new = result
        if dtype == jnp.float32:
            return updates, new
        key = jax.random.fold_in(jax.random.key(0), new[0].count)
        return updates, cast(new, lambda x, i: round_randomly(x, jax.random.fold_in(key, i)))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def round_randomly(x: Float[Array, "*b"], key: Array) -> Float[Array, "*b"]:
    """float32 to one of its two neighbours in bfloat16, with the probabilities that keep its expectation.

    Rounding to the nearest would freeze a moment: with ``b2 = 0.999`` it moves by a thousandth of itself per update,
    and bfloat16 has steps of a hundred-and-twenty-eighth.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise  # a carry goes to the last bit that is kept
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """``sqrt(sum of squares)`` over all leaves, in float32 whatever their dtype."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def apply_or_skip(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, Float[Array, ""], Bool[Array, ""]]:
    """One update, or none at all if the gradient's norm is NaN or infinite.

    A skipped update leaves parameters and optimiser state, its counters included, bit-identical.

    Returns:
        ``(params, opt_state, grad_norm, skipped)``: the norm before clipping, and a bool scalar to be counted.
    """
    norm = global_norm(grads)
    finite = jnp.isfinite(norm)
    updates, new_state = optimizer.update(grads, opt_state, params)
    # A select, not a cond: it fuses with the element-wise update, and donated buffers are still reused.
    new_params, new_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (optax.apply_updates(params, updates), new_state),
        (params, opt_state),
    )
    return new_params, new_state, norm, ~finite
