"""The stream: every prompt exactly once per epoch, whatever happens to the run."""

import json
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from brorl_jax import rewards
from brorl_jax.data import stream as stream_lib
from brorl_jax.data.mixture import Turns
from brorl_jax.data.stream import PromptStream, exclusions, held_out, question_hash, sample_texts, warmup_pair
from brorl_jax.errors import UserError

ADDITION = {
    "kind": "reasoning_gym",
    "task": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "verifier": "reasoning_gym_strict:whole",
    "size": 120,
}


@pytest.fixture
def make(tokenizer):
    def build(sources, seed=0, **kw):
        return PromptStream(sources, tokenizer, **{"seed": seed, "max_prompt_tokens": 40, **kw})

    return build


def ids(prompts):
    return [p.id for p in prompts]


def killed_and_resumed(build, state):
    fresh = build()
    fresh.restore(json.loads(json.dumps(state)))
    return fresh


def test_each_prompt_once_per_epoch_across_three_kills(make, table):
    """P48: kills at arbitrary places, work taken but not yet saved is taken again, nothing else."""
    source = {"t": table("t", 23)}

    def build():
        return make(source)

    straight = ids(build().take(3 * 23))
    stream, ledger = build(), []
    for step in (5, 9, 20):
        ledger += ids(stream.take(step))
        state = stream.state()
        stream.take(4)  # in flight when the process is killed
        stream = killed_and_resumed(build, state)
    ledger += ids(stream.take(3 * 23 - len(ledger)))
    assert ledger == straight
    for epoch in range(3):
        assert sorted(ledger[23 * epoch : 23 * (epoch + 1)]) == sorted(f"t/{i}" for i in range(23))
    assert ledger[:23] != ledger[23:46]


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_resume_around_an_epoch_boundary(make, table, offset):
    """P47."""
    source = {"t": table("t", 8)}
    stream = make(source)
    stream.take(8 + offset)
    resumed = killed_and_resumed(lambda: make(source), stream.state())
    assert ids(resumed.take(10)) == ids(stream.take(10)) == ids(make(source).take(18 + offset))[8 + offset :]


def test_five_prompts_in_batches_of_four(make, table):
    """P18: no remainder is dropped."""
    stream = make({"t": table("t", 5)})
    taken = ids(stream.take(4)) + ids(stream.take(4)) + ids(stream.take(2))
    assert Counter(taken) == {f"t/{i}": 2 for i in range(5)} and len(set(taken[:5])) == 5


def test_order_depends_on_seed_and_not_by_a_shift(make, table):
    """Grain's epoch e of seed s is epoch 0 of seed s + e; run seeds must not share orders that way."""
    source = {"t": table("t", 30)}
    orders = {seed: ids(make(source, seed=seed).take(90)) for seed in (0, 1, 2)}
    epochs = [tuple(o[i : i + 30]) for o in orders.values() for i in (0, 30, 60)]
    assert len(set(epochs)) == 9


WEIGHTS = st.one_of(st.integers(1, 50), st.floats(0.01, 100.0))


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=9), turns=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_every_source_is_within_one_turn_of_its_share_at_any_time(weights, turns):
    named = {f"s{i}": w for i, w in enumerate(weights)}
    turn, total = Turns(named), sum(Fraction(str(float(w))) for w in weights)
    counts = Counter()
    for k in range(1, turns + 1):
        counts[turn.next()] += 1
        assert all(abs(counts[n] - k * Fraction(str(float(w))) / total) < 1 for n, w in named.items())
    assert turn.taken == {n: counts[n] for n in named}


