"""Sources: what the rows become."""

import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from brorl_jax import rewards
from brorl_jax.data import sources
from brorl_jax.data.stream import PromptStream, exclusions
from brorl_jax.rewards.math.number import parse_number
from brorl_jax.types import Prompt

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared data files are not beside the repository")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def records(source):
    return [source[i] for i in range(len(source))]


def test_json_lines_list_and_gzip_agree(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]
    plain = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    loaded = [
        sources.load("s", {"kind": "jsonl", "path": str(tmp_path / f)}) for f in ("a.jsonl", "a.json", "a.jsonl.gz")
    ]
    assert [r.gold for r in records(loaded[0])] == ["0", "1", "2"]
    assert records(loaded[0]) == records(loaded[1]) == records(loaded[2])
    assert len({s.content_hash() for s in loaded}) == 1


def test_line_separator_inside_a_string_does_not_end_a_row(tmp_path):
    path = tmp_path / "u.jsonl"
    path.write_text(json.dumps({"question": "a\u2028b", "answer": 1}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert records(sources.load("s", {"kind": "jsonl", "path": str(path)}))[0].question == "a\u2028b"


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("", 27.0, "27"),
        ("", 2.5, "2.5"),
        ("", 0, "0"),
        ("", " x ", "x"),
        ("after:####", "so #### 1\n#### 1,080 ", "1,080"),
        (r"regex:= (\d+)", "= 1 then = 22.", "22"),
    ],
)
def test_gold_extraction(tmp_path, gold, answer, expected):
    path = write(tmp_path / "g.jsonl", [{"question": "q", "answer": answer}])
    assert records(sources.load("s", {"kind": "jsonl", "path": path, "gold": gold}))[0].gold == expected


def test_rows_without_gold_are_left_out_and_counted_and_keys_stay(tmp_path):
    rows = [{"q": "a", "a": None}, {"q": "b", "a": "2"}, {"q": "c", "a": ""}, {"q": "d", "a": 0}]
    path = write(tmp_path / "n.jsonl", rows)
    source = sources.load("s", {"kind": "jsonl", "path": path, "question": "q", "answer": "a", "tolerance": 0.5})
    assert [(r.key, r.question, r.gold) for r in records(source)] == [("1", "b", "2"), ("3", "d", "0")]
    assert source.dropped == {"no_gold": 2}
    assert source[0].meta == {"tolerance": 0.5}


def test_start_and_size_cut_a_file(table):
    source = sources.load("s", table("t", 10, start=7, size=2))
    assert [r.key for r in records(source)] == ["7", "8"]


