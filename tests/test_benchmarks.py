"""The benchmark does the work it claims to do, and says so when a contender did not. No test looks at a clock."""

from __future__ import annotations

import collections
import json

import pytest

from benchmarks import gpu, grading, n_scaling, overlap, scaling, simulator, step
from benchmarks.contenders import work as shared
from benchmarks.contenders.work import Work

TINY = dict(vocab=32, layers=1, width=16, heads=2, kv_heads=1, ffn=16, prompt_tokens=6, response_tokens=4)


def result(work: Work, seconds: list[tuple[float, float]], **changes: float) -> dict:
    """What a contender reports: ``(generation, update)`` seconds of each step, everything else as it should be."""
    row = {
        "generated_tokens": work.tokens,
        "trained_tokens": work.tokens,
        "context_tokens": work.samples * work.prompt_tokens,
        "peak_rss_gib": 1.5,
        "others_cores": 0.0,
    } | changes
    steps = [{"generation_s": g, "update_s": u, "step_s": g + u} | row for g, u in seconds]
    return {"steps": steps, "moved": 1e-5, "parameters": 7, "versions": {"python": "3"}}


def test_first_step_is_left_out_and_the_median_of_the_others_counts():
    work = Work(n=8, steps=3)
    got = step.summary(result(work, [(90.0, 90.0), (1.0, 3.0), (2.0, 3.0), (7.0, 1.0)]), work)
    assert (got["generation_s"], got["update_s"], got["step_s"]) == (2.0, 3.0, 5.0)
    assert got["samples_per_s"] == 8 / 5
    assert got["wrong"] == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"generated_tokens": 255}, "generated 255 tokens instead of 256"),
        ({"trained_tokens": 128}, "trained 128 tokens instead of 256"),
        ({"trained_tokens": 257}, "trained 257 tokens instead of 256"),
        ({"context_tokens": 128}, "trained on 128 prompt tokens"),
    ],
)
def test_other_work_is_found(changes, complaint):
    work = Work(n=8, steps=1)
    assert any(complaint in why for why in step.summary(result(work, [(1, 1), (1, 1)], **changes), work)["wrong"])


def test_a_missing_step_and_weights_that_stand_still_are_found():
    work = Work(n=8, steps=2)
    got = step.summary(result(work, [(1, 1), (1, 1)]) | {"moved": 0.0}, work)
    assert got["wrong"] == ["1 timed steps instead of 2", "no weight changed: every gradient was 0"]


def compare(monkeypatch, work: Work, results: dict, *flags: str) -> tuple[dict, str]:
    monkeypatch.setattr(step, "contend", lambda python, module, work, timeout: results[module])
    options, parsed = step.parse([*flags, "--n", str(work.n), "--steps", str(work.steps)])
    return step.compare(options, parsed)


def test_ratios_are_the_peers_seconds_over_ours(monkeypatch):
    work = Work(n=8, steps=1)
    ours, trl = result(work, [(9, 9), (1, 2)]), result(work, [(9, 9), (4, 14)], others_cores=1.25)
    out, table = compare(monkeypatch, work, {"ours": ours, "trl": trl}, "--trl-python", "python")
    assert out["ratios"] == {"TRL": {"step_s": 6.0, "generation_s": 4.0, "update_s": 7.0}}
    assert out["failed"] == []
    assert "| **TRL / brorl_jax** | 4.00x | 7.00x | 6.00x |" in table
    assert "other processes used up to 1.2 cores during a step of TRL" in table
    assert "tunix is missing: --tunix-python was not given." in table


def test_a_contender_that_did_other_work_fails_the_run(monkeypatch):
    work = Work(n=8, steps=1)
    short = result(work, [(1, 1), (1, 1)], generated_tokens=200)
    out, table = compare(
        monkeypatch, work, {"ours": result(work, [(1, 1), (1, 1)]), "tunix": short}, "--tunix-python", "python"
    )
    assert out["failed"] == ["tunix"]
    assert "**tunix did other work:** step 0 generated 200 tokens instead of 256" in table


def test_unequal_models_fail_the_run(monkeypatch):
    work = Work(n=8, steps=1)
    ours = result(work, [(1, 1), (1, 1)])
    out, _ = compare(monkeypatch, work, {"ours": ours, "trl": ours | {"parameters": 8}}, "--trl-python", "python")
    assert out["failed"] == ["models differ in size"]


