"""Prompts are tokenised once, by one function, and what was sampled stays as it was sampled."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from brorl_jax.config import NEW_FAMILIES
from brorl_jax.data.tokenizer import TRAINED_CHARACTERS, Tokenizer, train_tokenizer
from brorl_jax.models import hf

CONVERSATIONS = [
    [{"role": "user", "content": "123 + 456 ="}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " é 日 \\boxed{1}\n\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": ""},
    ],
]
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def variant(tokenizer_dir, out, *, post_processor=False, files=None, **config):
    """A copy of the tokenizer with another tokenizer_config; None deletes a key."""
    out.mkdir()
    spec = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    if post_processor:  # writes <|endoftext|> (id 0) before every text, as Llama's does with its BOS
        bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }
    (out / "tokenizer.json").write_text(json.dumps(spec))
    settings = {**json.loads((tokenizer_dir / "tokenizer_config.json").read_text()), **config}
    (out / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    for name, content in (files or {}).items():
        (out / name).write_text(json.dumps(content))
    return out


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompt_equals_the_chat_template_of_transformers(tokenizer, tokenizer_dir, messages):
    theirs = AutoTokenizer.from_pretrained(str(tokenizer_dir))
    ids, text = tokenizer.encode_prompt(messages)
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids.dtype == np.int32 and ids.tolist() == expected
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(("template", "count"), [(BOS_TEMPLATE, 1), (BOS_TEMPLATE.replace("{{ bos_token }}", ""), 0)])
def test_bos_comes_from_the_template_alone(tokenizer_dir, tmp_path, template, count):
    """P27: with a tokenizer that adds BOS to every text, a prompt has as many as its template writes."""
    bos = {"bos_token": "<|endoftext|>", "chat_template": template}
    directory = variant(tokenizer_dir, tmp_path / "bos", post_processor=True, **bos)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    assert theirs.encode("1")[0] == 0  # it does add BOS when asked naively
    tok = Tokenizer(directory)
    ids, _ = tok.encode_prompt(CONVERSATIONS[0])
    assert (ids == 0).sum() == count
    assert ids.tolist() == theirs.apply_chat_template(
        CONVERSATIONS[0], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert 0 not in tok.encode_response("1")


def test_template_with_two_bos_is_refused(tokenizer_dir, tmp_path):
    double = {"bos_token": "<|endoftext|>", "chat_template": "{{ bos_token }}" + BOS_TEMPLATE}
    with pytest.raises(ValueError, match="more than one BOS"):
        Tokenizer(variant(tokenizer_dir, tmp_path / "double", **double))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        (BOS_TEMPLATE + "{% if messages[0].role != 'user' %}{{ raise_exception('no system role') }}{% endif %}", ""),
    ],
)
def test_a_template_that_fails_is_named_with_the_roles_it_was_given(tokenizer_dir, tmp_path, template, message):
    directory = variant(tokenizer_dir, tmp_path / "broken", chat_template=template)
    if message:
        with pytest.raises(ValueError, match=rf"template in .*broken does not take a conversation of user \({message}"):
            Tokenizer(directory)
    else:  # good for questions alone
        with pytest.raises(ValueError, match=r"of system, user \(TemplateError: no system role"):
            Tokenizer(directory).encode_prompt(CONVERSATIONS[1])


def test_missing_template_and_missing_directory(tokenizer_dir, tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer(variant(tokenizer_dir, tmp_path / "bare", chat_template=None))
    with pytest.raises(ValueError, match="no tokenizer directory"):
        Tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer in"):
        Tokenizer(tmp_path / "empty")


def test_stop_ids_are_the_union(tokenizer_dir, tmp_path):
    """P26: generation_config (a list), config, the tokenizer's own and the user's."""
    files = {"generation_config.json": {"eos_token_id": [10, 11]}, "config.json": {"eos_token_id": 12}}
    tok = Tokenizer(variant(tokenizer_dir, tmp_path / "stops", files=files), extra_stop_ids=(13, 10))
    assert tok.stop_ids == (2, 10, 11, 12, 13)
    assert tok.eos_id == 2
    with pytest.raises(ValueError, match=r"stop ids \[99999\] lie outside"):
        Tokenizer(tokenizer_dir, extra_stop_ids=(99999,))


def test_no_stop_id_at_all_is_refused(tokenizer_dir, tmp_path):
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        Tokenizer(variant(tokenizer_dir, tmp_path / "endless", eos_token=None))


def test_decode_then_encode_is_not_the_identity(tokenizer):
    """P28: so sampled ids must be kept; responses spelled letter by letter read the same and are other ids."""
    spelled = np.concatenate([tokenizer.encode_response(letter) for letter in "State"])
    assert tokenizer.decode(spelled) == "State"
    assert tokenizer.encode_response("State").tolist() != spelled.tolist()


def test_response_is_tokenised_apart_from_the_prompt(tokenizer):
    prompt, text = tokenizer.encode_prompt(CONVERSATIONS[0])
    response = tokenizer.encode_response("579")
    assert tokenizer.decode(response) == "579"
    whole = tokenizer._tok.decode([*prompt.tolist(), *response.tolist(), tokenizer.eos_id])
    assert whole == text + "579<|im_end|>"


def test_trained_tokenizer(tokenizer):
    ids, _ = tokenizer.encode_prompt([{"role": "user", "content": "123 + 456 ="}])
    assert ids.tolist() == [1, *tokenizer.encode_response("123 + 456 =").tolist(), 2, 1]
    assert len(tokenizer.encode_response("90210")) == 5
    phrase = "State the final answer to the following arithmetic problem: 123"
    assert len(tokenizer.encode_response(phrase)) < 10  # merges cross word borders: not a token a word
    assert 259 < tokenizer.vocab_size <= 400 and tokenizer.stop_ids == (2,)
    for text in ("é日本🙂", "\t a\n\n", "\\frac{1}{2}"):
        assert tokenizer.decode(tokenizer.encode_response(text)) == text
    with pytest.raises(ValueError, match="too small"):
        train_tokenizer(["a"], 258, "unused")


def test_a_tokenizer_is_trained_on_the_beginning_of_a_long_text(tmp_path):
    beginning = "one two three " * 400
    made = [
        train_tokenizer([beginning[:TRAINED_CHARACTERS] + rest, "four"], 300, tmp_path / name)
        for name, rest in (("short", ""), ("long", "five" * 1_000_000))
    ]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in made}) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [{}]}'])
def test_a_file_without_readable_stop_ids_is_named(tokenizer_dir, tmp_path, text):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config.json: no eos_token_id can be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_without_an_object_is_no_tokenizer(tokenizer_dir, tmp_path, name):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("[]")
    with pytest.raises(ValueError, match="no tokenizer in"):
        Tokenizer(tmp_path)


def test_training_is_deterministic_across_processes(tokenizer_dir, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from conftest import TEXTS;"
        "from brorl_jax.data.tokenizer import train_tokenizer;"
        "train_tokenizer([*TEXTS, 'What is the sum of the numbers?'], 400, sys.argv[1])"
    )
    for hash_seed in ("1", "2"):
        out = tmp_path / hash_seed
        command = [sys.executable, "-c", code, str(out), os.path.dirname(__file__)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
        assert (out / "tokenizer.json").read_bytes() == (tokenizer_dir / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_carried_files_load_beside_a_model_config(tokenizer, tmp_path, family):
    """transformers chooses a tokenizer class by model type: the exported directory must tokenise the same.

    Beside a Qwen2 model it would not (its class brings its own pre-tokenizer), so no new model is of that family.
    """
    carried = [file for file in tokenizer.directory.iterdir() if file.name in hf.CARRIED]
    for file in carried:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "eos_token_id": 2}))
    exported = Tokenizer(tmp_path)
    assert exported.fingerprint() == tokenizer.fingerprint()
    assert exported.encode_prompt(CONVERSATIONS[1])[0].tolist() == tokenizer.encode_prompt(CONVERSATIONS[1])[0].tolist()
    assert {file.name for file in carried} == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_fingerprint_follows_vocabulary_and_template(tokenizer, tokenizer_dir, tmp_path):
    assert Tokenizer(tokenizer_dir).fingerprint() == tokenizer.fingerprint()
    template = BOS_TEMPLATE.replace("{{ bos_token }}", "")
    other = Tokenizer(variant(tokenizer_dir, tmp_path / "template", chat_template=template))
    assert other.fingerprint() != tokenizer.fingerprint()
    assert Tokenizer(train_tokenizer(["abc"], 300, tmp_path / "v")).fingerprint() != tokenizer.fingerprint()
