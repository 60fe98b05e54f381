"""Prompts for training, evaluation and warm start: pure functions of (configuration, seed, position).

Every source is a Grain data set, shuffled anew each epoch and repeated; :mod:`brorl_jax.data.mixture` says which one is
next. A position in a source is an index, so a resume needs two numbers per source: prompts taken, and that index.
Prompts that are too long or held out for evaluation are holes:

* tables are filtered when they are loaded, so their epochs have no holes;
* procedural sources, which may have 10^9 items, are filtered on access. The same positions are holes in every run, and
  :meth:`PromptStream.take` passes over them; they don't count as the source's turn.

Either way each remaining prompt comes exactly once per epoch of its source, however often a run is killed, and every
source is within one prompt of its share.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from brorl_jax import rewards
from brorl_jax.data import sources as sources_lib
from brorl_jax.data.mixture import Turns
from brorl_jax.data.sources import Record, Source
from brorl_jax.data.tokenizer import Tokenizer
from brorl_jax.errors import UserError
from brorl_jax.types import Prompt

_ORDER = "grain-2"  # the order of prompts for a seed; change it when the pipeline changes
_MAX_HOLES = 20_000  # in a row, for whatever reasons
_MAX_TOO_LONG = 1_000  # of them; a source of which one prompt in a hundred fits has so many with probability 4e-5
_NO_EXCLUSIONS: frozenset[str] = frozenset()


def question_hash(question: str) -> str:
    """Identity of a question regardless of white space, for keeping held-out questions out of training."""
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:24]


def exclusions(prompts: Iterable[Prompt]) -> frozenset[str]:
    """The question hashes of ``prompts``, to be kept out of training."""
    return frozenset(question_hash(p.meta["question"]) for p in prompts)


class _Maker:
    """Turns records of one source into prompts, or says why not."""

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        system_prompt: str,
        exclude: frozenset[str],
    ):
        self.name = name
        self.source: Source = sources_lib.load(name, config)
        self.dropped: dict[str, int] = {"too_long": 0, "held_out": 0, **self.source.dropped}
        self._shortest = 0  # tokens, of those too long
        self.config: Mapping[str, Any] = config
        self._template: str = config.get("prompt", "{question}")
        self._tokenizer, self._max, self._system, self._exclude = tokenizer, max_prompt_tokens, system_prompt, exclude

    def make(self, record: Record) -> Prompt | None:
        """The prompt, or None (counted in ``dropped``) if it is held out or longer than the limit."""
        if self._exclude and question_hash(record.bare) in self._exclude:
            self.dropped["held_out"] += 1
            return None
        own_system = any(message["role"] == "system" for message in record.history)
        system = [{"role": "system", "content": self._system}] if self._system and not own_system else []
        user = {"role": "user", "content": self._template.replace("{question}", record.question)}
        tokens, text = self._tokenizer.encode_prompt([*system, *record.history, user])
        if len(tokens) > self._max:
            self.dropped["too_long"] += 1
            self._shortest = min(len(tokens), self._shortest or len(tokens))
            return None
        return Prompt(
            id=f"{self.name}/{record.key}",
            tokens=tokens,
            text=text,
            gold=record.gold,
            verifier=sources_lib.verifier_name(self.config, record),
            source=self.name,
            meta={"question": record.bare, **record.meta},
        )

    def check_lengths(self, since: int = 0) -> None:
        """Raises ``UserError`` if too many prompts were too long since there were ``since``, none having fitted."""
        if self.dropped["too_long"] - since >= _MAX_TOO_LONG:
            raise UserError(
                f"no prompt of data source {self.name!r} fits data.max_prompt_tokens = {self._max}: of {_MAX_TOO_LONG} "
                f"tried, the shortest has {self._shortest} tokens; raise it, or choose an easier task"
            )

    def describe(self) -> dict[str, str]:
        """What the order and content of this source's prompts depend on."""
        return {
            f"source {self.name}: weight": str(float(self.config.get("weight", 1.0))),
            f"source {self.name}: prompt": self._template,
            f"source {self.name}: verifier": sources_lib.verifier_name(self.config, self.source[0]),
            f"source {self.name}: size": str(len(self.source)),
            f"source {self.name}: content": self.source.content_hash(),
        }