def test_n_scaling_compares_the_same_number_of_samples():
    asked = []

    def run(work: Work, *args: str) -> dict:
        asked.append((work.prompts, work.n, *args))
        if args:
            memory = {"rss_before_gib": 1.0, "rss_peak_gib": 1.25, "compiled_temp_bytes": 2**21, "batch_bytes": 2**20}
            return memory | {
                "trained_tokens": work.tokens, "micro_batches": 1, "compiled_argument_bytes": 2**20,
            }  # fmt: skip
        return result(work, [(9, 9), (4.0, 2.0) if work.n == 4 else (1.0, 2.0)])

    work = Work(n=16, steps=1)
    out = n_scaling.measure(work, 4, run, step.summary)
    assert asked == [(4, 4), (1, 16), (1, 4, "memory"), (1, 8, "memory"), (1, 16, "memory"), (1, 32, "memory")]
    assert out["ratio"] == {"generation_s": 4.0, "update_s": 1.0, "step_s": 2.0}
    table = n_scaling.table(out, work, "here")
    assert "| 4 x 4 | 4.0 | 8.0 | 2.7 | 1.50 |" in table
    assert "| 8 | 1 | 2.0 | 1.0 | 1.00 | 1024 | 1280 | 256 |" in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n", "1"], "n = 1 must be at least 2"),
        (["--n", "100"], "100 samples a multiple of 64"),
        (["--steps", "0"], "must be positive: steps = 0"),
        (["--n-scaling", "--small-n", "3"], "--small-n 3 must be at least 2 and divide --n 512"),
    ],
)
def test_impossible_work_is_refused_in_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        step.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_all_contenders_see_the_same_prompt_and_the_same_reward():
    work = Work(vocab=16, prompt_tokens=50)
    ids = work.prompt(3, 0)
    assert ids == work.prompt(3, 0) != work.prompt(4, 0)
    assert len(ids) == 50 and min(ids) >= 0 and max(ids) < 14  # 14 and 15 are padding and end
    texts = [shared.words(tokens) for tokens in ([3, 2], [2, 3], [13])] + ["", "<eos> w1"]
    assert shared.text_rewards(texts) == [shared.reward(3), shared.reward(2), shared.reward(13), 0.0, 0.0]
    assert [shared.reward(3), shared.reward(2)] == [1.0, 0.0]


def test_words_are_one_token_each():
    tokenizer = shared.word_tokenizer(16)
    ids = Work(vocab=16).prompt(0, 0)
    assert tokenizer(shared.words(ids))["input_ids"] == ids
    assert tokenizer.decode(ids) == shared.words(ids)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (14, 15)


@pytest.mark.slow
def test_our_contender_does_the_work_and_a_missing_peer_is_named(tmp_path, capsys):
    sizes = [f"--{k.replace('_', '-')}={v}" for k, v in TINY.items()]
    absent = str(tmp_path / "no" / "python")
    flags = ["--n=8", "--micro-rows=4", "--steps=1", f"--trl-python={absent}", f"--out={tmp_path}", *sizes]
    assert step.main(flags) == 1  # asked for TRL, got none
    out = json.loads((tmp_path / "step.json").read_text())
    assert out["skipped"] == {
        "TRL": f"cannot run {absent}: No such file or directory",
        "tunix": "--tunix-python was not given",
    }
    ours = out["contenders"]["brorl_jax"]
    assert ours["wrong"] == []
    counts = ("generated_tokens", "trained_tokens", "context_tokens")
    assert [tuple(s[key] for key in counts) for s in ours["steps"]] == [(32, 32, 48)] * 2
    # AdamW's first step is the learning rate wherever there is a gradient, and two steps are at most twice that.
    assert 1e-5 * 0.9 < ours["moved"] < 2e-5 * 1.1
    assert (tmp_path / "step.md").read_text() in capsys.readouterr().out


@pytest.mark.slow
def test_memory_of_the_update_does_not_depend_on_n(capsys):
    from benchmarks.contenders import ours

    def planned(n: int) -> dict:
        ours.run_memory(Work(n=n, micro_rows=4, **TINY))
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith(shared.MARK))
        return json.loads(line.removeprefix(shared.MARK))

    few, many = planned(8), planned(64)
    assert (few["micro_batches"], many["micro_batches"]) == (2, 16)
    assert (few["trained_tokens"], many["trained_tokens"]) == (8 * 4, 64 * 4)
    # Eight times the rollouts: what grows is the batch itself (and the log-probabilities returned, a part of its size).
    assert many["compiled_temp_bytes"] - few["compiled_temp_bytes"] <= many["batch_bytes"] - few["batch_bytes"]
    assert many["compiled_temp_bytes"] < 1.1 * few["compiled_temp_bytes"]


