"""The work every contender does and how it reports it. Standard library only: it runs in each contender's Python."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARK = "RESULT "  # the line of standard output that carries the result


@dataclasses.dataclass(frozen=True)
class Work:
    """What is generated and trained in a step, and by which model.

    Attributes:
        n: Rollouts per prompt.
        prompts: Prompts per step.
        prompt_tokens: Tokens of a prompt, exactly.
        response_tokens: Tokens of a rollout, exactly: nothing stops earlier.
        steps: Timed steps; one more, in which programs are compiled, comes first.
        micro_rows: Most rollouts in a micro-batch, where the contender can split a group.
        vocab, layers, width, heads, kv_heads, ffn: Qwen2, float32, embedding and head tied.
        learning_rate: Of AdamW, constant.
        clip_norm: Largest gradient norm.
    """

    n: int = 512
    prompts: int = 1
    prompt_tokens: int = 128
    response_tokens: int = 32
    steps: int = 3
    micro_rows: int = 64
    vocab: int = 4096
    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 704
    learning_rate: float = 1e-5
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if small := [f"{k} = {v}" for k, v in dataclasses.asdict(self).items() if v <= 0]:
            raise ValueError(f"must be positive: {', '.join(small)}")
        if self.n < 2 or self.samples % self.rows:
            raise ValueError(f"n = {self.n} must be at least 2, and {self.samples} samples a multiple of {self.rows}")

    @property
    def samples(self) -> int:
        return self.n * self.prompts

    @property
    def tokens(self) -> int:
        """Response tokens of a step."""
        return self.samples * self.response_tokens

    @property
    def rows(self) -> int:
        """Rollouts in a micro-batch."""
        return min(self.micro_rows, self.samples)

    def prompt(self, step: int, index: int) -> list[int]:
        """Ids of a prompt, the same for every contender; the last two ids of the vocabulary are padding and end."""
        rng = random.Random(f"{step}/{index}")
        return [rng.randrange(self.vocab - 2) for _ in range(self.prompt_tokens)]


def from_argv() -> Work:
    """The work described by the first argument, a JSON object."""
    return Work(**json.loads(sys.argv[1]))


def reward(first_token: int) -> float:
    """1 for an odd first token, so that about half of a group is right."""
    return float(first_token % 2)


def text_rewards(texts: Sequence[str]) -> list[float]:
    """The same, for those who see words only; 0 where the first token was a special one and is not shown."""
    firsts = [text.split()[:1] for text in texts]
    return [reward(int(first[0][1:])) if first and first[0].startswith("w") else 0.0 for first in firsts]


def word_tokenizer(vocab: int) -> Any:
    """A Hugging Face tokenizer whose token ``i`` is the word ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab - 2)} | {"<pad>": vocab - 2, "<eos>": vocab - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def words(ids: Sequence[int]) -> str:
    """The text that ``word_tokenizer`` turns into ``ids``."""
    return " ".join(f"w{i}" for i in ids)


class Meter:
    """Seconds and tokens of every step. What is not generation is update: rewards, advantages and packing included."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def begin(self) -> None:
        self._row = dict.fromkeys(("generation_s", "generated_tokens", "trained_tokens", "context_tokens"), 0)
        self._others = others_seconds()
        self._start = time.perf_counter()

    def generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its seconds counted as generation."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._row["generation_s"] += time.perf_counter() - start
            return result

        return timed

    def generated(self, tokens: int) -> None:
        self._row["generated_tokens"] += int(tokens)

    def trained(self, tokens: int, context: int) -> None:
        """Counts response tokens in the loss, and the prompt tokens they were conditioned on."""
        self._row["trained_tokens"] += int(tokens)
        self._row["context_tokens"] += int(context)

    def end(self) -> None:
        seconds = time.perf_counter() - self._start
        row = {"step_s": seconds, "update_s": seconds - self._row["generation_s"], **self._row}
        others = (others_seconds() - self._others) / seconds
        self.steps.append(row | {"peak_rss_gib": memory("VmHWM"), "others_cores": max(0.0, others)})
        print(f"step {len(self.steps) - 1}: {json.dumps(self.steps[-1])}", file=sys.stderr, flush=True)


def others_seconds() -> float:
    """Processor seconds since boot that went to other processes (and, on a virtual machine, to other machines)."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, own = ticks[3] + ticks[4], os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def memory(field: str) -> float:
    """Resident memory of this process in GiB: now (``VmRSS``), or the most so far (``VmHWM``). Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 2**20


def reset_peak() -> None:
    """Forgets the peak: ``VmHWM`` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def report(contender: str, packages: Sequence[str], **result: Any) -> None:
    """Prints the result for whoever started this process, with the versions of ``packages``."""
    versions = {p: importlib.metadata.version(p) for p in packages} | {"python": platform.python_version()}
    print(MARK + json.dumps({"contender": contender, "versions": versions, **result}), flush=True)
