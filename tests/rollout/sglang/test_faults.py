"""Servers that fail in every way we know of: nothing lost, nothing double, nothing wrong, all accounted for."""

from __future__ import annotations

import dataclasses
import gc
import http.server
import threading

import numpy as np
import pytest
import sglang_cases as cases

from brorl_jax import collect
from brorl_jax.errors import UserError
from brorl_jax.rollout.sglang import publish, watch
from brorl_jax.rollout.sglang.client import Keys
from brorl_jax.types import Finish

PARAMS, OTHER = cases.table_weights(seed=1), cases.table_weights(seed=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits between attempts are shortened, not left out."""
    monkeypatch.setattr("brorl_jax.rollout.sglang.generation.BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(publish, "REVIVE_EVERY_S", 0.05)
    monkeypatch.setattr(publish, "FLUSH_SLEEP_S", 0.01)


@pytest.fixture
def two(fakes, tmp_path):
    """An engine on two fake servers."""
    with cases.engine([f.url for f in fakes], tmp_path / "weights", timeout_s=60.0) as engine:
        engine.publish(PARAMS, 7)
        yield engine


def check_groups(groups, wanted, params=PARAMS, version=7):
    """Every sample of every group once, from these weights, with its own seed; returns the aborted ones."""
    assert sorted(g.prompt.id for g in groups) == sorted(r.prompt.id for r in wanted)
    by_id = {r.prompt.id: r for r in wanted}
    for group in groups:
        assert [s.index for s in group.samples] == list(range(len(by_id[group.prompt.id].seeds)))
        assert [s.seed for s in group.samples] == list(by_id[group.prompt.id].seeds)
        for s in (s for s in group.samples if s.finish is not Finish.ABORT):
            exact = cases.table_logp(params, [*group.prompt.tokens, *s.tokens])
            places = np.arange(len(s.tokens)) + len(group.prompt.tokens) - 1
            np.testing.assert_allclose(s.logp, exact[places, s.tokens], atol=1e-4)
            assert s.weight_version == version
    return [s for g in groups for s in g.samples if s.finish is Finish.ABORT]


@pytest.mark.parametrize(
    ("faults", "reasons"),
    [
        (["503"], {"unavailable": 1}),
        (["drop"], {"dropped": 1}),
        (["empty"], {"malformed": 1}),
        (["garbage"], {"malformed": 1}),
        (["swap"], {"swapped": 2}),
        (["stale"], {"stale_version": 1}),
        (["abort"], {"aborted": 1}),
        (["503", "ok", "drop", "garbage", "503"], {"unavailable": 2, "dropped": 1, "malformed": 1}),
    ],
)
def test_a_failed_request_is_made_again_with_its_seed(two, fakes, faults, reasons):
    for fake in fakes:
        fake.faults.extend(faults)
    wanted = cases.requests(4, 6)
    assert check_groups(list(two.generate(wanted, cases.sampling())), wanted) == []
    ledger = two._ledger
    assert ledger.balanced and ledger.requested == ledger.delivered == 24 and not ledger.dropped
    assert ledger.retried == {k: 2 * v for k, v in reasons.items()}  # at both
    bodies = [b for fake in fakes for b in fake.seen]
    seeds = [b["sampling_params"]["sampling_seed"] for b in bodies]
    assert set(seeds) == {s for r in wanted for s in r.seeds}
    assert len(seeds) == 24 + sum(ledger.retried.values())
    assert len({b["rid"] for b in bodies}) == len(bodies) and len({len(b["rid"]) for b in bodies}) == 1


def test_a_stalled_request_has_a_deadline_and_is_aborted_where_it_hangs(fakes, tmp_path):
    with cases.engine([f.url for f in fakes], tmp_path / "weights", timeout_s=2.0, attempts=99) as engine:
        engine.publish(PARAMS, 7)
        for fake in fakes:
            fake.faults.append("stall")
        wanted = cases.requests(4, 6)
        assert check_groups(list(engine.generate(wanted, cases.sampling())), wanted) == []
        assert engine._ledger.balanced and engine._ledger.retried["timeout"] >= 2  # more where the machine is busy
        cases.wait_for(lambda: not any(f.running for f in fakes), "the servers to let go of what hung")
        assert all("/abort_request" in fake.calls for fake in fakes)


def test_the_samples_of_a_group_go_to_one_server(two, fakes):
    list(two.generate(cases.requests(6, 8), cases.sampling()))
    prompts = [{tuple(b["input_ids"]) for b in fake.seen} for fake in fakes]
    assert len(prompts[0]) == len(prompts[1]) == 3 and not prompts[0] & prompts[1]


def test_a_sample_that_nobody_delivers_is_aborted_and_never_reward_0(fake, tmp_path):
    with cases.engine([fake.url], tmp_path / "weights", dead_after=99, attempts=3) as engine:
        engine.publish(PARAMS, 7)
        fake.faults.extend(["503"] * 5)  # more than one sample's attempts, at both samples
        wanted = cases.requests(1, 2)
        groups = list(engine.generate(wanted, cases.sampling()))
        [lost] = check_groups(groups, wanted)
        assert len(lost.tokens) == len(lost.logp) == 0 and np.isnan(lost.reward)
        found = engine.metrics()
        assert engine._ledger.balanced
    assert (found["engine/requested"], found["engine/delivered"], found["engine/dropped_unavailable"]) == (2, 1, 1)
    assert found["engine/retried_unavailable"] == 5
    [other] = [s for s in groups[0].samples if s is not lost]
    for sample, (status, reward) in zip((lost, other), (("aborted", float("nan")), ("ok", 1.0)), strict=True):
        sample.status, sample.reward = collect.Status(status), reward
    rules = collect.Rules(groups=1, dynamic=False, max_rounds=1, min_valid=0.5, oversample=1.0)
    assert rules.verdict(groups[0]) == collect.KEPT
    assert dataclasses.replace(rules, min_valid=0.6).verdict(groups[0]) == "too_few_valid"


def test_a_server_killed_in_mid_step_loses_nothing(two, fakes):
    fakes[0].token_s = 0.02
    fakes[0].faults.extend(["ok"] * 10 + ["die"])
    wanted = cases.requests(6, 8)
    assert check_groups(list(two.generate(wanted, cases.sampling())), wanted) == []
    found = two.metrics()
    assert two._ledger.balanced and found["engine/delivered"] == found["engine/requested"] == 48
    assert found["engine/deaths"] == 1 and found["engine/servers"] == 1


def test_a_dead_server_serves_again_only_with_the_current_weights(two, fakes):
    fakes[0].kill()
    wanted = cases.requests(4, 4)
    assert check_groups(list(two.generate(wanted, cases.sampling())), wanted) == []
    two.publish(OTHER, 8)
    fakes[0].restart()
    cases.wait_for(lambda: len(two._pool.serving) == 2, "the restarted server to serve again")
    assert fakes[0].version == two._version.tag and fakes[0].version.endswith(".8")
    fakes[0].seen.clear()
    assert check_groups(list(two.generate(wanted, cases.sampling())), wanted, OTHER, 8) == []
    assert fakes[0].seen


def test_all_servers_gone_is_waited_for_and_then_an_error_with_each_ones_reason(fakes, tmp_path):
    urls = [f.url for f in fakes]
    with cases.engine(urls, tmp_path / "weights", start_timeout_s=1.0, dead_after=1) as engine:
        engine.publish(PARAMS, 7)
        for fake in fakes:
            fake.kill()
        with pytest.raises(UserError, match="no server left after waiting 1 s") as failed:
            list(engine.generate(cases.requests(2, 4), cases.sampling()))
        assert all(url in str(failed.value) for url in urls) and "cannot connect" in str(failed.value)
        assert engine._ledger.balanced and engine._ledger.cancelled == 8
        fakes[1].restart()
        cases.wait_for(lambda: engine._pool.serving, "the server that came back")
        wanted = cases.requests(2, 4)
        assert check_groups(list(engine.generate(wanted, cases.sampling())), wanted) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", "connection lost"),
        ("refuse", "refused"),
        ("stall", "no answer within"),
        ("lie", "computes something else than the trainer"),
    ],
)
def test_a_server_that_does_not_take_new_weights_is_taken_out(fakes, tmp_path, fault, words, caplog):
    with cases.engine([f.url for f in fakes], tmp_path / "weights", update_timeout_s=1.0) as engine:
        engine.publish(PARAMS, 7)
        fakes[0].update_faults.extend([fault] * 99)
        engine.publish(OTHER, 8)
        wanted = cases.requests(4, 4)
        assert check_groups(list(engine.generate(wanted, cases.sampling())), wanted, OTHER, 8) == []
        assert {b["rid"] for b in fakes[0].seen} == set() and len(fakes[1].seen) == 16
        assert engine.metrics()["engine/servers"] == 1
    assert any(words in r.getMessage() and fakes[0].url in r.getMessage() for r in caplog.records)
    assert fault == "die" or not fakes[0]._paused.is_set()
    assert not fakes[1]._paused.is_set()


def test_a_flush_that_fails_is_tried_again_and_weights_that_nobody_takes_are_an_error(fake, tmp_path):
    with cases.engine([fake.url], tmp_path / "weights") as engine:
        engine.publish(PARAMS, 7)
        fake.update_faults.extend(["noflush", "noflush"])
        engine.publish(OTHER, 8)
        assert fake.version.endswith(".8")
        fake.update_faults.extend(["noflush"] * 99)
        with pytest.raises(UserError, match=r"no server took the weights .*the cache was not flushed"):
            engine.publish(PARAMS, 9)


def test_what_the_server_refuses_ends_the_call_with_its_words(two, fakes):
    fakes[0].faults.append("400")
    fakes[1].faults.append("400")
    with pytest.raises(UserError, match="400: bad values"):
        list(two.generate(cases.requests(2, 4), cases.sampling()))
    assert two._ledger.balanced
    wanted = cases.requests(2, 4)
    assert check_groups(list(two.generate(wanted, cases.sampling())), wanted) == []


def test_giving_up_aborts_what_is_under_way(two, fakes):
    def check():
        if all(len(f.running) == 8 for f in fakes):
            raise KeyboardInterrupt

    for fake in fakes:
        fake.token_s = 600.0
    two._check = check
    with pytest.raises(KeyboardInterrupt):
        next(two.generate(cases.requests(4, 4), cases.sampling()))
    two._check = lambda: None
    cases.wait_for(lambda: not any(f.running for f in fakes), "the servers to drop what nobody waits for")
    assert two._ledger.balanced and two._ledger.cancelled == 16


def test_what_servers_do_at_the_moment_is_read_while_they_do_it(two, fakes, monkeypatch):
    def check():
        if 8.0 in two._watch._gauges["num_running_reqs"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "POLL_S", 0.05)
    for fake in fakes:
        fake.token_s = 600.0
    two._check = check
    with pytest.raises(KeyboardInterrupt):
        next(two.generate(cases.requests(4, 4), cases.sampling()))
    two._check = lambda: None
    assert two.metrics()["engine/running_max"] == 8


def test_no_reading_before_or_after_the_requests_counts_as_one_of_them(two, monkeypatch):
    monkeypatch.setattr(watch, "POLL_S", 600.0)
    list(two.generate(cases.requests(4, 4), cases.sampling()))
    found = two.metrics()
    assert found["engine/server_tokens_per_s"] > 0 and "engine/running_mean" not in found


@pytest.mark.parametrize("given_up", [False, True])
def test_the_collectors_thresholds_are_as_before_after_a_call(two, given_up):
    before = gc.get_threshold()
    generated = two.generate(cases.requests(2, 4), cases.sampling())
    next(generated)
    assert gc.get_threshold() == (20_000, *before[1:]) != before
    generated.close() if given_up else list(generated)
    assert gc.get_threshold() == before


def test_nothing_is_published_while_a_call_is_open(two, fakes):
    generated = two.generate(cases.requests(2, 4), cases.sampling())
    next(generated)
    with pytest.raises(RuntimeError, match="weights 8 published with a call of generate in flight"):
        two.publish(OTHER, 8)
    generated.close()
    two.publish(OTHER, 8)
    assert {f.version for f in fakes} == {two._version.tag}


def test_keys_are_sent_and_never_shown(tmp_path, monkeypatch):
    boot = cases.boot_directory(tmp_path / "boot")
    with cases.FakeServer(boot, api_key="open-sesame", admin_key="treasure", context=136) as fake:
        with cases.engine([fake.url], tmp_path / "w0") as engine, pytest.raises(UserError) as refused:
            engine.publish(PARAMS, 7)
        assert "401" in str(refused.value) and "SGLANG_API_KEY" in str(refused.value)
        monkeypatch.setenv("SGLANG_API_KEY", "open-sesame")
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "treasure")
        with cases.engine([fake.url], tmp_path / "w1") as engine:
            engine.publish(PARAMS, 7)
            assert len(list(engine.generate(cases.requests(2, 2), cases.sampling()))) == 2
    assert "sesame" not in repr(Keys.from_environment()) and "treasure" not in repr(Keys.from_environment())


def test_proxy_variables_are_ignored(fake, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with cases.engine([fake.url], tmp_path / "weights") as engine:
        engine.publish(PARAMS, 7)
        assert len(list(engine.generate(cases.requests(1, 2), cases.sampling()))) == 1


def test_a_server_left_paused_by_a_killed_trainer_is_unpaused(fake, tmp_path):
    fake._loop.call_soon_threadsafe(fake._paused.set)
    with cases.engine([fake.url], tmp_path / "weights") as engine:
        engine.publish(PARAMS, 7)
        assert len(list(engine.generate(cases.requests(1, 2), cases.sampling()))) == 1
    assert not list((tmp_path / "weights").parent.glob("weights/*"))


def test_servers_of_another_model_or_out_of_sight_are_refused_untouched(fake, tmp_path):
    with (
        cases.engine([fake.url], tmp_path / "weights", cases.LLAMA) as engine,
        pytest.raises(UserError, match=r"another model .*family qwen3"),
    ):
        engine.publish(cases.table_weights(cases.LLAMA), 0)
    fake.started_from = "/somewhere/else"
    with cases.engine([fake.url], tmp_path / "w1") as engine, pytest.raises(UserError, match="cannot see as a model"):
        engine.publish(PARAMS, 0)
    for text in ("{", "[]", '{"model_type": "gpt2"}'):
        (tmp_path / "config.json").write_text(text)
        fake.started_from = tmp_path
        with cases.engine([fake.url], tmp_path / "w2") as engine, pytest.raises(UserError, match="no model that is"):
            engine.publish(PARAMS, 0)
    assert "/update_weights_from_disk" not in fake.calls


def test_a_server_with_too_short_a_context_is_refused_before_the_first_prompt(fake, tmp_path):
    with (
        cases.engine([fake.url], tmp_path / "weights", context=fake.context + 1) as engine,
        pytest.raises(UserError, match=f"takes {fake.context} tokens .*{fake.context + 1}; start it with a larger"),
    ):
        engine.publish(PARAMS, 0)


class Page(http.server.BaseHTTPRequestHandler):
    """Answers every GET with what ``server.answer`` says: (status, body)."""

    def do_GET(self):
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b"<html><body><h1>Not here</h1></body></html>"), r"404: Not here \(is this an SGLang server"),
        ((200, b'["hello"]'), r"answers .*hello.*is this an SGLang server"),
        ((200, b'{"workers": ["x"]}'), "is no (router|model)|cannot see as a model"),
    ],
)
@pytest.mark.parametrize("given_as", ["urls", "router"])
def test_something_else_at_the_address_is_one_line(tmp_path, answer, words, given_as):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        other.answer = answer
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        where = {"urls": [url]} if given_as == "urls" else {"urls": (), "router": url}
        with pytest.raises(UserError, match=words), cases.engine(folder=tmp_path / "w", **where) as engine:
            engine.publish(PARAMS, 0)
        other.shutdown()


def test_a_folder_that_cannot_be_made_is_one_line(fake, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        cases.engine([fake.url], tmp_path / "file" / "weights") as engine,
        pytest.raises(UserError, match=r"cannot write weights: .*Not a directory.*rollout.sglang.weights_dir"),
    ):
        engine.publish(PARAMS, 0)


def test_nobody_at_the_address_is_said_within_the_time_given(tmp_path):
    url = f"http://127.0.0.1:{cases.free_port()}"
    expected = pytest.raises(UserError, match=f"no server at {url} within 0.6 s .*cannot connect.*correct its address")
    with cases.engine([url], tmp_path / "weights", start_timeout_s=0.6) as engine, expected:
        engine.publish(PARAMS, 0)
