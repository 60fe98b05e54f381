"""A small tokenizer and small sources, made on the spot."""

import json

import pytest

from brorl_jax.data.tokenizer import Tokenizer, train_tokenizer

TEXTS = [f"State the final answer to the following arithmetic problem: {i} + {7 * i % 900} =" for i in range(100, 160)]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return train_tokenizer([*TEXTS, "What is the sum of the numbers?"], 400, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return Tokenizer(tokenizer_dir)


@pytest.fixture
def table(tmp_path):
    """``table(name, n, **fields)`` writes n rows "<name> i" -> i and describes them as a source."""

    def make(name, n, **fields):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": f"{name} {i}", "answer": i}) + "\n" for i in range(n)))
        return {"kind": "jsonl", "path": str(path), **fields}

    return make
