"""The embedded engine: batched sampling in this process, so that everything runs without a server.

The host keeps the books: which request sits in which slot, which sample in which row, what is still waiting. Between
two calls of ``decode.decode`` it collects what ended, hands on complete groups, refills free rows with waiting samples
and free slots with waiting prompts, and, when nothing waits and most rows are done, moves the rest to a smaller batch.
Shapes come from a small fixed set (powers of two), so that a run compiles a handful of programs once.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax import watchdog
from brorl_jax.data.packing import rounded_up
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout import decode
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.rollout.sampling import seed_words
from brorl_jax.types import Finish, Group, Sample

FIRST_WINDOW = 64  # ring columns to start with; doubles up to max_tokens as rows grow


class LocalEngine:
    """Samples with the trainer's own weights on the trainer's own devices.

    Args:
        cfg: The model.
        rows: Most sequences decoded at once.
        chunk: Tokens per row between two looks of the host; finished rows idle for less than this.
        real_vocab: Ids from here on are never sampled (padding of the embedding).
        dtype: Dtype of activations and caches.
        copy: Sample with a copy of the published weights, whole and on one device. So they may be donated while
            ``generate`` runs, and a program on several devices may run beside it, which could block for ever if both
            had collectives.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        rows: int,
        chunk: int,
        real_vocab: int | None = None,
        dtype: Any = jnp.float32,
        copy: bool = False,
    ) -> None:
        if rows < 1 or chunk < 1:
            raise ValueError(f"rollout.local.rows and rollout.local.chunk must be at least 1, got {rows} and {chunk}")
        self._cfg, self._rows, self._chunk, self._dtype = cfg, rows, chunk, jnp.dtype(dtype)
        self._real_vocab = cfg.vocab_size if real_vocab is None else real_vocab
        self._copy = copy
        self._params: Any = None
        self._version = -1
        self._in_flight = 0  # calls of generate that have not ended

    def publish(self, params: Any, version: int) -> None:
        """Samples with ``params`` from now on. Keeps a reference, unless asked to copy or to convert to its dtype.

        Raises:
            RuntimeError: A call of ``generate`` is still running: its samples would mix two versions.
        """
        if self._in_flight:
            raise RuntimeError(f"weights {version} published with {self._in_flight} calls of generate in flight")
        if self._copy:
            self._params = None  # first, so that there are never two
            self._params = jax.tree.map(lambda x: _copied(x, self._dtype), params)
        else:
            self._params = jax.tree.map(lambda x: x.astype(self._dtype), _once(params))
        self._version = version

    def metrics(self) -> dict[str, float]:
        """Nothing beyond what the loop counts itself."""
        return {}

    def close(self) -> None:
        """Drops the weights."""
        self._params = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Group]:
        """Yields one ungraded group per request as it completes.

        Raises:
            RuntimeError: No weights were published yet.
            ValueError: A prompt does not leave room for ``max_tokens`` in the model's context.
        """
        if self._params is None:
            raise RuntimeError("no weights: call publish(params, version) before generate")
        for r in requests:
            if len(r.prompt.tokens) + sampling.max_tokens > self._cfg.max_positions:
                raise ValueError(
                    f"prompt {r.prompt.id!r} has {len(r.prompt.tokens)} tokens; with max_tokens={sampling.max_tokens} "
                    f"it exceeds the model's {self._cfg.max_positions} positions"
                )
        if not requests:
            return
        self._in_flight += 1
        try:
            yield from _Session(self, requests, sampling).run()
        finally:  # also when the caller gives up
            self._in_flight -= 1


def _once(params: Any) -> Any:
    """Replicated weights on one of their devices: each would do all of the work. Split ones stay as they are."""
    leaves = jax.tree.leaves(params)
    if all(isinstance(x, jax.Array) and x.is_fully_replicated for x in leaves):
        return jax.tree.map(lambda x: x.addressable_data(0), params)
    return params