def test_grading_s_answers_repeat_as_told_or_not_at_all():
    different = grading.work(grading.KINDS, 16, 40, repeats=False)
    assert all(len({s.text for s in g.samples}) == 40 for g in different)
    repeated = grading.work(grading.KINDS, 2, 2_000, repeats=True)  # the hardest and the easiest prompt
    for g, ease in zip(repeated, grading.EASE, strict=True):
        said = collections.Counter(s.text for s in g.samples)
        (right,) = [count for text, count in said.items() if f"boxed{{{g.prompt.gold}}}" in text]
        assert right / 2_000 == pytest.approx(ease, abs=0.04)  # four standard deviations of a binomial
        first, second = (count for text, count in said.most_common(3) if f"boxed{{{g.prompt.gold}}}" not in text)
        assert first / second == pytest.approx(2**grading.TAIL, rel=0.5)
    assert [s.text for g in different for s in g.samples] == [
        s.text for g in grading.work(grading.KINDS, 16, 40, repeats=False) for s in g.samples
    ]


@pytest.mark.slow
def test_grading_does_the_work_beside_the_plain_loop(tmp_path, capsys):
    assert grading.main(["--prompts=16", "--n=8", "--rounds=1", f"--out={tmp_path}"]) == 0
    out = json.loads((tmp_path / "grading.json").read_text())
    for name, row in out["cases"].items():
        assert row["answers"] == row["counters"]["answers"] == 128 and row["unscored"] == 0
        assert row["distinct"] == row["counters"]["graded"] and row["plain"]["cpu_s"] > 0, name
    assert out["cases"]["distinct"]["right"] == 1 / 8
    assert out["cases"]["distinct"]["distinct"] == 128 > out["cases"]["repeats"]["distinct"]
    statuses = {row["what"]: row["status"] for row in out["hostile"]}
    assert {what for what, status in statuses.items() if status == "timeout"} == {"hang", "hang_in_c", "stop"}
    assert (tmp_path / "grading.md").read_text() in capsys.readouterr().out


def test_simulators_are_held_to_one_result(monkeypatch, tmp_path, capsys):
    size = ["--n", "2", "300", "--seeds", "1", "--steps", "10", "--vocab", "96", "--correct", "10"]
    tiny = [*size, "--out", str(tmp_path)]
    monkeypatch.setattr(simulator, "AGREE", 0.05)
    assert simulator.main(tiny) == 0
    table = (tmp_path / "simulator.md").read_text()
    assert table in capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["| N", "| 2", "| 300", "| all", "| all, compiling"]
    monkeypatch.setattr(simulator, "AGREE", 0.0)
    assert simulator.main(tiny) == 1
    assert "Q_pos differs by more than 0.0" in (tmp_path / "simulator.md").read_text()


# --- the update against its sizes, and on a GPU ---


def test_scaling_varies_one_size_at_a_time_and_keeps_the_work():
    base = Work(prompt_tokens=128, response_tokens=128)
    made = scaling.cases(base, samples=1024, ns=(16, 1024), tokens=16_384, ts=(64, 4096), vs=(4096, 151_936))
    assert len({case.name for case in made}) == len(made) == 2 + 4 + 2 + 8
    by_part = {part: [case for case in made if case.part == part] for part in scaling.HEADINGS}
    assert {case.work.samples for case in by_part["N"]} == {1024}
    assert {case.work.tokens for case in by_part["T"]} == {16_384}
    assert {case.work.rows * case.work.response_tokens for case in by_part["T"]} == {4096}
    lengths = [(case.work.prompt_tokens, case.work.response_tokens) for case in by_part["P/R"]][::2]
    assert lengths == [(205, 51), (128, 128), (51, 205), (10, 246)]


