"""Laws of the compiled step: however a mini-batch is cut, packed, sharded and chunked, its gradient is the same.

The gradient that all are compared with comes from whole sequences, one per row, prompt repeated, through the plain
forward pass and a loss written out from its definition.
"""

from __future__ import annotations

import copy
import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_cases as tiny
from hypothesis import given, settings

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner.step import PER_TOKEN, Compute
from brorl_jax.models import sharding
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Status

# Two shapes that most tests share, so that little is compiled: everything in one micro-batch, and several.
ONE = functools.partial(tiny.packed, layout=Layout(8, 8, 8), prefix=8)
SEVERAL = functools.partial(tiny.packed, layout=Layout(2, 4, 8), prefix=21, n_micro=5)


@functools.cache
def groups():
    """Ragged: 20 responses of 1 to 8 tokens, prompts of 1 to 9, and three samples that are not to be trained on."""
    made = tiny.random_groups([5, 1, 7, 3, 4, 2], seed=3)
    for g, i, status in [(0, 2, Status.ABORTED), (2, 0, Status.GRADER_ERROR), (5, 1, Status.ABORTED)]:
        s = made[g].samples[i]
        s.status, s.reward, s.advantage, s.logp = status, float("nan"), float("nan"), np.full_like(s.logp, np.nan)
    made[1].prompt = tiny.prompt("test/1", [7])  # nothing before the token that predicts the first
    return tiny.engine_logps(made)


def plain_loss(params, cfg, rows, loss, aggregation, correction, divergence):
    """The loss of a mini-batch from its definition, row by row; no function of the learner is used."""
    mask, advantages = rows["mask"], rows["advantages"]
    logp = jnp.where(mask, tiny.plain_logp(params, cfg, rows), 0.0)
    old, ref, rollout = (jnp.where(mask, rows[k], 0.0) for k in ("old_logp", "ref_logp", "rollout_logp"))
    count = mask.sum(-1, keepdims=True)
    log_ratio = logp - old
    if loss == "gspo":
        log_ratio = jnp.sum(log_ratio, -1, keepdims=True) / count
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - tiny.BOUNDS["eps_low"], 1 + tiny.BOUNDS["eps_high"])
    if loss == "cispo":
        policy = -jax.lax.stop_gradient(clipped) * advantages * logp
    else:
        policy = -jnp.minimum(ratio * advantages, clipped * advantages)
    weight = jnp.exp(old - rollout)
    if correction == "tis":
        policy = policy * jnp.minimum(weight, tiny.BOUNDS["high"])
    if correction == "sequence_mask":
        mean = jnp.exp(jnp.sum(old - rollout, -1, keepdims=True) / count)
        policy = policy * jnp.where((mean >= tiny.BOUNDS["low"]) & (mean <= tiny.BOUNDS["high"]), weight, 0.0)
    d = logp - ref
    value = policy + tiny.KL_COEF * {"k2": d * d / 2, "k3": jnp.exp(-d) - 1 + d}[divergence]
    per_row = jnp.sum(jnp.where(mask, value, 0.0), -1, keepdims=True)
    if aggregation == "token":
        return jnp.sum(per_row) / jnp.sum(count)
    return jnp.mean(per_row / (count if aggregation == "sequence" else tiny.MAX_TOKENS))


OBJECTIVES = [
    {"loss": "ppo_clip", "aggregation": "token", "correction": "tis", "divergence": "k2"},
    {"loss": "gspo", "aggregation": "sequence", "correction": "none", "divergence": "k3"},
    {"loss": "cispo", "aggregation": "constant", "correction": "sequence_mask", "divergence": "k2"},
]
PPO = OBJECTIVES[0]
PLAIN = {"correction": "none", "divergence": None, "on_policy": True}  # gradient of advantage * logp, nothing else


@functools.cache
def expected(cfg=tiny.QWEN2, loss="ppo_clip", aggregation="token", correction="tis", divergence="k2"):
    """Loss and gradient of ``groups()`` by the plain way."""
    run = jax.jit(jax.value_and_grad(plain_loss), static_argnums=(1, 3, 4, 5, 6))
    rows = tiny.whole_sequences(groups())
    return run(tiny.weights(cfg), cfg, rows, loss, aggregation, correction, divergence)


def check(batch, cfg=tiny.QWEN2, compute=tiny.COMPUTE, names=PPO, params=None):
    grads, metrics, _ = tiny.gradient(cfg, compute, **names)(tiny.weights(cfg) if params is None else params, batch)
    loss, reference = expected(cfg, **names)
    np.testing.assert_allclose(metrics["loss/total"], loss, rtol=1e-5)
    tiny.assert_same(grads, reference)
    return metrics