def test_descriptions_are_checked_before_anything_is_read(table):
    good = table("t", 3)
    for change, message in [
        ({"kind": "json"}, "unknown kind 'json'; known: huggingface, instructions, jsonl, prepared, reasoning_gym"),
        ({"anwser": "x"}, "no field 'anwser'; did you mean 'answer'"),
        ({"weight": 0.0}, "weight must be positive"),
        ({"prompt": "no place"}, "must contain {question} exactly once"),
        ({"verifier": "numerik"}, "unknown verifier 'numerik'"),
        ({"preset": "gsm9k"}, "unknown preset 'gsm9k'"),
        ({"gold": "####"}, "gold must be empty"),
        ({"gold": "regex:abc"}, "needs a group"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            sources.check("t", {**good, **change})
    with pytest.raises(ValueError, match="needs path"):
        sources.check("t", {"kind": "jsonl"})


def test_missing_and_malformed_files(tmp_path, table):
    with pytest.raises(ValueError, match="no file"):
        sources.load("s", {"kind": "jsonl", "path": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ValueError, match=r"row 0 has no field 'text'; it has 'question', 'answer'"):
        sources.load("s", table("t", 2, question="text"))
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": 1}\n{"question": \n')
    with pytest.raises(ValueError, match="line 2"):
        sources.load("s", {"kind": "jsonl", "path": str(tmp_path / "bad.jsonl")})
    with pytest.raises(ValueError, match="no usable rows"):
        sources.load("s", table("t", 2, start=5))


def test_reasoning_gym_items_are_right_and_rebuildable():
    pytest.importorskip("reasoning_gym")
    config = {"kind": "reasoning_gym", "task": "chain_sum", "params": SUMS, "seed": 5, "size": 10**9}
    source = sources.load("s", config)
    for index in (0, 1, 10**9 - 1):
        record = source[index]
        a, sign, b = re.search(r"(\d+) ([+-]) (\d+) =", record.question).groups()
        assert int(record.gold) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        meta = json.loads(json.dumps(record.meta))
        assert rewards.reasoning_gym.entry(meta)["question"] == record.question
        assert record.key == str(index)
    assert source.content_hash() == sources.load("s", config).content_hash()
    assert source.content_hash() != sources.load("s", {**config, "seed": 6}).content_hash()


def test_config_dict_is_a_description():
    pytest.importorskip("reasoning_gym")
    config = pytest.importorskip("ml_collections").ConfigDict(
        {"kind": "reasoning_gym", "task": "chain_sum", "params": SUMS, "size": 10, "seed": 0}
    )
    assert json.dumps(sources.load("s", config)[3].meta)


def test_a_task_without_a_fair_scorer_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"data source 'x'.*propositional_logic.*scores 1"):
        sources.check("x", {"kind": "reasoning_gym", "task": "propositional_logic"})


PREPARED = [
    {
        "id": "a-0",
        "prompt": "2+2? Box it.",
        "gold": "4",
        "verifier": "numeric:boxed",
        "source": "a",
        "meta": {"question": "2+2?"},
    },
    {
        "id": "b-7",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Say x."},
        ],
        "gold": "x",
        "verifier": "exact:tag",
        "source": "b",
        "meta": {"k": [1]},
    },
]


def test_prepared_rows_bring_everything_with_them(tmp_path, tokenizer):
    source = {"p": {"kind": "prepared", "path": write(tmp_path / "p.jsonl", PREPARED)}}
    stream = PromptStream(source, tokenizer, seed=0, max_prompt_tokens=400, system_prompt="Ours.")
    first, second = sorted(stream.take(2), key=lambda p: p.id)
    assert (first.id, first.gold, first.verifier, first.meta) == ("p/a-0", "4", "numeric:boxed", {"question": "2+2?"})
    assert (second.id, second.gold, second.verifier) == ("p/b-7", "x", "exact:tag")
    assert second.meta == {"question": "Say x.", "k": [1]}
    said = [{"role": "system", "content": "Ours."}, {"role": "user", "content": "2+2? Box it."}]
    assert first.tokens.tolist() == tokenizer.encode_prompt(said)[0].tolist()
    assert second.tokens.tolist() == tokenizer.encode_prompt(PREPARED[1]["messages"])[0].tolist()
    held = exclusions([first])  # by the bare question, whatever instruction stands around it
    left = PromptStream(source, tokenizer, seed=0, max_prompt_tokens=400, exclude=held)
    assert {p.id for p in left.take(3)} == {"p/b-7"}
    forced = {"p": {**source["p"], "verifier": "exact:whole", "start": 1}}
    assert PromptStream(forced, tokenizer, seed=0, max_prompt_tokens=400).take(1)[0].verifier == "exact:whole"


def test_any_change_of_a_prepared_row_changes_the_fingerprint(tmp_path):
    def content(**change):
        path = write(tmp_path / "p.jsonl", [{**PREPARED[0], **change}])
        return sources.load("p", {"kind": "prepared", "path": path}).content_hash()

    changes = [{}, {"id": "a-1"}, {"prompt": "2+3?"}, {"gold": "5"}, {"verifier": "exact:boxed"}, {"meta": {}}]
    assert len({content(**change) for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "look at extra"),
        ({"gold": 4}, "gold must be str, got 4"),
        ({"id": ""}, "id and verifier must not be empty"),
        ({"id": "a-1"}, "row 2: the id 'a-1' comes twice"),
        ({"prompt": " "}, "user's and not empty"),
        ({"verifier": "nmeric"}, "unknown verifier 'nmeric'"),
        ({"meta": {"question": 5}}, "row 2: meta['question'] must be a text, got 5"),
    ],
)
def test_rows_that_break_the_schema_are_named(tmp_path, change, message):
    path = write(tmp_path / "p.jsonl", [{**PREPARED[0], "id": "a-1"}, {**PREPARED[0], **change}])
    with pytest.raises(ValueError, match=re.escape(message)):
        sources.load("p", {"kind": "prepared", "path": path})