def _copied(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in memory of its own, on the first of its devices."""
    whole = jax.device_put(x, min(x.devices(), key=lambda device: device.id))
    return jnp.array(whole, dtype, copy=True)  # device_put shares a replica's memory, even with may_alias=False


@dataclasses.dataclass(slots=True)
class _Open:
    """A request in a slot: what waits, what is done."""

    request: Request
    words: np.ndarray  # uint32 [N, 2], the seeds
    waiting: deque[int]
    done: dict[int, Sample]


@dataclasses.dataclass(slots=True)
class _Row:
    """A sample being generated in a row."""

    slot_request: _Open
    index: int
    tokens: list[np.ndarray]
    logps: list[np.ndarray]


class _Session:
    """One call of ``generate``."""

    def __init__(self, engine: LocalEngine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.e, self.sampling = engine, sampling
        self.queue = deque(_Open(r, seed_words(r.seeds), deque(range(len(r.seeds))), {}) for r in requests)
        n = min(max(len(r.seeds) for r in requests), engine._rows)
        slots = _quartered(max(1, engine._rows // n), len(requests))
        prefix = rounded_up(max(len(r.prompt.tokens) for r in requests) - 1)
        self.steps = min(engine._chunk, sampling.max_tokens)
        window = min(sampling.max_tokens, max(FIRST_WINDOW, _power_of_two(self.steps)))
        self.cache = decode.empty_cache(engine._cfg, slots, n, prefix, window, engine._dtype)
        self.open: list[_Open | None] = [None] * slots
        self.rows: list[list[_Row | None]] = [[None] * n for _ in range(slots)]
        self.token, self.position, self.start = (np.zeros((slots, n), np.int32) for _ in range(3))
        self.words = np.zeros((slots, n, 2), np.uint32)
        self.prefix_len = np.zeros(slots, np.int32)
        self.clock = 0
        self.knobs = decode.knobs(sampling)
        self.mode = "greedy" if sampling.temperature == 0 else "restricted" if sampling.truncated else "full"

    def run(self) -> Iterator[Group]:
        while True:
            self._fill()
            live = np.array([[row is not None for row in slot] for slot in self.rows])
            if not live.any():
                return
            live = self._resize(live)
            self._extend(live)
            yield from self._complete()

    def _fill(self) -> None:
        """Puts waiting prompts into free slots and waiting samples into free rows."""
        fresh: list[int] = []
        for s, current in enumerate(self.open):
            if current is None and self.queue:
                self.open[s] = self.queue.popleft()
                fresh.append(s)
        if fresh:
            self._prefill(fresh)
        for s, current in enumerate(self.open):
            for r, row in enumerate(self.rows[s]):
                if row is None and current is not None and current.waiting:
                    index = current.waiting.popleft()
                    self.rows[s][r] = _Row(current, index, [], [])
                    self.token[s, r] = current.request.prompt.tokens[-1]
                    self.position[s, r] = self.prefix_len[s]
                    self.start[s, r] = self.clock
                    self.words[s, r] = current.words[index]

    def _prefill(self, slots: list[int]) -> None:
        width = self.cache.prefix[0][0].shape[2]
        count = _quartered(len(self.open), len(slots))
        ids = np.full(count, len(self.open), np.int32)
        prefix, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
        for i, s in enumerate(slots):
            prompt = self.open[s].request.prompt.tokens[:-1]  # type: ignore[union-attr]
            ids[i], lengths[i] = s, len(prompt)
            prefix[i, : len(prompt)] = prompt
            self.prefix_len[s] = len(prompt)
        e = self.e
        self.cache = decode.insert_prompts(e._params, self.cache, ids, prefix, lengths, cfg=e._cfg, dtype=e._dtype)

    def _resize(self, live: np.ndarray) -> np.ndarray:
        """Grows the ring for rows that get long; halves slots or rows once most are done and nothing waits."""
        window = self.cache.ring[0][0].shape[3]
        age = self.clock - self.start[live].min()
        if age + self.steps > window and window < self.sampling.max_tokens:
            window = min(self.sampling.max_tokens, _power_of_two(age + self.steps))
            self.cache = decode.grow(self.cache, np.int32(self.clock), window=window)
        slots, n = live.shape
        keep_slots, keep_rows = _halved(slots, live.any(1).sum()), _halved(n, live.sum(1).max())
        waiting = self.queue or any(o is not None and o.waiting for o in self.open)
        remaining = self.sampling.max_tokens - (self.clock - self.start[live].max())
        if waiting or keep_slots * keep_rows == slots * n or remaining <= self.steps:
            return live
        chosen = np.argsort(~live.any(1), kind="stable")[:keep_slots]
        rows = np.argsort(~live[chosen], axis=1, kind="stable")[:, :keep_rows]
        self.cache = decode.select(self.cache, chosen.astype(np.int32), rows.astype(np.int32))
        pick = (chosen[:, None], rows)
        self.token, self.position, self.start = self.token[pick], self.position[pick], self.start[pick]
        self.words, self.prefix_len = self.words[pick], self.prefix_len[chosen]
        self.open = [self.open[s] for s in chosen]
        self.rows = [[self.rows[s][r] for r in rows[i]] for i, s in enumerate(chosen)]
        return live[pick]

    def _extend(self, live: np.ndarray) -> None:
        """Runs one compiled chunk and appends what each row got."""
        e = self.e
        rows = decode.Rows(
            self.token, self.position, self.start, live, self.words, self.prefix_len, np.int32(self.clock)
        )
        self.cache, after, tokens, logps = decode.decode(
            e._params, self.cache, rows, self.knobs, cfg=e._cfg, steps=self.steps, mode=self.mode,
            real_vocab=e._real_vocab, dtype=e._dtype,
        )  # fmt: skip
        after, tokens, logps = jax.device_get((after, tokens, logps))
        watchdog.alive("a chunk of the embedded engine")
        self.token, self.position = np.array(after.token), np.array(after.position)
        self.clock = int(after.clock)
        counts = (tokens >= 0).sum(0)
        for s, r in zip(*np.nonzero(live), strict=True):
            row = self.rows[s][r]
            assert row is not None
            row.tokens.append(tokens[: counts[s, r], s, r])
            row.logps.append(logps[: counts[s, r], s, r])
            if not after.live[s, r]:
                self.rows[s][r] = None
                row.slot_request.done[row.index] = self._sample(row)

    def _sample(self, row: _Row) -> Sample:
        tokens, logp = np.concatenate(row.tokens), np.concatenate(row.logps)
        stopped = int(tokens[-1]) in self.sampling.stop_ids
        return Sample(
            index=row.index,
            seed=row.slot_request.request.seeds[row.index],
            tokens=tokens,
            logp=logp,
            finish=Finish.STOP if stopped else Finish.LENGTH,
            weight_version=self.e._version,
        )

    def _complete(self) -> Iterator[Group]:
        for s, current in enumerate(self.open):
            if current is not None and len(current.done) == len(current.request.seeds):
                self.open[s] = None
                yield Group(current.request.prompt, [current.done[i] for i in sorted(current.done)])


def _power_of_two(n: int) -> int:
    return 1 << max(0, int(n - 1).bit_length())


def _quartered(size: int, needed: int) -> int:
    """``size`` divided by 4 as often as ``needed`` still fits: few shapes to compile, little work wasted."""
    while needed <= size // 4:
        size //= 4
    return size


def _halved(size: int, needed: int) -> int:
    """``size`` halved (rounding up) as often as ``needed`` still fits."""
    while needed <= size // 2:
        size = -(-size // 2)
    return size