def test_scaling_runs_only_what_is_missing_and_compares_repeated_with_shared():
    base = Work(n=8, micro_rows=4, prompt_tokens=8, response_tokens=8)
    made = scaling.cases(base, samples=8, ns=(4,), tokens=64, ts=(16,), vs=(64,))
    asked, kept = [], []

    def run(case):
        asked.append(case.name)
        slow = 3.0 if case.prompts == "repeated" else 1.0
        return {
            "seconds": [90.0, slow, 2 * slow, slow], "others_cores": 0.0, "rss_peak_gib": 1.0,
            "trained_tokens": case.work.tokens - (case.part == "V"), "compiled_temp_bytes": 2**20,
        }  # fmt: skip

    done = scaling.measure(made, run, {}, kept.append)
    assert asked == [case.name for case in made] and len(kept) == len(made)
    assert scaling.measure(made, run, done, kept.append) == done and len(asked) == len(made)
    assert done["N 4"]["ms_per_sample"] == 1000 / 8 and done["N 4"]["tokens_per_s"] == 64
    page = scaling.table(made, done, "here")
    assert "| 1 | 50.0 % | 3.00x | 1.00x |" in page and "| 4 | 81.2 % |" in page
    assert "**V 64 is wrong:** trained 63 tokens instead of 64." in page and "Not a quiet machine" not in page


@pytest.mark.slow
@pytest.mark.parametrize("script", [scaling, gpu], ids=["scaling", "gpu"])
def test_scaling_and_gpu_run_in_tiny(script, tmp_path, capsys):
    assert script.main(["--tiny", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    if script is gpu:
        found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
        assert found["step-blockwise"]["compilations"] == 1
        assert found["step-blockwise"]["trained_tokens"] == gpu.TINY.n * (gpu.TINY.context - gpu.TINY.prompt)
        same = [found[stage]["grad_norm"] for stage in ("step-blockwise", "step-cudnn")]
        assert same[0] == pytest.approx(same[1], rel=0.05)


# --- one-step-off generation ---


def overlapped(**changes: float) -> dict:
    """A timed step of the loop, as its metrics have it, between two stamps 9 s apart."""
    row = {
        "time/rollout_s": 2.0, "time/pack_s": 1.0, "time/score_s": 0.5, "time/update_s": 3.0, "time/publish_s": 0.5,
        "tokens/generated": 64, "batch/tokens": 64,
    }  # fmt: skip
    return overlap.figures(row | changes, overlap.Stamp(100.0, 7.0), overlap.Stamp(109.0, 9.25))


def test_a_step_with_overlap_is_predicted_from_one_without():
    off = overlap.summary([overlapped(**{"time/reward_s": 0.5})] * 3, tokens=64, age=0.0)
    assert (off["collect_s"], off["update_s"], off["rest_s"], off["step_s"]) == (2.5, 4.5, 2.0, 9.0)
    assert off["wrong"] == [] and off["others_cores"] == 0.25
    assert overlap.predicted(off) == 4.5 + 2.0
    assert overlap.predicted(off | {"collect_s": 9.0}) == 9.0 + 2.0
    hidden = {"overlap/collect_s": 5.0, "overlap/hidden_s": 3.0, "overlap/staleness": 1.0}
    on = overlap.summary([overlapped(**hidden)], tokens=64, age=1.0)
    assert (on["collect_s"], on["hidden_s"], on["update_s"], on["rest_s"]) == (5.0, 3.0, 4.5, 2.5)
    assert on["wrong"] == []


def test_steps_with_other_tokens_or_of_other_weights_are_wrong():
    wrong = overlap.summary([overlapped(), overlapped(**{"batch/tokens": 60})], tokens=64, age=0.0)["wrong"]
    assert wrong == ["timed step 1: trained_tokens 60 instead of 64"]
    assert overlap.summary([overlapped()], tokens=64, age=1.0)["wrong"] == ["timed step 0: staleness 0 instead of 1"]


@pytest.mark.slow
def test_overlap_runs_the_loop_against_a_server_that_waits(tmp_path, capsys):
    tiny = ["--ratios=1", "--steps=2", "--prompts=2", "--n=4", "--tokens=6", "--width=64", "--layers=1"]
    assert overlap.main([*tiny, f"--out={tmp_path}"]) == 0
    found = json.loads((tmp_path / "overlap.json").read_text())["cases"]["1"]
    for side in ("off", "on"):
        assert [(s["generated_tokens"], s["staleness"]) for s in found[side]["steps"]] == [(48, side == "on")] * 2
    # Only a server that takes its time, of which there is one in either run, makes a generation so long.
    assert all(s["collect_s"] >= 6 * found["token_s"] for side in ("off", "on") for s in found[side]["steps"])
    assert (tmp_path / "overlap.md").read_text() in capsys.readouterr().out