@pytest.mark.parametrize(
    ("cfg", "names"),
    [(tiny.QWEN2, names) for names in OBJECTIVES] + [(tiny.QWEN3, PPO)],  # one tied, the other not
    ids=lambda x: x["loss"] if isinstance(x, dict) else x.family,
)
def test_shared_prefix_equals_repeated_prompts(cfg, names):
    metrics = check(ONE(groups()), cfg, names=names)
    assert metrics["batch/sequences"] == 19
    if names["loss"] == "ppo_clip":  # the bounds do bite, on both sides
        assert 0 < metrics["policy/clip_low"] < 1 and 0 < metrics["policy/clip_high"] < 1


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 1, 8),  # one row at a time
        Layout(2, 4, 8),
        Layout(8, 1, 8),
        Layout(1, 2, 24),  # rows of several responses
        Layout(6, 1, 40),  # one row per prompt
    ],
    ids=lambda x: f"{x.slots}x{x.rows}x{x.row_tokens}",
)
def test_micro_batches_and_packing_change_nothing(layout):
    check(tiny.packed(groups(), layout, prefix=8, n_micro=3))


def test_one_response_per_row_changes_nothing():
    lonely = [type(g)(g.prompt, [s]) for g in groups() for s in g.scored]
    batch = tiny.packed(lonely, Layout(8, 1, 8), prefix=8, n_micro=3)
    assert batch.segment_ids.max((-2, -1)).tolist() == [[*range(1, 9)], [*range(1, 9)], [1, 2, 3, 0, 0, 0, 0, 0]]
    check(batch)


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"fsdp": 4}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=lambda mesh: "-".join(f"{k}{v}" for k, v in mesh.items()),
)
def test_sharding_changes_nothing(mesh):
    mesh = sharding.make_mesh(**mesh)
    params = jax.device_put(tiny.weights(), sharding.weight_shardings(mesh, tiny.QWEN2))
    batch = sharding.put_batch(mesh, tiny.packed(groups(), Layout(8, 2, 8)))
    check(batch, compute=Compute(head_chunk=64, sharding=sharding.slot_sharding(mesh)), params=params)


@pytest.mark.parametrize(
    ("mesh", "attention"),
    [
        ({"data": 2, "context": 4}, "blockwise"),
        ({"fsdp": 2, "context": 2, "tensor": 2}, "blockwise"),
        ({"fsdp": 2, "context": 3}, "xla"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}{v}" for k, v in x.items()),
)
def test_rows_split_over_devices_change_nothing(mesh, attention):
    """Packed rows of 24 tokens whose segments cross from one device to the next, in blocks of 5 keys."""
    mesh = sharding.make_mesh(**mesh)
    params = jax.device_put(tiny.weights(), sharding.weight_shardings(mesh, tiny.QWEN2))
    batch = sharding.put_batch(mesh, tiny.packed(groups(), Layout(4, 2, 24)))
    where = sharding.slot_sharding(mesh)
    compute = Compute(head_chunk=32, attention=attention, attention_block=5, sharding=where)
    check(batch, compute=compute, params=params)


def test_blockwise_attention_changes_nothing():
    check(SEVERAL(groups()), compute=Compute(head_chunk=8, attention="blockwise", attention_block=3, remat="full"))


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_head_chunk_changes_nothing(chunk):
    check(ONE(groups()), compute=Compute(head_chunk=chunk))


def test_recomputation_changes_nothing():
    check(ONE(groups()), compute=Compute(head_chunk=8, remat="full"))


def test_wider_prefix_and_padding_micro_batches_change_nothing():
    batch = SEVERAL(groups())
    assert batch.n_micro == 4 < len(batch.mask)
    check(batch)


# --- what is masked is never seen ---


def poisoned(batch, rng, *, ids, numbers):
    """Rubbish in every place that is not trained: padding, rest of the prefix, empty slots and micro-batches."""
    ignored = np.arange(batch.prefix.shape[-1]) >= batch.prefix_len[..., None]

    def fill(x, where, choices):
        return np.where(where, rng.choice(np.asarray(choices, x.dtype), x.shape), x)

    return batch._replace(
        prefix=fill(batch.prefix, ignored, ids),
        **{k: fill(getattr(batch, k), ~batch.mask, ids) for k in ("inputs", "tokens", "positions")},
        **{k: fill(getattr(batch, k), ~batch.mask, numbers) for k in PER_TOKEN},
    )


def without(batch, segments):
    """The batch with these segments of its first micro-batch out of the mask."""
    mask = batch.mask.copy()
    mask[0] &= ~np.isin(batch.segment_ids[0], segments)
    return batch._replace(mask=mask)


@pytest.mark.parametrize("names", OBJECTIVES, ids=lambda names: names["loss"])
@pytest.mark.parametrize("numbers", [[np.nan], [1e4, -1e4], [np.nan, np.inf, -np.inf, 1e4, -1e4]])
def test_masked_slots_change_nothing(names, numbers):
    batch = without(SEVERAL(groups()), [2, 5])
    run, params = tiny.gradient(**names), tiny.weights()
    clean = run(params, batch)
    ids = [0, tiny.VOCAB - 1, 7, 10_000, -10_000]
    dirty = run(params, poisoned(batch, np.random.default_rng(0), ids=ids, numbers=numbers))
    tiny.assert_identical(dirty, clean)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))