class PromptStream:
    """An endless, resumable sequence of training prompts.

    Args:
        sources: Source descriptions by name (see :mod:`brorl_jax.data.sources`).
        tokenizer: Of the model that is trained.
        seed: Of the order; other seeds give unrelated orders.
        max_prompt_tokens: Longer prompts never reach the engine.
        system_prompt: Put before every question that brings no system message of its own; "" for none.
        exclude: Hashes of questions that must not be trained on, see :func:`exclusions`.

    Attributes:
        dropped: For every source, prompts left out by reason (``too_long``, ``held_out``, ``no_gold``): for a table
            since loading, for a procedural source among the positions visited by this object.

    Raises:
        ValueError: a source is described wrongly or nothing of it is left.
    """

    def __init__(
        self,
        sources: Mapping[str, Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_tokens: int,
        system_prompt: str = "",
        exclude: frozenset[str] = _NO_EXCLUSIONS,
    ):
        if not sources:
            raise ValueError("no data source: name at least one, such as kind='reasoning_gym'")
        makers = [
            _Maker(name, sources[name], tokenizer, max_prompt_tokens, system_prompt, exclude)
            for name in sorted(sources)
        ]
        self._makers = {m.name: m for m in makers}
        self.dropped = {m.name: m.dropped for m in makers}
        self._max = max_prompt_tokens
        self._turns = Turns({m.name: m.config.get("weight", 1.0) for m in makers})
        self._positions = {m.name: 0 for m in makers}
        self._parts = {
            "order": _ORDER,
            "seed": str(seed),
            "tokenizer": tokenizer.fingerprint(),
            "max_prompt_tokens": str(max_prompt_tokens),
            "system_prompt": system_prompt,
            "held-out questions": _digest(sorted(exclude)),
            **{key: value for m in makers for key, value in m.describe().items()},
        }
        self._orders = {m.name: _order(m, seed) for m in makers}

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts.

        Raises:
            UserError: nearly every prompt of a source is dropped, so that the wait would be endless.
        """
        return [self._next(self._turns.next()) for _ in range(n)]

    def _next(self, name: str) -> Prompt:
        order, maker = self._orders[name], self._makers[name]
        too_long = maker.dropped["too_long"]
        for _ in range(_MAX_HOLES):
            prompt = order[self._positions[name]]
            self._positions[name] += 1
            if prompt is not None:
                return prompt
            maker.check_lengths(too_long)
        raise UserError(
            f"the last {_MAX_HOLES} prompts of data source {name!r} were all dropped ({self.dropped[name]}): raise "
            f"data.max_prompt_tokens (now {self._max}), hold fewer questions out, or widen the task"
        )

    def state(self) -> dict[str, Any]:
        """JSON-serialisable: how far each source has been read, and what the order depends on."""
        read = {"taken": dict(self._turns.taken), "positions": dict(self._positions)}
        return {**read, "fingerprint": self.fingerprint(), "depends_on": dict(self._parts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            ValueError: the data, tokenizer, seed or filter differ from those of ``state``; the message says how.
        """
        if state["fingerprint"] != self.fingerprint():
            then, now = state["depends_on"], self._parts
            changed = [
                f"  {key}: was {then.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}"
                for key in sorted({*then, *now})
                if then.get(key) != now.get(key)
            ]
            raise ValueError(
                "the training data is not that of the checkpoint, so prompts would be lost or repeated:\n"
                + "\n".join(changed)
                + "\nRestore the old settings, or start in a new workdir."
            )
        self._turns.taken = dict(state["taken"])
        self._positions = dict(state["positions"])

    def fingerprint(self) -> str:
        """Hash of all that determines which prompt stands at which position."""
        return _digest(self._parts)


class Pair(NamedTuple):
    """A prompt and the ids of a right response to it, EOS included: int32 ``[R]``."""

    prompt: Prompt
    response: np.ndarray


def warmup_pair(prompt: Prompt, tokenizer: Tokenizer) -> Pair:
    """The gold answer in the prompt's own answer format, for the supervised warm start.

    Raises:
        ValueError: the prompt's verifier knows no single gold answer.
    """
    text = rewards.get(prompt.verifier).render(prompt)
    if text is None:
        raise ValueError(f"{prompt.id}: verifier {prompt.verifier!r} has no single gold answer to warm up on")
    return Pair(prompt, np.append(tokenizer.encode_response(text), np.int32(tokenizer.eos_id)))


def held_out(
    name: str,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    max_prompts: int,
    max_prompt_tokens: int,
    system_prompt: str = "",
) -> list[Prompt]:
    """A fixed list of evaluation prompts with distinct questions: the same for every run seed.

    Args:
        name: Of the source.
        config: Its description.
        tokenizer: Of the model that is evaluated.
        max_prompts: At most so many; 0 is all of them. Of a larger table, a fixed random choice in file order.
        max_prompt_tokens: Longer prompts are left out.
        system_prompt: As in training.

    Raises:
        ValueError: nothing is left, or all of a procedural source of more than 10^5 items is asked for.
    """
    maker = _Maker(name, config, tokenizer, max_prompt_tokens, system_prompt, _NO_EXCLUSIONS)
    size, limit = len(maker.source), max_prompts or len(maker.source)
    if maker.source.lazy and limit > 100_000:
        raise ValueError(f"evaluation source {name!r} makes {limit} prompts: set eval.max_prompts or a smaller size")
    if maker.source.lazy:
        order: Iterable[int] = range(min(size, 50 * limit))
    else:
        order = range(size) if limit >= size else random.Random(0).sample(range(size), size)
    chosen: dict[str, tuple[int, Prompt]] = {}
    for index in order:
        if len(chosen) >= limit:
            break
        record = maker.source[index]
        identity = question_hash(record.bare)
        if identity not in chosen and (prompt := maker.make(record)) is not None:
            chosen[identity] = (index, prompt)
        if maker.source.lazy and not chosen:
            maker.check_lengths()
    if not chosen:
        raise ValueError(f"no prompt of evaluation source {name!r} fits {max_prompt_tokens} tokens: {maker.dropped}")
    return [prompt for _, prompt in sorted(chosen.values(), key=lambda pair: pair[0])]


def sample_texts(sources: Mapping[str, Mapping[str, Any]], n: int) -> list[str]:
    """Templated questions and gold responses of up to ``n`` records a source: what a tokenizer is trained on."""
    texts: list[str] = []
    for name in sorted(sources):
        config = sources[name]
        source = sources_lib.load(name, config)
        for index in range(min(n, len(source))):
            record = source[index]
            verifier = rewards.get(sources_lib.verifier_name(config, record))
            texts.append(config.get("prompt", "{question}").replace("{question}", record.question))
            prompt = Prompt(record.key, np.zeros(1, np.int32), "", record.gold, verifier.name, name, record.meta)
            if (response := verifier.render(prompt)) is not None:
                texts.append(response)
    return texts


def _order(maker: _Maker, seed: int) -> Any:
    return _prompts(maker).seed(_source_seed(seed, maker.name)).shuffle().repeat()


def _prompts(maker: _Maker) -> Any:
    import grain  # takes seconds

    if maker.source.lazy:
        return grain.MapDataset.range(len(maker.source)).map(lambda i: maker.make(maker.source[i]))
    kept = [p for i in range(len(maker.source)) if (p := maker.make(maker.source[i])) is not None]
    if not kept:
        raise ValueError(f"no prompt of data source {maker.name!r} is left: {maker.dropped}")
    return grain.MapDataset.source(kept)


def _source_seed(seed: int, name: str) -> int:
    # Grain shuffles epoch e with seed + e, so neighbouring run seeds would share their orders, and sources of one size
    # would share one permutation.
    return int(_digest([seed, name])[:8], 16)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