def test_a_prepared_directory_must_be_the_one_its_manifest_describes(tmp_path):
    config = {"kind": "prepared", "path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        sources.load("p", config)
    data = write(tmp_path / "data.jsonl", PREPARED)
    digest = hashlib.sha256(Path(data).read_bytes()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps({"sha256": digest}))
    assert len(sources.load("p", config)) == 2
    write(tmp_path / "data.jsonl", PREPARED[:1])
    with pytest.raises(ValueError, match="not the file that its manifest describes"):
        sources.load("p", config)
    assert len(sources.load("p", {**config, "path": data})) == 1


def test_huggingface_rows(monkeypatch):
    seen = {}

    def load_dataset(path, name, split, revision):
        seen.update(path=path, name=name, split=split, revision=revision)
        if path == "absent":
            raise ConnectionError("offline")
        return [{"problem": "1+1", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    config = {"kind": "huggingface", "path": "org/set", "question": "problem", "split": "test"}
    assert [(r.question, r.gold) for r in records(sources.load("s", config))] == [("1+1", "2")]
    assert seen == {"path": "org/set", "name": None, "split": "test", "revision": None}
    with pytest.raises(ValueError, match=r"can't load 'absent'.*offline.*kind 'jsonl'"):
        sources.load("s", {**config, "path": "absent"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        sources.load("s", config)


def test_config_repeats_the_fields_of_every_kind():
    """brorl_jax.config can't import this room (it would cost seconds), so the two lists must be kept equal."""
    from brorl_jax import config

    assert sorted(config.SOURCE_KINDS) == sources.kinds()
    for kind, fields in config.SOURCE_KINDS.items():
        named = {"category": "logic"} if "category" in fields else {}
        sources.check(
            kind, {**config.SOURCE_FIELDS, **fields, **named, "kind": kind}
        )  # an extra field would be refused
        _, own = sources._own_fields(kind, {**fields, "kind": kind})
        assert {f for f in sources.KINDS[kind].__dataclass_fields__ if not f.startswith("_")} >= set(own)


@needs_shared
@pytest.mark.parametrize("file", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_gsm8k_golds(file):
    """Every row has a gold; it is the integer after the last mark, and its own rendering scores 1."""
    source = sources.load("gsm8k", {"kind": "jsonl", "preset": "gsm8k", "path": str(SHARED / file)})
    rows = [json.loads(line) for line in (SHARED / file).read_text().splitlines()]
    assert len(source) == len(rows) == {"gsm8k_train.jsonl": 7473, "gsm8k_test.jsonl": 1319}[file]
    for row, record in zip(rows, records(source), strict=True):
        assert parse_number(record.gold) == int(row["answer"].split("#### ")[-1].replace(",", ""))
    assert self_test(source, "numeric:boxed") == self_test(source, "numeric:hash") == len(rows)


@needs_shared
@pytest.mark.parametrize(
    ("preset", "file", "verifier", "rows", "dropped"),
    [
        ("svamp", "svamp_test.jsonl", "numeric:boxed", 1000, 0),
        ("math500", "math500.jsonl", "exact:boxed", 500, 0),
        ("math_train", "math_train.json", "exact:boxed", 7470, 4),
        ("deepmath", "deepmath_4994.jsonl", "exact:boxed", 4994, 0),
        ("aime", "aime24.jsonl", "numeric:boxed", 30, 0),
        ("aime", "aime25.jsonl", "numeric:boxed", 30, 0),
        ("amc23", "amc23.jsonl", "numeric:boxed", 40, 0),
    ],
)
def test_presets(preset, file, verifier, rows, dropped):
    source = sources.load(preset, {"kind": "jsonl", "preset": preset, "path": str(SHARED / file)})
    assert (len(source), source.dropped.get("no_gold", 0)) == (rows, dropped)
    assert self_test(source, verifier) == rows


@needs_shared
def test_svamp_question_is_one_text():
    source = sources.load("svamp", {"kind": "jsonl", "preset": "svamp", "path": str(SHARED / "svamp_test.jsonl")})
    assert source[0].question.endswith("are organized into 93 groups. How big is each group of bananas?")
    rows = [json.loads(line) for line in (SHARED / "svamp_test.jsonl").read_text().splitlines()]
    assert sum(row["Body"].strip().endswith(".") for row in rows) == 642  # so the template's full stop is optional
    for row, record in zip(rows, records(source), strict=True):
        body, question = row["Body"].strip(), row["Question"].strip()
        assert record.question in (f"{body} {question}", f"{body}. {question}")
        assert (record.question == f"{body} {question}") == body.endswith((".", "?", "!"))


def self_test(source, verifier):
    return rewards.self_test(
        Prompt(r.key, np.zeros(1, np.int32), "", r.gold, verifier, "s", r.meta) for r in records(source)
    )
