"""The embedded engine against a plain forward pass, and against itself in other batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.data.packing import Layout, pack
from brorl_jax.learner.step import Compute, make_score
from brorl_jax.models import sharding, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout import decode, local, sampling
from brorl_jax.rollout.api import Request, Sampling, sample_seed
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Finish, Prompt, Status

VOCAB, REAL, CONTEXT = 64, 61, 96


def config(family):
    return ModelConfig(
        family=family,
        vocab_size=VOCAB,
        hidden=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=24,
        max_positions=CONTEXT,
        tied=family != "llama",
    )


@functools.cache
def weights(cfg, seed=0):
    """Far from uniform: deviations of 0.4 instead of 0.02, so that every token matters to the next."""
    params = transformer.init(jax.random.key(seed), cfg)
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key.endswith("norm") else 20 * x, params)


CFG = config("qwen3")


@pytest.fixture(scope="module")
def params():
    return weights(CFG)


def prompt(length, name="p"):
    tokens = np.random.default_rng([length, *name.encode()]).integers(0, REAL, length).astype(np.int32)
    return Prompt(f"{name}/{length}", tokens, "", "", "exact", name)


def ask(length, n, name="p", first=0):
    p = prompt(length, name)
    return Request(p, tuple(sample_seed(0, 0, p.id, first + i) for i in range(n)))


def engine(params, rows=16, chunk=4, cfg=CFG, real=REAL, version=1):
    made = LocalEngine(cfg, rows=rows, chunk=chunk, real_vocab=real)
    made.publish(params, version)
    return made


def samples(groups):
    """(seed, tokens, logp, finish) of every sample by seed."""
    return {s.seed: s for g in groups for s in g.samples}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for seed, s in ours.items():
        assert s.tokens.tolist() == theirs[seed].tokens.tolist()
        assert s.finish is theirs[seed].finish
        np.testing.assert_allclose(s.logp, theirs[seed].logp, atol=1e-5)


@functools.partial(jax.jit, static_argnames="cfg")
def _logits(params, tokens, cfg):
    ones, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return transformer.forward(params, cfg, tokens, ones, positions) @ transformer.unembed(params)


def plain_logits(params, group, cfg=CFG):
    """Logits ``[N, R, V]`` that predict each response token, from whole sequences, padding masked; NumPy float64."""
    p = group.prompt.tokens
    rows = np.zeros((len(group.samples), CONTEXT), np.int32)
    for row, s in zip(rows, group.samples, strict=True):
        row[: len(p) + len(s.tokens)] = np.concatenate([p, s.tokens])
    logits = np.array(_logits(params, rows, cfg), np.float64)[:, len(p) - 1 : -1]
    logits[..., REAL:] = -np.inf
    return logits


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference_draw(logits, seed, t):
    """The token that inverts the distribution function of ``softmax(logits)`` in one level (V <= one block)."""
    assert logits.size <= sampling.BLOCK
    u = sampling.uniforms(sampling.seed_words(np.array([seed], np.uint64)), np.array([t], np.int32))[0]
    return int(np.searchsorted(np.cumsum(np.exp(log_softmax(logits))), float(u[1]), side="right"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_is_what_the_plain_forward_pass_finds_most_likely(family):
    cfg = config(family)
    params = weights(cfg)
    (group,) = engine(params, cfg=cfg).generate([ask(7, 2)], Sampling(temperature=0.0, max_tokens=20))
    expected = plain_logits(params, group, cfg)
    for i, s in enumerate(group.samples):
        assert len(s.tokens) == 20
        np.testing.assert_array_equal(s.tokens, expected[i, :20].argmax(-1))
        np.testing.assert_allclose(s.logp, log_softmax(expected[i, :20]).max(-1), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_samples_are_the_plain_loop_and_their_logp_the_learners(params, temperature):
    settings = Sampling(temperature=temperature, max_tokens=12, stop_ids=(3, 50))
    groups = list(engine(params).generate([ask(5, 6), ask(9, 6)], settings))
    for s in (s for g in groups for s in g.samples):
        s.status = Status.OK
    compute = Compute(real_vocab=REAL, temperature=temperature, head_chunk=16)
    batch = pack(groups, Layout(slots=2, rows=3, row_tokens=24))
    learner = np.asarray(make_score(CFG, compute)(params, batch))
    np.testing.assert_allclose(learner, np.where(batch.mask, batch.rollout_logp, 0), atol=1e-5)
    assert batch.mask.sum() == sum(len(s.tokens) for g in groups for s in g.samples)
    for g in groups:
        logits = plain_logits(params, g) / temperature
        for i, s in enumerate(g.samples):
            np.testing.assert_allclose(
                s.logp,
                np.take_along_axis(log_softmax(logits[i, : len(s.tokens)]), s.tokens[:, None], -1)[:, 0],
                atol=1e-5,
            )
            assert [reference_draw(logits[i, t], s.seed, t) for t in range(len(s.tokens))] == s.tokens.tolist()
            assert s.weight_version == 1


def test_restricted_sampling_reports_the_renormalised_probability(params):
    settings = Sampling(temperature=0.8, top_p=0.7, top_k=6, min_p=0.05, max_tokens=12)
    (group,) = engine(params).generate([ask(5, 16)], settings)
    logits = plain_logits(params, group) / 0.8
    smallest = 6
    for i, s in enumerate(group.samples):
        for t, token in enumerate(s.tokens):
            p = np.exp(log_softmax(logits[i, t]))
            order = np.argsort(-p)[:6]
            q = p[order] / p[order].sum()
            order = order[: np.searchsorted(np.cumsum(q), 0.7) + 1]
            order = order[p[order] >= 0.05 * p.max()]
            assert token in order
            assert s.logp[t] == pytest.approx(np.log(p[token] / p[order].sum()), abs=1e-5)
            smallest = min(smallest, len(order))
    assert smallest < 6  # the test restricts something


def test_frequencies_of_first_tokens_are_the_exact_distribution(params):
    n = 8192
    (group,) = engine(params, rows=2048, chunk=1).generate([ask(4, n)], Sampling(max_tokens=1))
    assert [s.index for s in group.samples] == list(range(n))
    exact = np.exp(log_softmax(np.array(_logits(params, group.prompt.tokens[None], CFG), np.float64)[0, -1, :REAL]))
    counts = np.bincount([s.tokens[0] for s in group.samples], minlength=VOCAB)
    assert counts[REAL:].sum() == 0
    common = n * exact >= 5  # rare tokens together make one cell
    observed, expected = np.append(counts[:REAL][common], counts[:REAL][~common].sum()), n * exact
    expected = np.append(expected[common], expected[~common].sum())
    chi2, df = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert df >= 20 and chi2 < df + 4 * np.sqrt(2 * df)  # fixed seeds: the same figure in every run


def test_padded_ids_are_never_sampled_however_likely(params):
    likely = dict(params, embed=params["embed"].at[REAL:].set(10 * params["embed"][:3]))
    groups = [
        g
        for settings in (
            Sampling(max_tokens=12),
            Sampling(temperature=0.0, max_tokens=12),
            Sampling(top_k=9, max_tokens=12),
        )
        for g in engine(likely).generate([ask(5, 16)], settings)
    ]
    assert max(s.tokens.max() for g in groups for s in g.samples) < REAL
    (unmasked,) = engine(likely, real=None).generate([ask(5, 16)], Sampling(max_tokens=12))
    assert max(s.tokens.max() for s in unmasked.samples) >= REAL


MIXED = [ask(length, n) for length, n in ((5, 4), (1, 4), (9, 2), (30, 4))]
STOPPING = Sampling(max_tokens=24, stop_ids=(3, 7, 11, 19, 23, 31))


@pytest.fixture(scope="module")
def alone(params):
    """The samples of ``MIXED``, every request by itself with room for all."""
    groups = [g for r in MIXED for g in engine(params, rows=4, chunk=24).generate([r], STOPPING)]
    lengths = [len(s.tokens) for g in groups for s in g.samples]
    assert min(lengths) < 4 and max(lengths) == 24  # some stop at once, some never
    return samples(groups)


@pytest.mark.parametrize(
    ("rows", "chunk", "window"),
    [
        (64, 24, 64),  # everything fits at once
        (16, 1, 64),  # the host looks at every token, and moves what lives to smaller batches
        (2, 4, 64),  # fewer rows than a group: refill within one slot
        (1, 64, 64),  # one row; a chunk longer than any response
        (8, 5, 4),  # two slots for four prompts; the chunk divides nothing; the ring grows from 8 columns
    ],
)
def test_a_sample_depends_on_nothing_but_its_seed_weights_and_prompt(params, alone, monkeypatch, rows, chunk, window):
    monkeypatch.setattr(local, "FIRST_WINDOW", window)
    groups = list(engine(params, rows=rows, chunk=chunk).generate(MIXED, STOPPING))
    assert sorted(g.prompt.id for g in groups) == sorted(r.prompt.id for r in MIXED)
    for g in groups:
        assert [s.index for s in g.samples] == list(range(len(g.samples)))
    same(samples(groups), alone)


def test_neither_does_it_depend_on_the_order_of_requests_nor_of_seeds(params, alone):
    turned = [Request(r.prompt, r.seeds[::-1]) for r in MIXED[::-1]]
    groups = list(engine(params, rows=8, chunk=24).generate(turned, STOPPING))
    for g in groups:
        (r,) = (r for r in turned if r.prompt.id == g.prompt.id)
        assert [s.seed for s in g.samples] == list(r.seeds)
    same(samples(groups), alone)


def test_what_lives_is_moved_to_batches_of_half_the_size(params, alone, monkeypatch):
    before, after = [], []

    def select(cache, slots, rows, original=decode.select):
        before.append(cache.ring[0][0].shape[:2])
        after.append(rows.shape)
        return original(cache, slots, rows)

    monkeypatch.setattr(decode, "select", select)
    same(samples(engine(params, rows=16, chunk=1).generate(MIXED, STOPPING)), alone)
    assert before[0] == (4, 4) and set(after) <= {(s, r) for s in (4, 2, 1) for r in (4, 2, 1)} - {(4, 4)}
    assert {s for s, _ in after} - {4} and {r for _, r in after} - {4}  # slots as well as rows
    assert all(slots * rows < s * r for (s, r), (slots, rows) in zip(before, after, strict=True))


def test_the_ring_wraps_around_under_refilled_rows(params):
    # 2 rows, 24 samples of up to 24 tokens: the clock runs far beyond the ring's 24 columns.
    request = ask(5, 24)
    few = samples(engine(params, rows=2, chunk=4).generate([request], STOPPING))
    many = samples(engine(params, rows=24, chunk=24).generate([request], STOPPING))
    assert sum(len(s.tokens) for s in few.values()) > 3 * 24 * 2
    same(few, many)


def test_stop_id_is_kept_once_and_last_and_max_tokens_is_exact(params, alone):
    stops = set(STOPPING.stop_ids)
    ended = set()
    for s in alone.values():
        assert 1 <= len(s.tokens) == len(s.logp) <= 24
        assert not stops & set(s.tokens[:-1].tolist())
        if s.finish is Finish.STOP:
            ended.add(int(s.tokens[-1]))
        else:
            assert s.finish is Finish.LENGTH and len(s.tokens) == 24 and int(s.tokens[-1]) not in stops
    assert len(ended) >= 3  # several ids do stop
    (group,) = engine(params).generate([ask(5, 16)], Sampling(max_tokens=1, stop_ids=tuple(range(30))))
    for s in group.samples:  # one token that may be a stop id
        assert len(s.tokens) == 1
        assert s.finish is (Finish.STOP if s.tokens[0] < 30 else Finish.LENGTH)
    assert len({s.finish for s in group.samples}) == 2


def test_more_than_eight_stop_ids_all_stop(params):
    (group,) = engine(params).generate([ask(5, 16)], Sampling(max_tokens=12, stop_ids=tuple(range(REAL))))
    assert all(len(s.tokens) == 1 and s.finish is Finish.STOP for s in group.samples)


def test_decoding_ends_with_the_last_live_row(params, monkeypatch):
    clocks = []
    original = decode.decode

    def watched(*args, **kwargs):
        out = original(*args, **kwargs)
        clocks.append(int(out[1].clock))
        return out

    monkeypatch.setattr(decode, "decode", watched)
    settings = Sampling(max_tokens=24, stop_ids=tuple(range(0, REAL, 3)))
    (group,) = engine(params, rows=4, chunk=24).generate([ask(5, 4)], settings)
    longest = max(len(s.tokens) for s in group.samples)
    assert longest < 24 and clocks == [longest]


def test_a_prompt_that_comes_twice_is_two_groups(params):
    p = prompt(5)
    first, second = ask(5, 4), ask(5, 4, first=4)
    groups = list(engine(params, rows=4).generate([second, ask(9, 4), first], Sampling(max_tokens=12)))
    twins = [g for g in groups if g.prompt.id == p.id]
    assert {tuple(s.seed for s in g.samples) for g in twins} == {first.seeds, second.seeds}
    assert len({s.tokens.tobytes() for g in twins for s in g.samples}) == 8


def test_one_prompt_at_512_samples_rarely_repeats(params):
    (group,) = engine(params, rows=512, chunk=12).generate([ask(3, 512)], Sampling(max_tokens=12))
    assert len({s.tokens.tobytes() for s in group.samples}) > 480
    assert len({s.seed for s in group.samples}) == 512


def test_shapes_repeat_so_nothing_compiles_twice(params):
    e = engine(params, rows=8, chunk=4)

    def run(i):
        settings = Sampling(temperature=0.5 + i / 10, max_tokens=12 + i % 2, stop_ids=tuple(range(REAL, REAL + i)))
        list(e.generate([ask(9, 4, f"x{i}-{k}") for k in range(3)], settings))

    programs = (decode.decode, decode.insert_prompts, decode.grow, decode.select)
    run(0), run(1)
    before = [f._cache_size() for f in programs]
    for i in range(2, 7):
        run(i)
    assert [f._cache_size() for f in programs] == before


def test_publish_changes_samples_and_version_and_nothing_of_the_old_prompt_remains(params):
    e, settings = engine(params), Sampling(max_tokens=12)
    (old,) = e.generate([ask(5, 16)], settings)
    other = weights(CFG, seed=1)
    e.publish(other, 7)
    (new,) = e.generate([ask(5, 16)], settings)
    assert {s.weight_version for s in old.samples} == {1} and {s.weight_version for s in new.samples} == {7}
    assert samples([old]).keys() == samples([new]).keys()
    assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(old.samples, new.samples, strict=True))
    logits = log_softmax(plain_logits(other, new))
    for i, s in enumerate(new.samples):
        np.testing.assert_allclose(s.logp, logits[i, np.arange(12), s.tokens], atol=1e-5)
    e.publish(params, 8)
    same(samples(e.generate([ask(5, 16)], settings)), samples([old]))


def test_weights_may_not_change_under_a_request(params):
    e = engine(params, rows=4)
    running = e.generate([ask(5, 4), ask(9, 4)], Sampling(max_tokens=12))
    next(running)
    with pytest.raises(RuntimeError, match="in flight"):
        e.publish(params, 2)
    running.close()  # given up: a signal came
    e.publish(params, 2)
    list(e.generate([ask(5, 4), ask(9, 4)], Sampling(max_tokens=12)))
    e.publish(params, 3)


def test_a_copy_is_whole_on_one_device_and_outlives_what_was_published(params):
    """Weights split over two devices, gone in the middle of a call: as when an update is given them meanwhile."""
    where = sharding.weight_shardings(sharding.make_mesh(fsdp=2), CFG)
    wanted, how = [ask(5, 3), ask(7, 3)], Sampling(max_tokens=8)
    expected = samples(engine(params, rows=3).generate(wanted, how))
    for copy in (True, False):
        published = jax.tree.map(jnp.copy, params)
        published = jax.device_put(published, where) if copy else published
        made = LocalEngine(CFG, rows=3, chunk=4, real_vocab=REAL, copy=copy)
        made.publish(published, 1)
        groups = made.generate(wanted, how)
        found = [next(groups)]
        jax.tree.map(lambda x: x.delete(), published)
        if copy:
            assert all(len(x.devices()) == 1 for x in jax.tree.leaves(made._params))
            same(samples([*found, *groups]), expected)
        else:
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                next(groups)


def test_weights_split_over_a_mesh_are_sampled_from_where_they_are(params):
    """Norms are replicated there, matrices split: all on the same devices, or no program takes them."""
    where = sharding.weight_shardings(sharding.make_mesh(data=2, fsdp=2, tensor=2), CFG)
    wanted, how = [ask(5, 3), ask(7, 3)], Sampling(max_tokens=8)
    expected = samples(engine(params, rows=3).generate(wanted, how))
    made = LocalEngine(CFG, rows=3, chunk=4, real_vocab=REAL)
    made.publish(jax.device_put(params, where), 1)
    assert {len(x.devices()) for x in jax.tree.leaves(made._params)} == {8}
    same(samples(made.generate(wanted, how)), expected)


def test_generating_without_weights_says_what_to_do(params):
    with pytest.raises(RuntimeError, match="call publish"):
        next(LocalEngine(CFG, rows=4, chunk=4).generate([ask(5, 1)], Sampling()))
    closed = engine(params)
    closed.close()
    with pytest.raises(RuntimeError, match="call publish"):
        next(closed.generate([ask(5, 1)], Sampling(max_tokens=4)))


def test_a_prompt_too_long_for_the_context_never_starts(params):
    settings = Sampling(max_tokens=20)
    assert len(list(engine(params).generate([ask(CONTEXT - 20, 1)], settings))) == 1
    with pytest.raises(
        ValueError, match=rf"p/{CONTEXT - 19}.*{CONTEXT - 19} tokens.*max_tokens=20.*{CONTEXT} positions"
    ):
        next(engine(params).generate([ask(5, 1), ask(CONTEXT - 19, 1)], settings))


def test_nothing_asked_nothing_given(params):
    assert list(engine(params).generate([], Sampling())) == []


@pytest.mark.parametrize(("rows", "chunk"), [(0, 4), (4, 0)])
def test_impossible_sizes_are_refused(rows, chunk):
    with pytest.raises(ValueError, match="at least 1"):
        LocalEngine(CFG, rows=rows, chunk=chunk)


def test_what_the_engine_returns_is_on_the_host_and_ungraded(params):
    (group,) = engine(params).generate([ask(5, 16)], Sampling(max_tokens=12))
    for s in group.samples:
        assert type(s.tokens) is np.ndarray and s.tokens.dtype == np.int32
        assert type(s.logp) is np.ndarray and s.logp.dtype == np.float32
        assert s.status is None and np.isnan(s.reward) and s.text == ""