@pytest.mark.parametrize("names", OBJECTIVES, ids=lambda names: names["loss"])
def test_all_masked_batch_has_loss_and_gradient_zero(names):
    batch = SEVERAL(groups())
    batch = batch._replace(mask=np.zeros_like(batch.mask))
    grads, metrics, logp = tiny.gradient(**names)(
        tiny.weights(), poisoned(batch, np.random.default_rng(0), ids=[3], numbers=[np.nan])
    )
    for leaf in [*jax.tree.leaves(grads), *metrics.values(), logp]:
        np.testing.assert_array_equal(leaf, 0.0)


def test_dropping_samples_equals_giving_them_no_weight():
    """Out of the mask, aborted before packing, or advantage 0 with the denominator put right: one gradient."""
    run, params = tiny.gradient(**PLAIN), tiny.weights()
    whole = ONE(groups())
    dropped = [1, 4, 11]
    masked, m, _ = run(params, without(whole, dropped))

    gone = copy.deepcopy(groups())
    starts = {}  # segment -> its tokens, to find the sample again
    for segment in dropped:
        starts[segment] = whole.tokens[0][whole.segment_ids[0] == segment]
    for g in gone:
        for s in g.scored:
            if any(np.array_equal(s.tokens, tokens) for tokens in starts.values()):
                s.status = Status.ABORTED
    aborted, a, _ = run(params, ONE(gone))
    assert a["batch/sequences"] == m["batch/sequences"] == 16
    tiny.assert_same(aborted, masked)

    zero = np.where(np.isin(whole.segment_ids, dropped), np.float32(0), whole.advantages)
    weightless, w, _ = run(params, whole._replace(advantages=zero))
    factor = w["batch/tokens"] / m["batch/tokens"]
    tiny.assert_same(jax.tree.map(lambda g: g * factor, weightless), masked)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_any_ragged_groups_have_one_gradient_in_two_layouts(sizes, seed):
    made = tiny.random_groups(sizes, seed=seed)
    run, params = tiny.gradient(**PLAIN), tiny.weights()
    many = pack(made, Layout(2, 1, 16), prefix=8, n_micro=16)
    (ours, m, _), (theirs, n, _) = run(params, ONE(made)), run(params, many)
    tiny.assert_same(ours, theirs)
    assert m["batch/tokens"] == n["batch/tokens"] == sum(len(s.tokens) for g in made for s in g.samples)
    assert m["batch/sequences"] == n["batch/sequences"] == sum(sizes)


# --- one convention, one function ---


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_engine_and_learner_are_one_function_at_every_temperature(temperature):
    """Tokens sampled by the engine: same log-probabilities in the update to 1e-5, so ratio 1 and no mismatch."""
    cfg = tiny.QWEN2
    engine = LocalEngine(cfg, rows=8, chunk=4)
    engine.publish(tiny.weights(cfg), 1)
    requests = [Request(g.prompt, tuple(range(7 * i + 1, 7 * i + 7))) for i, g in enumerate(groups())]
    made = list(engine.generate(requests, Sampling(temperature=temperature, max_tokens=8, stop_ids=(0, 1, 2))))
    for s in (s for g in made for s in g.samples):
        s.status, s.advantage = Status.OK, 1.0
    batch = pack(made, Layout(8, 8, 8), prefix=8)
    assert batch.mask.sum() > 100
    compute = Compute(head_chunk=8, temperature=temperature)
    np.testing.assert_allclose(tiny.score(cfg, compute)(tiny.weights(cfg), batch), batch.rollout_logp, atol=1e-5)
    if temperature == 1.0:  # and by way of the update itself
        old = batch._replace(old_logp=batch.rollout_logp, ref_logp=batch.rollout_logp)
        _, metrics, _ = tiny.gradient(**PPO)(tiny.weights(cfg), old)
        assert abs(metrics["policy/ratio_mean"] - 1) < 1e-5 and metrics["policy/ratio_max"] < 1 + 1e-5


