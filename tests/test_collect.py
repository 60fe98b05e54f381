"""Filling a step with groups: rounds, filter, surplus, starvation; with an engine made of plain Python."""

import dataclasses
import itertools
import math
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from brorl_jax import checkpoint, collect
from brorl_jax.collect import KEPT, Rules
from brorl_jax.metrics import PhaseTimer
from brorl_jax.rewards import Grader
from brorl_jax.rollout.api import Sampling, request
from brorl_jax.types import Finish, Group, Prompt, Sample, Status
from tests.helpers import hostile_scorers

NAN = math.nan
CONSTANT = 0.35  # its float32 mean over many samples is not itself


def prompt(i, source="src"):
    return Prompt(f"{source}/{i}", np.array([i], np.int32), f"q{i}", "1", "exact:whole", source)


def group(rewards, i=0, source="src", tokens=None):
    """A graded group; None is a grader error, NaN an aborted sample."""
    samples = []
    for k, r in enumerate(rewards):
        status = Status.GRADER_ERROR if r is None else Status.ABORTED if r != r else Status.OK
        ids = np.array(tokens[k] if tokens else [k, 7], np.int32)
        reward = r if status.scored else NAN
        finish = Finish.ABORT if status is Status.ABORTED else Finish.STOP
        samples.append(Sample(k, k, ids, np.zeros(len(ids), np.float32), finish, 3, status=status, reward=reward))
    return Group(prompt(i, source), samples)


def rules(groups=4, *, dynamic=True, max_rounds=10, min_valid=0.5, oversample=1.0):
    return Rules(groups, dynamic, max_rounds, min_valid, oversample)


MIXED, ZERO, ONE, EQUAL, BROKEN = [0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [CONSTANT] * 2, [None, NAN]


class World:
    """Prompts in order, and what a policy makes of each: ``outcomes`` cycled."""

    def __init__(self, *outcomes):
        self.outcomes = itertools.cycle(outcomes)
        self.next, self.asked = 0, []

    def take(self, n):
        self.asked.append(n)
        self.next += n
        return [prompt(i) for i in range(self.next - n, self.next)]

    def generate(self, prompts):
        return [Group(p, group(next(self.outcomes)).samples) for p in prompts]

    def collect(self, r, carried=()):
        return collect.collect(self.take, self.generate, r, carried)


def ids(groups):
    return [g.prompt.id for g in groups]


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        (MIXED, KEPT),
        ([0.0, 1e-30], KEPT),
        ([0.5, 0.5, 0.5 + 2**-53], KEPT),
        (ZERO, "all_zero"),
        (ONE, "all_one"),
        ([CONSTANT] * 512, "all_equal"),
        ([np.float32(0.1)] * 1024, "all_equal"),
        ([None, 0.0, 1.0, NAN], KEPT),  # half carry a reward
        ([None, None, NAN, 1.0], "too_few_valid"),
        ([None, None, NAN, NAN], "too_few_valid"),
        ([None, 1.0, 1.0, 1.0], "all_one"),  # what carries no reward makes no difference
        ([None, 0.0, 0.0], "all_zero"),
    ],
)
def test_verdict(rewards, verdict):
    assert rules().verdict(group(rewards)) == verdict


def test_without_dynamic_sampling_only_valid_rewards_count():
    still = rules(dynamic=False)
    assert [still.verdict(group(r)) for r in (MIXED, ZERO, ONE, EQUAL, BROKEN)] == [KEPT] * 4 + ["too_few_valid"]


def test_a_group_without_any_reward_is_dropped_whatever_min_valid():
    assert rules(min_valid=1e-9).verdict(group(BROKEN)) == "too_few_valid"
    assert rules(min_valid=1.0).verdict(group([0.0, 1.0, None])) == "too_few_valid"