def test_mixture_follows_the_weights_and_each_source_its_epochs(make, table):
    sources = {"a": table("a", 30, weight=3.0), "b": table("b", 10, weight=1.0), "c": table("c", 10, weight=1.0)}
    prompts = make(sources).take(500)
    assert Counter(p.source for p in prompts) == {"a": 300, "b": 100, "c": 100}
    for start in range(0, 480, 20):  # even locally
        assert 11 <= sum(p.source == "a" for p in prompts[start : start + 20]) <= 13
    for name, size in (("a", 30), ("b", 10), ("c", 10)):
        own = [p.id for p in prompts if p.source == name]
        for epoch in range(len(own) // size):
            assert len(set(own[epoch * size : (epoch + 1) * size])) == size
    order = {name: [p.id[2:] for p in prompts if p.source == name] for name in "bc"}
    assert order["b"] != order["c"]


def test_prompts_that_are_left_out_do_not_count_as_turns(make, table):
    """A procedural source that loses half its positions still gets its share, here 0.7 to 0.3 (no ratio of Grain's)."""
    mixed = {**ADDITION, "params": {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1}}
    stream = make({"rg": {**mixed, "weight": 0.7}, "t": table("t", 7, weight=0.3)}, max_prompt_tokens=17)
    counts = Counter()
    for k in range(1, 151):
        counts[stream.take(1)[0].source] += 1
        assert abs(counts["rg"] - 0.7 * k) < 1
    assert stream.dropped["rg"]["too_long"] > 20


@given(takes=st.lists(st.integers(0, 13), min_size=1, max_size=8), lost=st.integers(0, 9))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mixture_resumes_bit_for_bit_wherever_it_is_killed(make, table, takes, lost):
    sources = {
        "a": table("a", 7, weight=2.5),
        "b": table("b", 4, weight=1.0),
        "rg": {**ADDITION, "size": 9, "weight": 0.7},
    }
    straight = make(sources).take(sum(takes))
    stream, ledger = make(sources), []
    for n in takes:
        ledger += stream.take(n)
        state = stream.state()
        stream.take(lost)  # in flight when the process is killed
        stream = killed_and_resumed(lambda: make(sources), state)
    assert ids(ledger) == ids(straight)
    assert all(np.array_equal(a.tokens, b.tokens) and a.gold == b.gold for a, b in zip(ledger, straight, strict=True))
    for name, size in (("a", 7), ("b", 4), ("rg", 9)):
        own = [p.id for p in ledger if p.source == name]
        for epoch in range(0, len(own), size):
            assert len(set(own[epoch : epoch + size])) == len(own[epoch : epoch + size])


@pytest.mark.slow
def test_same_prompts_in_another_process(make, table, tokenizer_dir):
    sources = {"t": table("t", 9), "rg": ADDITION}
    code = (
        "import json, sys; from brorl_jax.data.stream import PromptStream;"
        "from brorl_jax.data.tokenizer import Tokenizer;"
        "s = PromptStream(json.loads(sys.argv[1]), Tokenizer(sys.argv[2]), seed=3, max_prompt_tokens=40);"
        "p = s.take(40); print(json.dumps([[x.id, x.tokens.tolist(), x.gold] for x in p] + [s.state()]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sources), str(tokenizer_dir)]
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    there = json.loads(subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout)
    stream = make(sources, seed=3)
    here = [[p.id, p.tokens.tolist(), p.gold] for p in stream.take(40)]
    assert there == [*here, stream.state()]


def test_restore_refuses_other_data_and_says_what_changed(make, table, tokenizer, tmp_path):
    source = {"t": table("t", 8), "u": table("u", 4)}
    state = json.loads(json.dumps(make(source).state()))
    changes = [
        ({"seed": 1}, source, "seed: was '0', is '1'"),
        ({"max_prompt_tokens": 41}, source, "max_prompt_tokens: was '40', is '41'"),
        ({"system_prompt": "x"}, source, "system_prompt: was '', is 'x'"),
        ({"exclude": frozenset([question_hash("t 1")])}, source, "held-out questions"),
        ({}, {"t": source["t"]}, "source u: content: was .*, is 'absent'"),
        ({}, {**source, "u": {**source["u"], "weight": 2.0}}, "source u: weight: was '1.0', is '2.0'"),
        ({}, {**source, "u": {**source["u"], "prompt": "Q {question}"}}, "source u: prompt"),
        ({}, {**source, "u": {**source["u"], "verifier": "exact"}}, "source u: verifier"),
        ({}, {**source, "u": table("u", 5)}, "source u: size: was '4', is '5'"),
    ]
    for kw, sources, message in changes:
        with pytest.raises(ValueError, match=message):
            make(sources, **kw).restore(state)


def test_moving_a_file_does_not_change_the_data(make, table, tmp_path):
    source = table("t", 8)
    stream = make({"t": source})
    stream.take(3)
    moved = tmp_path / "moved.jsonl"
    os.rename(source["path"], moved)
    fresh = make({"t": {**source, "path": str(moved)}})
    fresh.restore(stream.state())
    assert ids(fresh.take(5)) == ids(stream.take(5))


def test_long_prompts_of_a_table_are_filtered_at_load(make, tmp_path, tokenizer):
    """P40: counted at load; the limit is in tokens of the whole templated prompt, and is inclusive."""
    rows = [{"question": "7" * n, "answer": 1} for n in range(1, 21)]  # n digits are n tokens, plus 3 of the template
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"s": {"kind": "jsonl", "path": str(tmp_path / "long.jsonl")}}
    stream = make(source, max_prompt_tokens=13)
    assert stream.dropped == {"s": {"too_long": 10, "held_out": 0}}
    prompts = stream.take(10)
    assert sorted(len(p.tokens) for p in prompts) == list(range(4, 14))
    with pytest.raises(ValueError, match=r"no prompt of data source 's' is left.*'too_long': 20"):
        make(source, max_prompt_tokens=3)


def test_long_prompts_of_a_procedural_source_are_holes(make, monkeypatch):
    mixed = {**ADDITION, "params": {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1}}
    stream = make({"rg": mixed}, max_prompt_tokens=20)
    everything = make({"rg": mixed}, max_prompt_tokens=200).take(120)
    short = [p.id for p in everything if len(p.tokens) <= 20]
    assert 0 < len(short) < 120
    half = len(short) // 2
    assert ids(stream.take(half)) == short[:half]
    resumed = killed_and_resumed(lambda: make({"rg": mixed}, max_prompt_tokens=20), stream.state())
    assert ids(resumed.take(len(short) - half)) == short[half:]
    assert sorted(ids(resumed.take(len(short)))) == sorted(short)  # the next epoch has the same prompts
    monkeypatch.setattr(stream_lib, "_MAX_HOLES", 50)
    with pytest.raises(ValueError, match=r"last 50 prompts of data source 'rg' were all dropped.*max_prompt_tokens"):
        make({"rg": mixed}, max_prompt_tokens=5).take(1)


def test_a_procedural_source_of_prompts_too_long_is_refused_soon(make, tokenizer, monkeypatch):
    """With what it takes to mend it: with as many tokens as the shortest of them has, prompts come."""
    monkeypatch.setattr(stream_lib, "_MAX_TOO_LONG", 40)
    made = []
    monkeypatch.setattr(tokenizer, "encode_prompt", counted(tokenizer.encode_prompt, made))
    refusal = r"no prompt of data source 'rg' fits data.max_prompt_tokens = 5: of 40 tried, the shortest has"
    found = []
    for ask in (
        lambda: make({"rg": ADDITION}, max_prompt_tokens=5).take(1),
        lambda: held_out("rg", ADDITION, tokenizer, max_prompts=9, max_prompt_tokens=5),
    ):
        made.clear()
        with pytest.raises(UserError, match=refusal) as refused:
            ask()
        assert len(made) == 40
        found.append(min(made))
        assert f"has {found[-1]} tokens" in str(refused.value) and "\n" not in str(refused.value)
    assert make({"rg": ADDITION}, max_prompt_tokens=found[0]).take(1)


def counted(encode, lengths):
    def encode_prompt(messages):
        tokens, text = encode(messages)
        lengths.append(len(tokens))
        return tokens, text

    return encode_prompt


def test_few_that_fit_are_waited_for(make, monkeypatch):
    """Only those in a row count."""
    mixed = {**ADDITION, "params": {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1}}
    lengths = [len(p.tokens) for p in make({"rg": mixed}, max_prompt_tokens=200).take(120)]
    limit = sorted(lengths)[30]
    fits = [n <= limit for n in lengths]
    end = 120 - fits[::-1].index(True)  # of what is visited below
    longest = max(len(row) for row in "".join("ab"[fit] for fit in fits[:end]).split("b"))
    assert fits.count(False) > longest + 1 > 2
    monkeypatch.setattr(stream_lib, "_MAX_TOO_LONG", longest + 1)
    assert make({"rg": mixed}, max_prompt_tokens=limit).take(sum(fits))
    monkeypatch.setattr(stream_lib, "_MAX_TOO_LONG", longest)
    with pytest.raises(UserError, match="the shortest has"):
        make({"rg": mixed}, max_prompt_tokens=limit).take(sum(fits))


def test_held_out_questions_never_appear_in_training(make, tokenizer):
    """Seeds 0 and 1 of reasoning-gym share all items but one: only the exclusion keeps them apart."""
    test = held_out("rg", {**ADDITION, "seed": 1}, tokenizer, max_prompts=30, max_prompt_tokens=40)
    questions = {p.meta["question"] for p in test}
    assert len(test) == len(questions) == 30
    everything = make({"rg": ADDITION}).take(120)
    assert questions & {p.meta["question"] for p in everything}
    kept = [p for p in everything if p.meta["question"] not in questions]
    stream = make({"rg": ADDITION}, exclude=exclusions(test))
    assert ids(stream.take(len(kept))) == ids(kept)
    state = stream.state()
    assert stream.dropped["rg"]["held_out"] > 0 and state["positions"]["rg"] <= 120


def test_exclusion_ignores_template_and_white_space(make, table, tokenizer):
    test = held_out("t", table("t", 4, prompt="Q:  {question}"), tokenizer, max_prompts=2, max_prompt_tokens=40)
    stream = make({"t": table("t", 4, prompt="{question}!")}, exclude=exclusions(test))
    assert sorted(ids(stream.take(2))) == sorted({f"t/{i}" for i in range(4)} - set(ids(test)))
    assert stream.dropped["t"]["held_out"] == 2
    assert question_hash(" a  b\n") == question_hash("a b") != question_hash("ab")


def test_held_out_is_a_fixed_choice_in_file_order(table, tokenizer):
    source = table("t", 50)
    some = held_out("t", source, tokenizer, max_prompts=10, max_prompt_tokens=40)
    assert ids(some) == ids(held_out("t", source, tokenizer, max_prompts=10, max_prompt_tokens=40))
    keys = [int(p.id[2:]) for p in some]
    assert keys == sorted(keys) and keys != list(range(10))
    every = held_out("t", source, tokenizer, max_prompts=0, max_prompt_tokens=40)
    assert ids(every) == [f"t/{i}" for i in range(50)]
    with pytest.raises(ValueError, match="fits 3 tokens"):
        held_out("t", source, tokenizer, max_prompts=10, max_prompt_tokens=3)
    with pytest.raises(ValueError, match=r"set eval\.max_prompts"):
        held_out("rg", {**ADDITION, "size": 10**9}, tokenizer, max_prompts=0, max_prompt_tokens=40)


def test_prompt_carries_template_system_prompt_and_what_its_verifier_needs(make, table, tokenizer):
    source = table("t", 1, prompt=r"Q: {question} Answer in \boxed{}.", verifier="numeric")
    (prompt,) = make({"t": source}, system_prompt="Be brief.", max_prompt_tokens=200).take(1)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": r"Q: t 0 Answer in \boxed{}."},
    ]
    tokens, text = tokenizer.encode_prompt(messages)
    assert prompt.text == text and prompt.tokens.tolist() == tokens.tolist()
    assert (prompt.gold, prompt.verifier, prompt.meta) == ("0", "numeric:boxed", {"question": "t 0"})
    json.dumps(prompt.meta)


