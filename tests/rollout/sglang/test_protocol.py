"""What is sent and what is accepted, without any server."""

from __future__ import annotations

import dataclasses

import numpy as np
import orjson
import pytest
import sglang_cases as cases

from brorl_jax.config import default, source
from brorl_jax.config_checks import check
from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang import protocol, watch
from brorl_jax.rollout.sglang.generation import Ledger
from brorl_jax.types import Finish

LIMITS = protocol.Limits(vocab=cases.VOCAB, context=cases.CONTEXT)
RID = "r-0001"


def test_a_body_says_everything_that_a_server_would_otherwise_guess():
    body = protocol.Body(np.array([5, 6, 7], np.int32), cases.sampling(max_tokens=9, temperature=1.2))
    assert orjson.loads(body.sample(RID, 2**63 - 1)) == {
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "stream": False,
        "rid": RID,
        "sampling_params": {
            "temperature": 1.2,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": 9,
            "stop_token_ids": [cases.STOP],
            "sampling_seed": 2**63 - 1,
        },
    }
    assert orjson.loads(body.prefill(RID)) == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 0},
        "rid": RID,
    }


@pytest.mark.parametrize(
    ("tokens", "changes", "words"),
    [
        ([5, cases.VOCAB], {}, f"holds id {cases.VOCAB}"),
        ([5, -1], {}, "holds id -1"),
        ([], {}, "0 tokens"),
        ([5] * 123, {}, "exceeds the server's context of 128"),
        ([5], {"stop_ids": ()}, "stop ids"),
        ([5], {"stop_ids": (2, 999)}, "stop ids [999]"),
    ],
)
def test_what_would_kill_a_server_is_never_sent(tokens, changes, words):
    request = cases.Request(cases.prompt("p", tokens), (1, 2))
    sampling = dataclasses.replace(cases.sampling(), **changes)
    with pytest.raises(UserError) as refused:
        protocol.check([request], sampling, LIMITS)
    assert words in str(refused.value)
    protocol.check([cases.Request(cases.prompt("p", [5] * 122), (1,))], cases.sampling(), LIMITS)  # just fits


def answer(ids=(9, 8, cases.STOP), logps=(-1.0, -2.0, -0.5), **meta):
    finish = {"type": "stop", "matched": cases.STOP}
    meta = {
        "id": RID,
        "finish_reason": finish,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "v",
        "weight_versions": [{"version": "v", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(logps, ids, strict=False)],
    } | meta
    return orjson.dumps({"output_ids": list(ids), "meta_info": meta})


def parse(raw):
    return protocol.parse(
        raw,
        rid=RID,
        index=4,
        seed=77,
        prompt_tokens=3,
        sampling=cases.sampling(),
        tag="v",
        version=5,
        vocab=cases.VOCAB,
    )


def test_a_good_answer_becomes_a_sample():
    sample, cached = parse(answer())
    assert (sample.index, sample.seed, sample.weight_version, sample.finish, cached) == (4, 77, 5, Finish.STOP, 2)
    np.testing.assert_array_equal(sample.tokens, np.array([9, 8, cases.STOP], np.int32), strict=True)
    np.testing.assert_array_equal(sample.logp, np.array([-1.0, -2.0, -0.5], np.float32), strict=True)
    six = {"ids": [9] * 6, "logps": [-1.0] * 6, "finish_reason": {"type": "length", "length": 6}}
    assert parse(answer(**six))[0].finish is Finish.LENGTH
    assert parse(answer(**six | {"cached_tokens": None}))[1] == 0


OLD = {"weight_versions": [{"version": "u", "start": 0, "end": 1}, {"version": "v", "start": 1, "end": 3}]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b"null", "malformed"),
        (b'"text"', "malformed"),
        (answer()[:-20], "malformed"),
        (answer(id="r-0002"), "swapped"),
        (answer(finish_reason={"type": "abort", "message": "Aborted"}), "aborted"),
        (answer(ids=(), logps=(), finish_reason={"type": "abort"}, prompt_tokens=None), "aborted"),
        (answer(weight_version="u"), "stale_version"),
        (answer(**OLD), "stale_version"),
        (answer(prompt_tokens=4), "malformed"),
        (answer(ids=(9, 8)), "malformed"),  # ended by itself without a stop id
        (answer(logps=(-1.0, -2.0)), "malformed"),
        (answer(logps=(-1.0, -2.0, 0.5)), "malformed"),
        (answer(logps=(-1.0, None, -0.5)), "malformed"),
        (answer(ids=(9, cases.VOCAB, cases.STOP)), "malformed"),
        (answer(ids=(9, -1, cases.STOP)), "malformed"),
        (answer(ids=[9] * 7, logps=[-1.0] * 7), "malformed"),
        (answer(ids=(), logps=()), "malformed"),
        (answer(output_token_logprobs=[[-1.0, 9, None], [-1.0, 9, None], [-1.0, 9, None]]), "malformed"),
    ],
)
def test_what_is_not_what_was_asked_for_is_named(raw, reason):
    with pytest.raises(protocol.BadAnswer) as bad:
        parse(raw)
    assert bad.value.reason == reason


METRICS = """# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 40.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 2.0
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 4.0
sglang:token_usage{tp_rank="0"} 2.5e-01
python_gc_objects_collected_total{generation="0"} 11627.0
"""


def test_server_metrics_add_up_over_replicas_not_over_shards():
    names = ("prompt_tokens_total", "num_running_reqs", "token_usage", "absent")
    assert watch.read(METRICS, names) == {"prompt_tokens_total": 42.0, "num_running_reqs": 7.0, "token_usage": 0.25}


def test_the_ledger_as_metrics():
    ledger = Ledger(requested=10, delivered=7, cancelled=1, prompt_tokens=70, cached_tokens=63)
    ledger.dropped.update(timeout=2)
    ledger.retried.update(timeout=9, swapped=1)
    assert ledger.balanced
    found = watch.ledger_metrics(ledger, 3.5)
    assert found["engine/dropped"] == found["engine/dropped_timeout"] == 2 and found["engine/retries"] == 10
    assert found["engine/cached_share"] == 0.9 and found["engine/samples_per_s"] == 2.0


def config(**changes):
    c = default()
    c.data.train.sums = source("reasoning_gym", task="basic_arithmetic")
    c.rollout.engine = "sglang"
    c.rollout.sglang.urls = ("http://a:1",)
    c.update_from_flattened_dict({f"rollout.sglang.{k}": v for k, v in changes.items()})
    return c


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"urls": ()}, "needs one of urls, router, launch.servers, has none"),
        ({"launch.servers": 2}, "has urls and launch.servers"),
        ({"urls": ("a:1",)}, "write a URL as http://host:port"),
        ({"urls": ("http://a:1", "http://a:1")}, "names a server twice"),
        ({"router": "http://a:1/x", "urls": ()}, "write a URL"),
        ({"launch.gpus": (0, 0)}, "different device ids"),
        ({"launch.env": ("A",)}, "NAME=value"),
        ({"launch.flags": ("tp 2",)}, "--name=value"),
        ({"launch.flags": ("--api-key=x",)}, "SGLANG_API_KEY"),
        ({"launch.mem_fraction": 1.0}, "mem_fraction"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(changes, words):
    with pytest.raises(UserError) as refused:
        check(config(**changes))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    check(config())


def test_an_evaluation_needs_servers_as_well():
    with pytest.raises(UserError, match=r"needs one of urls, router, launch\.servers, has none"):
        check(config(urls=()), "evaluate")
