"""The compiled update: its figures from their definitions, its memory, and what it does with bad and empty batches."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_cases as tiny

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.optim import make_optimizer
from brorl_jax.learner.step import Compute, make_gradient, make_train_step

LAYOUT = Layout(2, 4, 8)
OPTIMIZER = make_optimizer(1e-2, warmup_steps=0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)


def groups(seed=3):
    return tiny.engine_logps(tiny.random_groups([5, 2, 7, 3], seed=seed))


def batch_of(made, **how):
    return tiny.packed(made, LAYOUT, prefix=8, n_micro=3, **how)


# --- figures from their definitions ---


def by_definition(batch, logp, loss, aggregation, correction, divergence):
    """Every figure of an update in float64, response by response, from the log-probabilities alone."""
    per_response, every = [], []
    tokens = int(batch.mask.sum())
    for m in range(len(batch.mask)):
        for segment in range(1, batch.segment_ids[m].max() + 1):
            at = (m, *np.nonzero(batch.segment_ids[m] == segment))
            new, old, ref, rollout = (
                np.asarray(x[at], np.float64) for x in (logp, batch.old_logp, batch.ref_logp, batch.rollout_logp)
            )
            a = float(batch.advantages[at][0])
            ratio = np.exp(new - old)
            if loss == "gspo":
                ratio = np.full_like(ratio, np.exp(np.mean(new - old)))
            low, high = 1 - tiny.BOUNDS["eps_low"], 1 + tiny.BOUNDS["eps_high"]
            clipped = np.clip(ratio, low, high)
            policy = -clipped * a * new if loss == "cispo" else -np.minimum(ratio * a, clipped * a)
            w = np.exp(old - rollout)
            if correction == "tis":
                policy *= np.minimum(w, tiny.BOUNDS["high"])
            if correction == "mask":
                policy *= w * ((w >= tiny.BOUNDS["low"]) & (w <= tiny.BOUNDS["high"]))
            d = new - ref
            kl = d**2 / 2 if divergence == "k2" else np.exp(-d) - 1 + d
            if loss == "cispo":
                outside = (ratio < low, ratio > high)
            else:
                outside = ((ratio < low) & (a < 0), (ratio > high) & (a > 0))
            per_response.append((policy, kl))
            every.append(np.stack([ratio, *outside, kl]))

    def reduce(terms):
        if aggregation == "token":
            return sum(x.sum() for x in terms) / tokens
        if aggregation == "sequence":
            return np.mean([x.mean() for x in terms])
        return np.mean([x.sum() / tiny.MAX_TOKENS for x in terms])

    ratio, clip_low, clip_high, kl = np.concatenate(every, axis=1)
    policy_loss = reduce([p for p, _ in per_response])
    kl_loss = tiny.KL_COEF * reduce([k for _, k in per_response])
    return {
        "loss/policy": policy_loss,
        "loss/kl": kl_loss,
        "loss/total": policy_loss + kl_loss,
        "policy/kl_ref": kl.mean(),
        "policy/ratio_mean": ratio.mean(),
        "policy/ratio_max": ratio.max(),
        "policy/clip_low": clip_low.mean(),
        "policy/clip_high": clip_high.mean(),
        "batch/tokens": tokens,
        "batch/sequences": len(per_response),
    }


@pytest.mark.parametrize(
    ("loss", "aggregation", "correction", "divergence"),
    [
        ("ppo_clip", "token", "tis", "k2"),
        ("ppo_clip", "constant", "mask", "k3"),
        ("gspo", "sequence", "none", "k3"),  # its responses lie in several rows of several micro-batches
        ("cispo", "sequence", "tis", "k2"),
    ],
)
def test_every_figure_is_its_definition(loss, aggregation, correction, divergence):
    batch, params = batch_of(groups()), tiny.weights()
    names = {"loss": loss, "aggregation": aggregation, "correction": correction, "divergence": divergence}
    _, metrics, logp = tiny.gradient(**names)(params, batch)
    figures = by_definition(batch, np.asarray(logp), **names)
    entropy = metrics.pop("policy/entropy")
    assert metrics.keys() == figures.keys()
    for key, value in figures.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-7, err_msg=key)
    assert figures["policy/clip_low"] > 0  # the bounds do bite
    rows = tiny.whole_sequences(groups())
    logps = np.asarray(jax.vmap(lambda t: tiny.plain_logp(params, tiny.QWEN2, rows | {"tokens": t}))(everything(rows)))
    exact = -(np.exp(logps) * logps).sum(0)[rows["mask"]].mean()
    np.testing.assert_allclose(entropy, exact, rtol=1e-5)


def everything(rows):
    """Each id of the vocabulary in every place, ``[V, B, width]``."""
    return np.broadcast_to(np.arange(tiny.VOCAB)[:, None, None], (tiny.VOCAB, *rows["tokens"].shape))


def test_log_probabilities_of_the_update_are_those_of_the_scoring_pass():
    batch, params = batch_of(groups()), tiny.weights()
    logp = tiny.gradient()(params, batch)[2]
    np.testing.assert_array_equal(logp, tiny.score()(params, batch))
    rows = tiny.whole_sequences(groups())
    exact = np.asarray(tiny.plain_logp(params, tiny.QWEN2, rows))[rows["mask"]]
    np.testing.assert_allclose(np.sort(np.asarray(logp)[batch.mask]), np.sort(exact), rtol=1e-4, atol=1e-5)


# --- the first update ---


def test_first_update_has_ratio_one_and_no_divergence():
    """Of a step's only update, whatever is in old_logp; the reference was scored by the program for scoring."""
    params = tiny.weights()
    batch = batch_of(groups())
    batch = batch._replace(ref_logp=tiny.score()(params, batch), old_logp=np.full_like(batch.old_logp, np.nan))
    grads, metrics, _ = tiny.gradient(on_policy=True)(params, batch)
    assert metrics["policy/ratio_max"] == 1 and abs(metrics["policy/ratio_mean"] - 1) < 1e-6
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0
    assert metrics["policy/kl_ref"] == 0 and metrics["loss/kl"] == 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_of_several_updates_the_first_has_ratio_one_and_the_second_not():
    optimizer = optax.sgd(0.05)
    step = make_train_step(tiny.QWEN2, tiny.objective(), tiny.COMPUTE, optimizer)
    state = state_lib.create(tiny.weights(), optimizer, reference=False)
    state = jax.tree.map(jnp.copy, state)
    batches = [batch_of(groups(seed)) for seed in (3, 4)]
    scored = [b._replace(**dict.fromkeys(("old_logp", "ref_logp"), tiny.score()(state.params, b))) for b in batches]
    state, first, _ = step(state, scored[0])
    state, second, _ = step(state, scored[1])
    assert abs(first["policy/ratio_mean"] - 1) < 1e-6 and abs(first["policy/ratio_max"] - 1) < 1e-6
    assert abs(first["policy/kl_ref"]) < 1e-12
    assert second["policy/ratio_max"] > 1.001 and second["policy/kl_ref"] > 1e-6