def test_warmup_response_is_the_gold_in_the_answer_format(make, table, tokenizer):
    for verifier in ("numeric:boxed", "exact:tag", "exact:whole"):
        (prompt,) = make({"t": table("t", 5, verifier=verifier)}).take(1)
        pair = warmup_pair(prompt, tokenizer)
        assert pair.response.dtype == np.int32 and pair.response[-1] == tokenizer.eos_id
        assert (pair.response == tokenizer.eos_id).sum() == 1
        answer = rewards.get(verifier).extract(tokenizer.decode(pair.response), truncated=False)
        assert answer is not None and answer.text == prompt.gold
    graph = {"kind": "reasoning_gym", "task": "graph_color", "size": 3}
    (prompt,) = make({"g": graph}, max_prompt_tokens=4000).take(1)
    with pytest.raises(ValueError, match="no single gold"):
        warmup_pair(prompt, tokenizer)


def test_texts_for_a_tokenizer(table):
    texts = sample_texts({"t": table("t", 5, prompt="Q {question}", verifier="exact:tag")}, 2)
    assert texts == ["Q t 0", "<answer>0</answer>", "Q t 1", "<answer>1</answer>"]


def test_no_source_is_refused(make):
    with pytest.raises(ValueError, match="no data source"):
        make({})
