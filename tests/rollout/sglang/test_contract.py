"""What the engine relies on, held against a real SGLang server and against the fake one."""

from __future__ import annotations

import asyncio

import numpy as np
import orjson
import pytest
import sglang_cases as cases
from scipy import stats

from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang.client import Client, Keys, Refused, session
from brorl_jax.types import Finish

PARAMS = cases.table_weights(seed=1)


@pytest.fixture
def engine(url, tmp_path):
    with cases.engine([url], tmp_path / "weights", start_timeout_s=600.0) as made:
        made.publish(PARAMS, 7)
        yield made


def ask(url, calls):
    """``await calls(client)`` on a client of its own."""

    async def run():
        async with session() as http:
            return await calls(Client(http, url, Keys()))

    return asyncio.run(run())


def raw_body(**changes):
    params = {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": [cases.STOP]} | changes.pop("params", {})
    return orjson.dumps(
        {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": params, "rid": "r" * 8} | changes
    )


def test_groups_have_every_sample_with_its_seed_version_and_log_probabilities(engine):
    wanted = cases.requests(3, 5)
    groups = {g.prompt.id: g for g in engine.generate(wanted, cases.sampling(temperature=1.3))}
    assert set(groups) == {r.prompt.id for r in wanted}
    for request in wanted:
        samples = groups[request.prompt.id].samples
        assert [s.seed for s in samples] == list(request.seeds)
        assert {s.weight_version for s in samples} == {7}
        for s in samples:
            exact = cases.table_logp(PARAMS, [*request.prompt.tokens, *s.tokens], 1.3)
            places = np.arange(len(s.tokens)) + len(request.prompt.tokens) - 1
            np.testing.assert_allclose(s.logp, exact[places, s.tokens], atol=1e-4)
            assert (s.finish is Finish.STOP) == (s.tokens[-1] == cases.STOP)
            assert s.finish is Finish.STOP or len(s.tokens) == 6
            assert cases.STOP not in s.tokens[:-1]


def test_first_tokens_are_drawn_from_the_softmax(engine):
    request = cases.requests(1, 600)[0]
    [group] = engine.generate([request], cases.sampling(max_tokens=1, temperature=2.0))
    counts = np.bincount([s.tokens[0] for s in group.samples], minlength=cases.VOCAB)
    p = np.exp(cases.table_logp(PARAMS, request.prompt.tokens, 2.0)[-1])
    often = p * 600 >= 5  # the test's usual condition; the rest are one class
    observed, expected = [*counts[often], counts[~often].sum()], [*(600 * p[often]), 600 * p[~often].sum()]
    assert often.sum() > 10
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_an_update_flushes_the_prefix_cache_and_changes_the_policy(engine):
    request = cases.requests(1, 4, length=40)
    [before] = engine.generate(request, cases.sampling(temperature=0.0))
    assert engine._ledger.cached_tokens == 4 * 39  # the prompt was computed once, before its samples
    cached = engine._ledger.cached_tokens
    other = cases.table_weights(seed=2)
    engine.publish(other, 8)
    request_1 = cases.requests(1, 1, length=40)
    [after] = engine.generate(request_1, cases.sampling(temperature=0.0))
    assert engine._ledger.cached_tokens == cached  # nothing of the old weights is reused
    expected = cases.table_logp(other, request[0].prompt.tokens)[-1].argmax()
    assert after.samples[0].tokens[0] == expected
    assert after.samples[0].weight_version == 8
    assert {tuple(s.tokens) for s in before.samples} == {tuple(before.samples[0].tokens)}


def test_the_ledger_balances_and_metrics_say_so(engine):
    engine.metrics()
    list(engine.generate(cases.requests(2, 3), cases.sampling()))
    found = engine.metrics()
    assert found["engine/requested"] == found["engine/delivered"] == 6
    assert found["engine/dropped"] == found["engine/retries"] == 0
    assert found["engine/servers"] == 1
    assert 0 <= found["engine/cache_hit_rate"] <= 1
    assert found["engine/server_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"params": {"temperature": -1.0}}, "temperature"),
        ({"params": {"no_such_key": 1}}, "unknown field"),
        ({"input_ids": []}, "empty"),
        ({"params": {"max_new_tokens": 5000}}, "context length"),
    ],
)
def test_bad_requests_are_refused_in_the_servers_words(engine, url, body, words):
    with pytest.raises(Refused, match=words):
        ask(url, lambda client: client.generate(raw_body(**body), 20.0))


def test_an_unknown_route_is_refused_with_a_hint(engine, url):
    with pytest.raises(Refused, match=r"404.*router"):
        ask(url, lambda client: client.get("/no_such_route"))


def test_a_paused_server_is_not_ready_and_keeps_requests_waiting(engine, url):
    async def calls(client):
        await client.admin("/pause_generation", {"mode": "abort"}, 20.0)
        with pytest.raises(Exception, match="503"):
            await client.text("/ready")
        waiting = asyncio.ensure_future(client.generate(raw_body(), 30.0))
        await asyncio.wait([waiting], timeout=0.3)
        done_while_paused = waiting.done()
        info = await client.get("/model_info")
        await client.admin("/continue_generation", {}, 20.0)
        return done_while_paused, info, orjson.loads(await waiting)

    early, info, answer = ask(url, calls)
    assert not early
    assert info["weight_version"] == engine._version.tag
    assert 0 < len(answer["output_ids"]) <= 4


def test_a_directory_that_is_not_there_changes_nothing(engine, url):
    with pytest.raises(Refused):
        payload = {"model_path": "/no/such/directory", "load_format": "auto", "weight_version": "new"}
        ask(url, lambda client: client.admin("/update_weights_from_disk", payload, 60.0))
    [group] = engine.generate(cases.requests(1, 2), cases.sampling())
    assert {s.weight_version for s in group.samples} == {7}


def test_aborting_one_request_leaves_the_others(engine, url):
    async def calls(client):
        long = {"max_new_tokens": 100, "stop_token_ids": [], "ignore_eos": True}
        bodies = [raw_body(rid=f"{i:08d}", params=long) for i in range(2)]
        jobs = [asyncio.ensure_future(client.generate(body, 60.0)) for body in bodies]
        await asyncio.sleep(0)
        await client.admin("/abort_request", {"rid": "00000000"}, 20.0)
        await client.admin("/abort_request", {"rid": "no-such-id"}, 20.0)
        return [orjson.loads(raw)["meta_info"]["finish_reason"]["type"] for raw in await asyncio.gather(*jobs)]

    kinds = ask(url, calls)
    assert kinds[1] == "length"
    assert kinds[0] in ("abort", "length")  # the real one may have been too fast


def test_ids_outside_the_vocabulary_never_reach_the_server(engine):
    bad = cases.Request(cases.prompt("bad", [5, cases.VOCAB]), (1, 2))
    with pytest.raises(UserError, match=r"'bad' holds id 259"):
        list(engine.generate([bad], cases.sampling()))
    long = cases.Request(cases.prompt("long", [5] * (cases.CONTEXT - 5)), (1, 2))
    with pytest.raises(UserError, match=r"exceeds the server's context of 128"):
        list(engine.generate([long], cases.sampling()))
    assert engine._ledger.requested == 0
