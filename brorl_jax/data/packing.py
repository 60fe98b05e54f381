"""From groups to the fixed-shape arrays of ``types.Batch``.

Responses of one group are packed best-fit into rows of ``row_tokens``; rows are gathered into slots of ``rows``, each
with the group's prompt once; slots into micro-batches of ``slots``. The number of micro-batches is rounded up to a
coarse grid, so that only a few shapes occur; the padding ones are not executed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from brorl_jax.types import Batch, Group, Prompt, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a micro-batch: ``slots`` prompts, each with ``rows`` rows of ``row_tokens`` response tokens."""

    slots: int
    rows: int
    row_tokens: int

    def __post_init__(self) -> None:
        if min(self.slots, self.rows, self.row_tokens) < 1:
            raise ValueError(f"slots, rows and row_tokens must be at least 1, got {self}")


def pack(
    groups: Sequence[Group],
    layout: Layout,
    *,
    prefix: int | None = None,
    n_micro: int | None = None,
    version: int | None = None,
) -> Batch:
    """Packs every scored sample of ``groups`` into one mini-batch of NumPy arrays.

    Samples without a score (aborted, grader errors) or without tokens are left out: the same as weight zero.
    ``old_logp`` and ``ref_logp`` are zeros, to be filled from a scoring pass.

    Args:
        prefix: Width P of the prompt arrays; default: the longest one, rounded up.
        n_micro: Least number of micro-batches in the arrays' shape, so that mini-batches of a step share one shape.
        version: Of the present weights, for ``fresh``; default: every group counts as fresh.

    Raises:
        ValueError: A response is longer than a row, or a prompt longer than ``prefix``.
    """
    slots = [(group, rows) for group in groups for rows in _slots(group, layout)]
    longest = max((len(group.prompt.tokens) - 1 for group, _ in slots), default=0)
    width = rounded_up(longest) if prefix is None else prefix
    if longest > width:
        raise ValueError(f"a prompt needs {longest} prefix places but the batch has {width}")
    used = -(-len(slots) // layout.slots)
    micro = max(rounded_up(used), n_micro or 1)
    lead = (micro * layout.slots,)
    shape = (*lead, layout.rows, layout.row_tokens)
    ints = {k: np.zeros(shape, np.int32) for k in ("inputs", "tokens", "segment_ids", "positions")}
    floats = {k: np.zeros(shape, np.float32) for k in ("advantages", "rollout_logp", "old_logp", "ref_logp")}
    mask = np.zeros(shape, bool)
    prefixes, lengths, fresh = np.zeros((*lead, width), np.int32), np.zeros(lead, np.int32), np.zeros(lead, bool)
    segment = 0
    for i, (group, rows) in enumerate(slots):
        prompt = group.prompt
        if i % layout.slots == 0:
            segment = 0  # unique within a micro-batch
        fresh[i] = version is None or all(s.weight_version == version for s in group.scored)
        lengths[i] = len(prompt.tokens) - 1
        prefixes[i, : lengths[i]] = prompt.tokens[:-1]
        for r, row in enumerate(rows):
            at = 0
            for sample in row:
                segment += 1
                place = (i, r, slice(at, at + len(sample.tokens)))
                ints["inputs"][place] = np.concatenate([prompt.tokens[-1:], sample.tokens[:-1]])
                ints["tokens"][place] = sample.tokens
                ints["segment_ids"][place] = segment
                ints["positions"][place] = lengths[i] + np.arange(len(sample.tokens))
                floats["advantages"][place] = sample.advantage
                floats["rollout_logp"][place] = sample.logp
                mask[place] = True
                at += len(sample.tokens)

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(micro, layout.slots, *x.shape[1:])

    arrays = {k: split(v) for k, v in {**ints, **floats, "mask": mask, "fresh": fresh}.items()}
    return Batch(n_micro=np.int32(used), prefix=split(prefixes), prefix_len=split(lengths), **arrays)


def rounded_up(n: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: at most a quarter more than ``n``."""
    grid = max(1, 1 << max(0, n.bit_length() - 3))
    return max(1, -(-n // grid) * grid)


def _slots(group: Group, layout: Layout) -> Iterator[list[list[Sample]]]:
    trained = [sample for sample in group.scored if len(sample.tokens)]
    rows = _rows(group.prompt, trained, layout.row_tokens)
    for i in range(0, len(rows), layout.rows):
        yield rows[i : i + layout.rows]


def _rows(prompt: Prompt, samples: Sequence[Sample], capacity: int) -> list[list[Sample]]:
    """Best-fit decreasing: each response, longest first, into the fullest row that still has room."""
    rows: list[list[Sample]] = []
    free: list[tuple[int, int]] = []  # (places left, row), sorted
    for sample in sorted(samples, key=lambda s: (-len(s.tokens), s.index)):
        need = len(sample.tokens)
        if need > capacity:
            raise ValueError(
                f"a response to {prompt.id!r} has {need} tokens, more than a row holds: "
                f"batch.row_tokens = {capacity} must be at least rollout.max_tokens"
            )
        at = bisect.bisect_left(free, (need, -1))
        if at == len(free):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = free.pop(at)
        rows[row].append(sample)
        bisect.insort(free, (left - need, row))
    return rows