# --- memory ---


def shapes_with(size, text):
    """Products of the other axes, of all arrays of the program that have an axis of this size."""
    found = (tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text))
    return {int(np.prod(dims)) // size for dims in found if size in dims}


def compiled(micro_batches, layout, chunk=30):
    """The train step compiled for so many micro-batches."""
    batch = pack(tiny.random_groups([1]), layout, prefix=8, n_micro=micro_batches)
    step = make_train_step(tiny.QWEN2, tiny.objective(), Compute(head_chunk=chunk), OPTIMIZER)
    return step.lower(state_lib.create(tiny.weights(), OPTIMIZER, reference=True), batch).compile()


def test_no_buffer_of_tokens_times_vocabulary():
    """In the optimised program nothing with a vocabulary axis has more than a head chunk (30) of rows.

    The weights have their width, and the embedding's gradient on CPU at most 256 tokens at a time.
    """
    tokens = 2 * 4 * 40
    program = compiled(2, Layout(2, 4, 40))
    beside = shapes_with(tiny.VOCAB, program.as_text())
    assert {tiny.QWEN2.hidden, 30} <= beside <= {1, tiny.QWEN2.hidden, 30, 256}
    assert max(beside) < tokens
    whole = compiled(2, Layout(2, 4, 40), chunk=10_000)  # the search does find what must not be there
    assert tokens in shapes_with(tiny.VOCAB, whole.as_text())


def test_peak_memory_does_not_depend_on_how_many_samples_there_are():
    """Eight times the micro-batches: eight times the input and, besides, at most one float for each place."""
    few, many = (compiled(m, LAYOUT).memory_analysis() for m in (3, 24))
    one_array = 4 * LAYOUT.slots * LAYOUT.rows * LAYOUT.row_tokens  # bytes, of one micro-batch
    assert many.argument_size_in_bytes - few.argument_size_in_bytes > 21 * 7 * one_array
    assert abs(many.temp_size_in_bytes - few.temp_size_in_bytes) <= 22 * one_array
    assert few.temp_size_in_bytes > 100 * one_array


# --- bad, empty and padding batches ---


@pytest.fixture(scope="module")
def step():
    return make_train_step(tiny.QWEN2, tiny.objective(), tiny.COMPUTE, OPTIMIZER)


def fresh(reference=True):
    """A state whose buffers may be donated without hurting the weights that tests share."""
    return jax.tree.map(jnp.copy, state_lib.create(tiny.weights(), OPTIMIZER, reference=reference))


def host(tree):
    return jax.tree.map(np.array, tree)


def spoiled(batch, value):
    advantages = batch.advantages.copy()
    advantages[1][batch.mask[1]] = value
    return batch._replace(advantages=advantages)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30], ids=["nan", "inf", "norm-overflows"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(step, value):
    """Weights, moments and their counter are bit-identical; the next update is as if it had not happened."""
    good = batch_of(groups())
    state, _, _ = step(fresh(), good)
    before = host(state)
    state, metrics, _ = step(state, spoiled(good, value))
    assert metrics["optim/skipped"] == 1 and not np.isfinite(metrics["optim/grad_norm"])
    tiny.assert_identical(state._replace(updates=before.updates, skipped=before.skipped), before)
    assert (state.updates, state.skipped) == (2, 1)
    state, metrics, _ = step(state, good)
    straight, _, _ = step(jax.tree.map(jnp.asarray, before), good)
    tiny.assert_identical(state._replace(updates=straight.updates, skipped=straight.skipped), straight)
    assert metrics["optim/skipped"] == 0 and (state.updates, state.skipped) == (3, 1)


def test_an_update_is_the_optimisers_on_the_gradient(step):
    batch, params = batch_of(groups()), tiny.weights()
    grads, _, logp = tiny.gradient()(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
    state, metrics, same = step(fresh(), batch)
    tiny.assert_same(state.params, optax.apply_updates(params, updates), 1e-6)
    tiny.assert_same(jax.tree.leaves(state.opt_state), jax.tree.leaves(opt_state), 1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(host(grads))))
    np.testing.assert_allclose(metrics["optim/grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(same, logp, atol=1e-6)
    tiny.assert_identical(state.reference, params)


def test_state_is_donated_and_nothing_compiles_twice_for_one_shape(step):
    """Batches of one shape, whatever their number of micro-batches, prompts and masks; another shape is one more."""
    state, known = fresh(), step._cache_size()
    for made in (groups(), groups(5), groups()[:1], []):
        before = jax.tree.leaves(state)
        state, _, _ = step(state, batch_of(made))
        assert all(x.is_deleted() for x in before)
    assert step._cache_size() <= known + 1
    assert state.updates == 4 and state.skipped == 0


def test_padding_micro_batches_are_not_executed():
    executed = []
    plain = tiny.objective()

    def policy(*args):
        jax.debug.callback(lambda: executed.append(1))
        return plain.policy(*args)

    counting = jax.jit(make_gradient(tiny.QWEN2, dataclasses.replace(plain, policy=policy), tiny.COMPUTE))
    for made, n in [(groups(), 3), (groups()[:2], 1), ([], 0)]:
        executed.clear()
        batch = batch_of(made)
        assert batch.n_micro == n and len(batch.mask) == 3
        jax.block_until_ready(counting(tiny.weights(), batch))
        jax.effects_barrier()
        assert len(executed) == n


def test_no_samples_no_gradient():
    grads, metrics, logp = tiny.gradient()(tiny.weights(), batch_of([]))
    for leaf in [*jax.tree.leaves(grads), *metrics.values(), logp]:
        np.testing.assert_array_equal(leaf, 0.0)


# --- the state ---


def test_micro_batches_add_up_in_float32_though_the_weights_are_bfloat16():
    """Sums of 38 parts in bfloat16 would lose them: adding 1/38 to 1 changes nothing below its 8 bits."""
    made = tiny.random_groups([38], seed=8, response=(8, 8))
    for s in made[0].samples:
        s.tokens, s.advantage = made[0].samples[0].tokens, 1.0  # parts of equal size
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.weights())
    names = {"loss": "reinforce", "correction": "none", "divergence": None, "on_policy": True}
    run = tiny.gradient(**names)
    many, _, _ = run(params, pack(made, Layout(1, 1, 8), prefix=8))
    one, _, _ = run(params, pack([type(made[0])(made[0].prompt, made[0].samples[:1])], Layout(1, 1, 8), prefix=8))
    assert {g.dtype for g in jax.tree.leaves(many)} == {jnp.dtype(jnp.bfloat16)}
    tiny.assert_same(many, one, 2**-7)


def test_the_reference_is_a_copy_of_its_own():
    state = state_lib.create(tiny.weights(), OPTIMIZER, reference=True)
    tiny.assert_identical(state.reference, state.params)
    pairs = zip(jax.tree.leaves(state.reference), jax.tree.leaves(state.params), strict=True)
    assert not any(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in pairs)
    assert (state.updates, state.skipped) == (0, 0)
    assert state_lib.create(tiny.weights(), OPTIMIZER, reference=False).reference is None


@pytest.mark.parametrize("reset_optimiser", [True, False])
def test_reset_makes_the_policy_its_own_reference(step, reset_optimiser):
    state, _, _ = step(fresh(), batch_of(groups()))
    before = host(state)
    state = state_lib.reset_reference(state, OPTIMIZER, reset_optimiser=reset_optimiser)
    tiny.assert_identical(state.reference, before.params)
    tiny.assert_identical(state.params, before.params)
    expected = OPTIMIZER.init(tiny.weights()) if reset_optimiser else before.opt_state
    tiny.assert_identical(state.opt_state, expected)
    assert (state.updates, state.skipped) == (before.updates, before.skipped)
    # The next update takes it: nothing is shared between policy and reference that donation could take away.
    again, metrics, _ = step(state, batch_of(groups(5)))
    assert metrics["optim/skipped"] == 0 and again.updates == 2