@given(
    rewards=st.lists(st.sampled_from([0.0, CONSTANT, 1.0, None, NAN]), min_size=2, max_size=6),
    shaped=st.lists(st.floats(allow_nan=True), min_size=6, max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_shaping_cannot_change_what_is_kept(rewards, shaped):
    plain, bent = group(rewards), group(rewards)
    for sample, value in zip(bent.samples, shaped, strict=False):
        sample.shaped_reward = value
    assert rules().verdict(bent) == rules().verdict(plain)


def test_rounds_go_on_until_enough_groups_are_kept():
    world = World(ZERO, MIXED, ONE)  # one in three
    out = world.collect(rules(4))
    assert world.asked == [4, 3, 2, 1, 1]
    assert ids(out.kept) == ["src/1", "src/4", "src/7", "src/10"] and not out.carried
    assert (out.rounds, out.starved, len(out.judged)) == (5, False, 11)
    assert [v for _, v in out.judged[:4]] == ["all_zero", KEPT, "all_one", "all_zero"]


def test_surplus_is_carried_and_used_first():
    world = World(MIXED)
    first = world.collect(rules(4, oversample=1.5))
    assert world.asked == [6] and ids(first.kept) == [f"src/{i}" for i in range(4)]
    assert ids(first.carried) == ["src/4", "src/5"]
    second = world.collect(rules(4, oversample=1.5), first.carried)
    assert world.asked == [6, 3] and ids(second.kept) == [f"src/{i}" for i in range(4, 8)]
    assert ids(second.carried) == ["src/8"]
    assert second.kept[:2] == first.carried  # the very groups, not drawn again


def test_oversampling_asks_for_a_whole_number_rounded_up():
    world = World(ZERO)
    world.collect(rules(3, oversample=1.1, max_rounds=1))
    assert world.asked == [4]


def test_starvation_ends_with_what_there_is():
    world = World(ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, MIXED)
    out = world.collect(rules(4, max_rounds=2))
    assert (len(out.kept), out.rounds, out.starved) == (1, 2, True) and len(out.judged) == 8
    nothing = World(EQUAL, BROKEN).collect(rules(4, max_rounds=3))
    assert (nothing.kept, nothing.carried, nothing.rounds, nothing.starved) == ([], [], 3, True)


def test_enough_carried_groups_need_no_generation():
    world = World(MIXED)
    carried = [group(MIXED, i) for i in range(5)]
    out = world.collect(rules(4), carried)
    assert world.asked == [] and out.kept == carried[:4] and out.carried == carried[4:] and not out.starved
    metrics = collect.metrics(out)
    assert metrics["groups/generated"] == metrics["samples/generated"] == 0 and metrics["groups/trained"] == 4


@given(
    outcomes=st.lists(st.sampled_from([MIXED, ZERO, ONE, EQUAL, BROKEN]), min_size=1, max_size=7),
    wanted=st.integers(1, 5),
    rounds=st.integers(1, 4),
    oversample=st.floats(1.0, 2.0),
    dynamic=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_group_is_accounted_for(outcomes, wanted, rounds, oversample, dynamic):
    world, carried = World(*outcomes), []
    for _ in range(3):
        out = world.collect(rules(wanted, max_rounds=rounds, oversample=oversample, dynamic=dynamic), carried)
        m = collect.metrics(out)
        dropped = sum(m[f"groups/{reason}"] for reason in ("all_zero", "all_one", "all_equal", "too_few_valid"))
        assert m["groups/generated"] == m["groups/kept"] + dropped
        assert m["groups/carried_in"] == len(carried)
        assert m["groups/carried_in"] + m["groups/kept"] == m["groups/trained"] + m["groups/carried"]
        assert not {id(g) for g in out.carried} & {id(g) for g in carried}  # none waits twice
        assert m["groups/trained"] <= wanted and m["groups/rounds"] <= rounds
        assert m["groups/starved"] == (m["groups/trained"] < wanted)
        assert m["groups/pass_rate"] == m["groups/kept"] / max(1, m["groups/generated"])
        assert m["samples/generated"] == 2 * m["groups/generated"]
        assert all(v == v for v in m.values())
        carried = out.carried
    assert len({*world.asked}) > 0 and sum(world.asked) == world.next


def test_metrics_by_hand():
    kept = group([1.0, 0.0, None, CONSTANT], 0, "a", tokens=[[1], [1], [2, 3], [4, 5, 6, 7]])
    kept.samples[3].status = Status.TRUNCATED
    lost = group([NAN, NAN, NAN, 1.0], 1, "b", tokens=[[], [], [], [9, 9]])
    out = collect.Collected([kept], [], [(kept, KEPT), (lost, "too_few_valid")], 2, True)
    m = collect.metrics(out)
    expected = {
        "groups/generated": 2,
        "groups/kept": 1,
        "groups/pass_rate": 0.5,
        "groups/too_few_valid": 1,
        "groups/informative": 1,
        "groups/rounds": 2,
        "groups/starved": 1,
        "samples/generated": 8,
        "samples/trained": 3,
        "samples/truncated": 1,
        "samples/aborted": 3,
        "samples/grader_error": 1,
        "samples/duplicate_rate": 1 - (3 + 2) / 8,  # [1] twice; three empty ones
        "tokens/generated": 1 + 1 + 2 + 4 + 2,
        "length/mean": 10 / 8,
        "length/max": 4,
        "length/truncated_rate": 1 / 8,
        "reward/mean": (1 + 0 + CONSTANT + 1) / 4,
    }
    assert {k: m[k] for k in expected} == pytest.approx(expected)
    by_source = {
        "source/a/groups": 1,
        "source/a/trained": 1.0,
        "source/a/reward": (1 + CONSTANT) / 3,
        "source/a/right": 1 / 3,
        "source/a/kept": 1.0,
        "source/a/length": 8 / 4,
        "source/b/groups": 1,
        "source/b/trained": 0.0,
        "source/b/reward": 1.0,
        "source/b/right": 1.0,
        "source/b/kept": 0.0,
        "source/b/length": 2 / 4,
    }
    assert {k: v for k, v in m.items() if k.startswith("source/")} == pytest.approx(by_source)
    assert collect.explain(m) == "1 groups kept of 2 generated in 2 rounds (1 too_few_valid)"


@pytest.mark.parametrize(
    ("informative", "cut", "starved", "first", "expected"),
    [
        (10, 0.3, 0, True, []),
        (9, 0.3, 0, False, ["learns from less than 10% of its groups"]),
        (9, 0.31, 1, False, ["is starved: 9 groups kept of 100"]),
        (50, 0.31, 0, True, ["has 31% of its responses cut off: raise rollout.max_tokens"]),
        (50, 0.31, 0, False, []),
        (0, 1.0, 1, True, ["is starved", "has 100%"]),
    ],
)
def test_warnings_of_a_step(informative, cut, starved, first, expected):
    """P19, P26."""
    reasons = {f"groups/{name}": 0 for name in ("all_zero", "all_one", "all_equal", "too_few_valid")}
    counts = {"generated": 100, "trained": informative, "informative": informative, "rounds": 1, "starved": starved}
    figures = reasons | {f"groups/{name}": count for name, count in counts.items()} | {"length/truncated_rate": cut}
    found = collect.warnings(figures, first=first)
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


def test_a_step_that_only_takes_what_was_carried_is_no_cause_for_alarm():
    world = World(*[MIXED] * 4)
    out = world.collect(rules(2), [group(MIXED, i) for i in range(2)])
    assert collect.warnings(collect.metrics(out), first=True) == []


def test_metrics_of_a_source_that_only_gave_carried_groups():
    carried, new = group(MIXED, 0, "a"), group(MIXED, 1, "b")
    m = collect.metrics(collect.Collected([carried, new], [], [(new, KEPT)], 1, False))
    assert {k: v for k, v in m.items() if k.startswith("source/a/")} == {"source/a/groups": 0, "source/a/trained": 0.5}
    assert (m["source/b/groups"], m["source/b/trained"], m["source/b/kept"]) == (1, 0.5, 1.0)
    broken = group(BROKEN, 2, "c")
    m = collect.metrics(collect.Collected([], [], [(broken, "too_few_valid")], 1, True))
    assert "source/c/reward" not in m and "source/c/right" not in m and m["source/c/kept"] == 0


class Tokens:
    """Decodes an id as its number."""

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


class Scripted:
    """An engine whose groups complete in a chosen order; sample i of a request says ``<prompt token> i``."""

    def __init__(self, order, finish=Finish.STOP):
        self.order, self.finish, self.closed = order, finish, False

    def generate(self, requests, sampling):
        try:
            for at in self.order:
                r = requests[at]
                yield Group(r.prompt, [self.sample(r, i) for i in range(len(r.seeds))])
        finally:
            self.closed = True

    def sample(self, r, i):
        tokens = np.array([r.prompt.tokens[0], i, 2], np.int32)
        return Sample(i, r.seeds[i], tokens, np.zeros(3, np.float32), self.finish, 0)


def requests(*numbers):
    """One request of two samples per prompt number; a repeated one goes on with new seeds."""
    return [request(prompt(n), 2, run_seed=0, step=0, first=2 * numbers[:at].count(n)) for at, n in enumerate(numbers)]


def test_rollouts_come_graded_and_in_the_order_asked_for():
    wanted = requests(4, 1, 3, 1)
    groups = collect.rollouts(Scripted([3, 2, 0, 1]), Tokens(), wanted, Sampling(), Grader(), PhaseTimer())
    assert [g.prompt.tokens[0] for g in groups] == [4, 1, 3, 1]
    assert [[s.seed for s in g.samples] for g in groups] == [list(r.seeds) for r in wanted]  # twins not mixed up
    assert len({s.seed for g in groups for s in g.samples}) == 8
    assert {s.status for g in groups for s in g.samples} == {Status.OK}
    assert [s.text for s in groups[0].samples] == ["4 0", "4 1"]  # without the stop id


def test_text_of_a_truncated_response_keeps_its_last_token():
    (g,) = collect.rollouts(Scripted([0], Finish.LENGTH), Tokens(), requests(5), Sampling(), Grader(), PhaseTimer())
    assert [s.text for s in g.samples] == ["5 0 2", "5 1 2"]
    assert {s.status for s in g.samples} == {Status.TRUNCATED}


def test_rollouts_end_at_once_and_cleanly_when_told_to():
    class Told(Exception):
        pass

    seen = []

    def check():
        seen.append(1)
        if len(seen) == 2:
            raise Told

    engine = Scripted([0, 1, 2])
    with pytest.raises(Told):
        collect.rollouts(engine, Tokens(), requests(0, 1, 2), Sampling(), Grader(), PhaseTimer(), check)
    assert len(seen) == 2 and engine.closed


def test_a_group_is_graded_while_others_are_still_generated():
    """The engine does not go on before a group has its rewards from a worker."""

    class Waiting(Scripted):
        def generate(self, requests, sampling):
            for group in super().generate(requests, sampling):
                yield group
                end = time.monotonic() + 60
                while any(s.status is None for s in group.samples):
                    assert time.monotonic() < end, "grading waits for generation to end"
                    time.sleep(0.01)

    wanted = [dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, verifier="patient")) for r in requests(0, 1)]
    with Grader(workers=1) as grader:
        groups = collect.rollouts(Waiting([1, 0]), Tokens(), wanted, Sampling(), grader, PhaseTimer())
    expected = [[hostile_scorers.plain(f"{i} {k}", groups[i].prompt) for k in range(2)] for i in range(2)]
    assert [[s.reward for s in g.samples] for g in groups] == expected


def test_time_is_split_between_generating_and_grading():
    clock = itertools.count()
    timer = PhaseTimer(clock=lambda: next(clock))
    collect.rollouts(Scripted([0, 1]), Tokens(), requests(0, 1), Sampling(), Grader(), timer)
    times = timer.pop()
    assert times["time/rollout_s"] == 3 and times["time/reward_s"] == 2  # one tick each; one more to see the end


def test_groups_survive_the_way_between_processes():
    sent = [group(MIXED, 0, tokens=[[5], [6, 7, 8]]), group(BROKEN, 1)]
    for before, after in zip(sent, collect._decode(collect._encode(sent)), strict=True):
        assert after.prompt.id == before.prompt.id and after.prompt.tokens.tolist() == before.prompt.tokens.tolist()
        for a, b in zip(before.samples, after.samples, strict=True):
            assert (a.index, a.seed, a.finish, a.status) == (b.index, b.seed, b.finish, b.status)
            assert a.tokens.tolist() == b.tokens.tolist() and a.logp.tolist() == b.logp.tolist()
            np.testing.assert_equal(a.reward, b.reward)


def test_an_array_of_received_groups_is_read_once():
    """What arrives is a file: each look at one of its arrays reads it whole, and there may be 65,536 samples."""

    class Counted(dict):
        looks = 0

        def __getitem__(self, name):
            self.looks += 1
            return super().__getitem__(name)

    arrays, meta = checkpoint.pack_groups([group([0.0, 1.0] * 8, i) for i in range(4)])
    counted = Counted(arrays)
    assert len(checkpoint.unpack_groups(counted, meta)) == 4
    assert counted.looks == len(arrays)