@functools.cache
def table_model():
    """A model that is a table: the next token's logits depend on the last input alone, by a known matrix."""
    cfg = tiny.QWEN3
    rng = np.random.default_rng(5)
    params = jax.tree.map(jnp.zeros_like, tiny.weights(cfg))  # all branches write nothing to the residual
    embed = rng.standard_normal((tiny.VOCAB, cfg.hidden)).astype(np.float32)
    head = rng.standard_normal((cfg.hidden, tiny.VOCAB)).astype(np.float32)
    params = params | {"embed": jnp.asarray(embed), "head": jnp.asarray(head)}
    params |= {"final_norm": jnp.ones(cfg.hidden)}
    x = embed.astype(np.float64)
    logits = x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) @ head.astype(np.float64)
    return cfg, params, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_logp_at_a_place_is_that_of_the_token_at_that_place():
    cfg, params, table = table_model()
    batch = pack(groups(), Layout(2, 2, 24))
    logp = np.asarray(tiny.score(cfg)(params, batch))
    np.testing.assert_array_equal(logp[~batch.mask], 0.0)
    seen = 0
    for g in groups():
        for s in g.scored:
            chain = [int(g.prompt.tokens[-1]), *s.tokens]
            exact = [table[a, b] for a, b in itertools.pairwise(chain)]
            places = [np.array_equal(batch.tokens[at], s.tokens) for at in segments(batch)]
            at = segments(batch)[places.index(True)]
            np.testing.assert_allclose(logp[at], exact, atol=1e-5)
            seen += 1
    assert seen == 19 == len(segments(batch))


def segments(batch):
    """Index of the places of every response."""
    out = []
    for m in range(batch.segment_ids.shape[0]):
        for segment in range(1, batch.segment_ids[m].max() + 1):
            _, s, r, t = np.nonzero(batch.segment_ids[m : m + 1] == segment)
            out.append((m, s[0], r[0], t))
    return out


def test_a_sample_alone_padded_and_third_in_its_row_has_one_logp():
    params = tiny.weights()
    g = tiny.random_groups([3], seed=11, prompt_tokens=(5, 5), response=(4, 6))[0]
    g.samples = [tiny.sample(tokens, index=i) for i, tokens in enumerate([range(9), range(20, 28), [3, 1, 4, 1, 5]])]
    alone = type(g)(g.prompt, [g.samples[2]])
    exact = pack([alone], Layout(1, 1, 5), prefix=4)
    wide = pack([alone], Layout(1, 1, 30), prefix=9)
    third = pack([g], Layout(1, 1, 30), prefix=9)
    run = tiny.score()
    assert third.segment_ids[0, 0, 0].tolist() == [1] * 9 + [2] * 8 + [3] * 5 + [0] * 8
    reference = np.asarray(tiny.plain_logp(params, tiny.QWEN2, tiny.whole_sequences([alone])))[0, 4:9]
    for logp in (run(params, exact)[0, 0, 0], run(params, wide)[0, 0, 0, :5], run(params, third)[0, 0, 0, 17:22]):
        np.testing.assert_allclose(logp, reference, atol=1e-5)


def test_the_final_eos_is_trained_though_it_is_the_padding_id():
    """Masks come from lengths: id 0 pads, ends a response and occurs within it, and counts wherever it was sampled."""
    g = tiny.random_groups([1], seed=2)[0]
    g.samples = [tiny.sample([5, 0, 0, 9, 0], advantage=1.0)]
    batch = ONE([g])
    assert batch.mask[0, 0, 0].tolist() == [True] * 5 + [False] * 3
    grads, metrics, logp = tiny.gradient(**PLAIN)(tiny.weights(), batch)
    assert metrics["batch/tokens"] == 5 == batch.mask.sum()
    assert (np.asarray(logp)[batch.mask] < 0).all() and (np.asarray(logp)[~batch.mask] == 0).all()
    rows = tiny.whole_sequences([g])

    def mean_loss(params):
        logp = tiny.plain_logp(params, tiny.QWEN2, rows)
        return -jnp.sum(jnp.where(rows["mask"], logp, 0.0)) / 5

    tiny.assert_same(grads, jax.jit(jax.grad(mean_loss))(tiny.weights()))
