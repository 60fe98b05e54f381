"""Text to ids and back: one function tokenises prompts, and nothing re-tokenises what was sampled.

Rules (each has cost somebody a run):

* A prompt is rendered with the model's own chat template and tokenised by :meth:`Tokenizer.encode_prompt`, nowhere
  else; a template that writes the BOS token is not given a second one.
* Generation stops at the union of every stop id that the model's files name, not at the tokenizer's single EOS.
* ``decode`` is for grading and logs. Training uses the sampled ids: ``encode(decode(ids))`` need not be ``ids``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

# Files that make up a tokenizer, in every layout the Hub uses: what is fetched from there.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
TRAINED_CHARACTERS = 5_000  # of a text that a new tokenizer is trained on; time grows with the square of the longest
_PROBES = (
    [{"role": "user", "content": "What is 1 + 2?"}],
    [{"role": "user", "content": "  \\boxed{x}\n\n12,345 = ?\n"}],
)


class Tokenizer:
    """A Hugging Face tokenizer directory with one path for prompts and one for responses.

    Args:
        path: A local directory, or a hub id (fetched into the hub cache; needs ``huggingface_hub`` and a network).
        revision: Hub revision; ignored for a local directory.
        extra_stop_ids: Ids that end a response besides those that the model's files name.

    Attributes:
        directory: The local directory that holds the files.
        stop_ids: Sorted union of the stop ids of ``generation_config.json``, ``config.json``, the tokenizer and the
            caller.
        eos_id: The id that closes a response written by us (supervised warm start).
        pad_id: An id to fill arrays with; never used to build a mask.
        vocab_size: Number of real ids (largest id + 1). A model's embedding may be padded beyond it.

    Raises:
        ValueError: no such tokenizer, no chat template, no stop id, a stop id outside the vocabulary, or a template
            that puts two BOS tokens before a prompt.
    """

    def __init__(self, path: str | os.PathLike[str], *, revision: str = "", extra_stop_ids: Sequence[int] = ()):
        self.directory = _local_directory(path, revision)
        self._tok = _auto_tokenizer(self.directory)
        vocab: dict[str, int] = self._tok.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.stop_ids = self._find_stop_ids(extra_stop_ids)
        tok_eos = self._tok.eos_token_id
        self.eos_id = int(tok_eos) if tok_eos is not None else self.stop_ids[0]
        self.pad_id = int(self._tok.pad_token_id) if self._tok.pad_token_id is not None else self.eos_id
        self._fingerprint = _fingerprint(vocab, self._template())
        for probe in _PROBES:
            self._check_single_path(probe)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[np.ndarray, str]:
        """Renders and tokenises a conversation, ready for the model to answer.

        Args:
            messages: ``[{"role": "user", "content": ...}, ...]``.

        Returns:
            int32 ``[P]`` ids, equal to ``apply_chat_template(messages, tokenize=True, add_generation_prompt=True)``,
            and the text they stand for.
        """
        text = self._render(messages)
        # The template writes the special tokens itself, so the tokenizer must not add its own.
        ids = self._tok.encode(text, add_special_tokens=False)
        bos = self._tok.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise ValueError(f"the chat template in {self.directory} puts more than one BOS token (id {bos}) first")
        if not ids:
            raise ValueError(f"the chat template in {self.directory} renders {list(messages)!r} to no tokens")
        return np.asarray(ids, np.int32), text

    def encode_response(self, text: str) -> np.ndarray:
        """Ids of a response as the model would have to generate it: int32 ``[R]``, no special tokens, no EOS.

        Tokenised by itself, so that no token spans prompt and response, as in generation.
        """
        return np.asarray(self._tok.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens left out; for grading and logs only."""
        return self._tok.decode(np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def fingerprint(self) -> str:
        """Hash of the vocabulary and the chat template; part of the dataset fingerprint and of checkpoints."""
        return self._fingerprint

    def _template(self) -> str:
        template = self._tok.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        if not template:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template. Base models often ship without one: put a "
                "chat_template.jinja next to tokenizer.json (the instruct model of the same family has one)."
            )
        return template

    def _render(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool = False) -> Any:
        conversation = [dict(m) for m in messages]
        try:
            return self._tok.apply_chat_template(
                conversation, tokenize=tokenize, add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, TypeError) as error:  # a mistake in it, or roles that it refuses
            roles = ", ".join(m.get("role", "?") for m in messages)
            raise ValueError(
                f"the chat template in {self.directory} does not take a conversation of {roles} "
                f"({type(error).__name__}: {error})"
            ) from error

    def _check_single_path(self, messages: Sequence[Mapping[str, str]]) -> None:
        ids, _ = self.encode_prompt(messages)
        theirs = list(self._render(messages, tokenize=True))
        if ids.tolist() != theirs:
            raise ValueError(
                f"{self.directory}: rendering then encoding gives {ids.tolist()}, apply_chat_template gives {theirs}; "
                "such a tokenizer would be trained on prompts that it never sees when served"
            )

    def _find_stop_ids(self, extra: Sequence[int]) -> tuple[int, ...]:
        found = {int(i) for i in extra}
        for name in ("generation_config.json", "config.json"):
            file = self.directory / name
            try:
                ids = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
                found.update(int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{file}: no eos_token_id can be read from it ({error})") from error
        if self._tok.eos_token_id is not None:
            found.add(int(self._tok.eos_token_id))
        if not found:
            raise ValueError(f"{self.directory} names no end-of-sequence token: set rollout.stop_ids")
        outside = sorted(i for i in found if not 0 <= i < self.vocab_size)
        if outside:
            raise ValueError(f"stop ids {outside} lie outside the vocabulary of {self.directory} ({self.vocab_size})")
        return tuple(sorted(found))


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str]) -> Path:
    """Trains a small byte-level BPE tokenizer for a model that starts from random weights.

    Digits are single tokens (so that arithmetic is learnable); merges cross word borders, so that the fixed phrases of
    a templated task become one token each and prompts are short. Ids 0, 1, 2 are ``<|endoftext|>`` (padding),
    ``<|im_start|>`` and ``<|im_end|>`` (EOS). The chat template is ChatML without role
    names for user and assistant, who alternate anyway: a prompt costs three tokens more than its question. The result
    is a function of ``texts`` and ``vocab_size`` alone.

    Args:
        texts: What the model will read and write. The first ``TRAINED_CHARACTERS`` of each are looked at.
        vocab_size: Upper bound on the number of ids; at least 259 (bytes and special tokens). Few texts fill fewer.
        out_dir: Written; loadable by ``transformers.AutoTokenizer`` and :class:`Tokenizer`.

    Returns:
        ``out_dir``.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(special) + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and special tokens alone take {smallest}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((text[:TRAINED_CHARACTERS] for text in texts), trainer)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _MINIMAL_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "pad_token_id": 0}) + "\n")
    return out


_MINIMAL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message['role'] == 'system' %}system\n{% endif %}"
    "{{ message['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def _local_directory(path: str | os.PathLike[str], revision: str) -> Path:
    local = Path(path)
    if local.is_dir():
        return local
    if not str(path) or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:
        raise ValueError(f"no tokenizer directory at {str(path)!r}")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            str(path), revision=revision or None, allow_patterns=[*_TOKENIZER_FILES, "config.json", "*.model"]
        )
    except (OSError, ValueError) as error:  # offline, unknown repository, gated: hub errors derive from these
        raise ValueError(
            f"{str(path)!r} is neither a local directory nor a model that the Hugging Face hub would give us "
            f"({type(error).__name__}: {error}). Download the model and set model.path to its directory."
        ) from error
    return Path(found)


def _auto_tokenizer(directory: Path) -> Any:
    # We only tokenise: without this transformers prints that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: a file with no object in it
        raise ValueError(
            f"no tokenizer in {directory} ({error}). It needs tokenizer.json and tokenizer_config.json."
        ) from error


def _fingerprint(vocab: Mapping[str, int], template: str) -> str:
    content = json.dumps([sorted(vocab.items()), template], ensure_ascii=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]
