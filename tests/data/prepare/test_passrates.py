"""Pass rates from what a run leaves on disk, worked by hand."""

import gzip
import json
import re

import pytest

from brorl_jax.data.prepare import passrates


def evaluation(path, rewards):
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = [{"prompt_id": prompt, "rewards": values} for prompt, values in rewards.items()]
    path.write_text(json.dumps({"step": 5, "prompts": prompts}))
    return path


def rollouts(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"prompt_id": prompt, "reward": reward}) + "\n" for prompt, reward in rows)
    return path


def test_mean_over_the_scored_samples_of_all_files(tmp_path):
    first = evaluation(tmp_path / "eval/step_000000.json", {"m/gsm8k-1": [1.0, 0.0, None, 0.0], "m/gsm8k-2": [None]})
    second = rollouts(tmp_path / "rollouts/step_000001.jsonl.gz", [("m/gsm8k-1", 1.0), ("m/gsm8k-3", 0.25)])
    rollouts(tmp_path / "rollouts/superseded/step_000001.0.jsonl.gz", [("m/gsm8k-1", 0.0)])
    assert passrates.read([first]) == {"gsm8k-1": pytest.approx(1 / 3)}
    both = {"gsm8k-1": 0.5, "gsm8k-3": 0.25}
    assert passrates.read([first, second]) == passrates.read([tmp_path]) == both


def test_an_evaluation_by_itself_counts_what_it_has_finished(tmp_path):
    lines = [json.dumps({"prompt_id": f"m/{i}", "rewards": [i, 0.0]}) + "\n" for i in (0, 1)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines) + lines[0][:9])  # killed in mid-line
    assert passrates.read([tmp_path]) == passrates.read([tmp_path / "prompts.jsonl"]) == {"0": 0.0, "1": 0.5}


def test_ids_with_slashes_keep_them(tmp_path):
    assert passrates.read([evaluation(tmp_path / "step_1.json", {"mix/HumanEval/3": [1.0]})]) == {"HumanEval/3": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        ("{", "neither an evaluation nor a rollout file"),
        ("[]", "neither an evaluation nor a rollout file"),
        ('{"prompts": [{"prompt_id": "a/b"}]}', "KeyError"),
        ('{"prompts": [{"prompt_id": "a/b", "rewards": [null]}]}', "no sample with a reward"),
    ],
)
def test_files_without_pass_rates_are_named(tmp_path, content, message):
    path = tmp_path / "step_1.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        passrates.read([path])


def test_an_empty_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="neither evaluations nor rollouts"):
        passrates.read([tmp_path])


@pytest.mark.parametrize("text", ["0.5", "a:b", "0.9:0.1", "-0.1:1", "0:1.1", ":"])
def test_bounds_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"--keep {text}")):
        passrates.interval(text)


def test_both_bounds_are_kept():
    rates = {"a": 0.1, "b": 0.9, "c": 0.05, "d": 0.95}
    keep = passrates.interval("0.1:0.9")
    verdicts = [passrates.verdict(rates, {"id": name}, keep, "keep") for name in "abcde"]
    assert verdicts == ["", "", "too_hard", "too_easy", ""]
    assert passrates.verdict(rates, {"id": "e"}, keep, "drop") == "unmeasured"
