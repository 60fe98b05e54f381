"""Packing: every scored token exactly once, beside its prompt, in shapes that repeat."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import tiny_cases as tiny
from hypothesis import given, settings

from brorl_jax.data.packing import Layout, pack, rounded_up
from brorl_jax.types import Group, Status

law = settings(max_examples=60, deadline=None)

PER_PLACE = (
    "inputs",
    "tokens",
    "segment_ids",
    "positions",
    "mask",
    "advantages",
    "rollout_logp",
    "old_logp",
    "ref_logp",
)


def test_worked_example():
    """Two prompts, five responses, rows of six tokens, two slots of two rows: written out by hand."""
    a = Group(
        tiny.prompt("a", [10, 11, 12]),
        [
            tiny.sample([1, 2], index=0, advantage=0.5),
            tiny.sample([3, 4, 5, 6], index=1, advantage=-1.0),
            tiny.sample([7, 7, 7], index=2, status=Status.ABORTED),
            tiny.sample([8, 9, 8, 9, 8], index=3, status=Status.TRUNCATED, advantage=2.0),
        ],
    )
    b = Group(tiny.prompt("b", [20]), [tiny.sample([21], index=0, advantage=3.0), tiny.sample([22, 23], index=1)])
    a.samples[1].logp[:] = [-0.1, -0.2, -0.3, -0.4]
    batch = pack([a, b], Layout(2, 2, 6), prefix=4)
    assert batch.n_micro == 1
    assert batch.prefix.tolist() == [[[10, 11, 0, 0], [0, 0, 0, 0]]]
    assert batch.prefix_len.tolist() == [[2, 0]]
    # The longest first: five tokens leave one place, four leave two, which the response of two fills.
    assert batch.tokens[0].tolist() == [
        [[8, 9, 8, 9, 8, 0], [3, 4, 5, 6, 1, 2]],
        [[22, 23, 21, 0, 0, 0], [0] * 6],
    ]
    assert batch.inputs[0].tolist() == [
        [[12, 8, 9, 8, 9, 0], [12, 3, 4, 5, 12, 1]],
        [[20, 22, 20, 0, 0, 0], [0] * 6],
    ]
    assert batch.segment_ids[0].tolist() == [
        [[1, 1, 1, 1, 1, 0], [2, 2, 2, 2, 3, 3]],
        [[4, 4, 5, 0, 0, 0], [0] * 6],
    ]
    assert batch.positions[0].tolist() == [
        [[2, 3, 4, 5, 6, 0], [2, 3, 4, 5, 2, 3]],
        [[0, 1, 0, 0, 0, 0], [0] * 6],
    ]
    assert batch.advantages[0].tolist() == [
        [[2, 2, 2, 2, 2, 0], [-1, -1, -1, -1, 0.5, 0.5]],
        [[1, 1, 3, 0, 0, 0], [0] * 6],
    ]
    np.testing.assert_array_equal(batch.rollout_logp[0, 0, 1], np.float32([-0.1, -0.2, -0.3, -0.4, -1, -1]))
    np.testing.assert_array_equal(batch.mask, batch.segment_ids > 0)
    assert not batch.old_logp.any() and not batch.ref_logp.any()


@st.composite
def cases(draw):
    """Groups with any mix of statuses and lengths, empty ones included, and a layout that they fit."""
    lengths = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), max_size=6))
    groups, value = [], 1
    for g, group in enumerate(lengths):
        samples = []
        for i, n in enumerate(group):
            tokens = np.arange(value, value + n)  # no two tokens of a batch are alike
            value += n
            samples.append(tiny.sample(tokens, index=i, status=draw(st.sampled_from(Status)), advantage=value))
        groups.append(Group(tiny.prompt(f"p{g}", -np.arange(1, draw(st.integers(1, 6)) + 1) - 10 * g), samples))
    layout = Layout(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(9, 20)))
    return groups, layout


@given(case=cases())
@law
def test_every_scored_sample_exactly_once_beside_its_prompt(case):
    groups, layout = case
    batch = pack(groups, layout)
    micro = batch.mask.shape[0]
    assert batch.mask.shape == (micro, layout.slots, layout.rows, layout.row_tokens)
    np.testing.assert_array_equal(batch.mask, batch.segment_ids > 0)
    found = {}
    for m in range(micro):
        ids = batch.segment_ids[m]
        used = np.unique(ids[ids > 0])
        assert used.tolist() == list(range(1, len(used) + 1))  # unique in the micro-batch, and dense: below T
        for segment in used:
            s, r, t = np.nonzero(ids == segment)
            assert len({*s}) == len({*r}) == 1 and (np.diff(t) == 1).all()  # one unbroken stretch of one row
            at = (m, s, r, t)
            length = batch.prefix_len[m, s[0]]
            found[tuple(batch.tokens[at])] = {
                "prompt": [*batch.prefix[m, s[0], :length], batch.inputs[at][0]],
                "inputs": batch.inputs[at][1:].tolist(),
                "positions": batch.positions[at].tolist(),
                "advantage": {*batch.advantages[at]},
                "logp": batch.rollout_logp[at].tolist(),
            }
    wanted = {
        tuple(s.tokens): {
            "prompt": g.prompt.tokens.tolist(),
            "inputs": s.tokens[:-1].tolist(),
            "positions": [len(g.prompt.tokens) - 1 + i for i in range(len(s.tokens))],
            "advantage": {np.float32(s.advantage)},
            "logp": s.logp.tolist(),
        }
        for g in groups
        for s in g.samples
        if s.status in (Status.OK, Status.TRUNCATED) and len(s.tokens)
    }
    assert found == wanted
    assert batch.mask.sum() == sum(map(len, wanted))


@given(case=cases())
@law
def test_padding_is_zero_and_micro_batches_beyond_the_count_are_empty(case):
    groups, layout = case
    batch = pack(groups, layout)
    for name in PER_PLACE:
        assert not getattr(batch, name)[~batch.mask].any(), name
    width = batch.prefix.shape[-1]
    assert not batch.prefix[np.arange(width) >= batch.prefix_len[..., None]].any()
    used = batch.mask.any(axis=(1, 2, 3))
    assert used.sum() == batch.n_micro and used[: batch.n_micro].all()
    assert len(used) == rounded_up(int(batch.n_micro))


@given(case=cases())
@law
def test_rows_are_filled_before_new_ones_are_begun(case):
    """Best fit leaves no row that a later one would have fitted in whole: any two of a group overflow one row."""
    groups, layout = case
    batch = pack(groups, layout)
    fill = batch.mask.sum(-1)
    prompts = {}
    for m, s, r in np.argwhere(fill > 0):
        key = (*batch.prefix[m, s, : batch.prefix_len[m, s]], batch.inputs[m, s, r, 0])
        prompts.setdefault(key, []).append(fill[m, s, r])
    for rows in prompts.values():
        assert len(rows) == 1 or sum(sorted(rows)[:2]) > layout.row_tokens
    used = len([s for s in batch.mask.any(axis=(2, 3)).reshape(-1) if s])
    assert used == sum(-(-len(rows) // layout.rows) for rows in prompts.values())


def test_rounded_up_by_hand_and_never_a_quarter_more():
    grid = [1, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16, 20]
    assert [rounded_up(n) for n in range(18)] == grid
    for n in range(1, 5000):
        up = rounded_up(n)
        assert n <= up <= 1.25 * n and rounded_up(up) == up
    # Few shapes: four between one power of two and the next.
    assert len({rounded_up(n) for n in range(1025, 2049)}) == 4


def test_shapes_repeat_for_batches_of_about_one_size():
    shapes = {
        pack(tiny.random_groups([n], response=(8, 8)), Layout(1, 1, 8), prefix=16).mask.shape for n in range(33, 65)
    }
    assert len(shapes) == 4


def test_a_response_longer_than_a_row_says_which_and_what_to_change():
    group = Group(tiny.prompt("sums/17", [1, 2]), [tiny.sample(range(9)), tiny.sample(range(3), index=1)])
    with pytest.raises(ValueError, match=r"'sums/17' has 9 tokens.*batch.row_tokens = 8 .*rollout.max_tokens"):
        pack([group], Layout(1, 1, 8))
    assert pack([group], Layout(1, 1, 9)).mask.sum() == 12
    group.samples[0].status = Status.ABORTED  # what is not trained need not fit
    assert pack([group], Layout(1, 1, 8)).mask.sum() == 3


def test_a_prompt_wider_than_the_batch_says_by_how_much():
    group = Group(tiny.prompt("p", range(10)), [tiny.sample([1])])
    with pytest.raises(ValueError, match="needs 9 prefix places but the batch has 8"):
        pack([group], Layout(1, 1, 8), prefix=8)
    assert pack([group], Layout(1, 1, 8), prefix=9).prefix_len == 9
    # A prompt none of whose samples are trained is not there, so its width does not matter.
    group.samples[0].status = Status.GRADER_ERROR
    assert pack([group], Layout(1, 1, 8), prefix=8).n_micro == 0


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 8), (1, 1, -3)])
def test_impossible_layouts_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        Layout(*sizes)


def test_nothing_to_pack_is_one_empty_micro_batch_that_is_not_executed():
    for groups in ([], [Group(tiny.prompt("p", [1]), [tiny.sample([2], status=Status.ABORTED)])]):
        batch = pack(groups, Layout(2, 3, 4))
        assert batch.n_micro == 0 and batch.mask.shape == (1, 2, 3, 4) and not batch.mask.any()


def test_dtypes_are_those_of_the_batch_type():
    batch = pack(tiny.random_groups([3]), Layout(1, 2, 8))
    assert batch.n_micro.dtype == batch.prefix_len.dtype == batch.prefix.dtype == np.int32
    for name in PER_PLACE:
        kind = np.int32 if name in ("inputs", "tokens", "segment_ids", "positions") else np.float32
        assert getattr(batch, name).dtype == (bool if name == "mask" else kind), name
