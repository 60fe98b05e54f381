"""Questions that are nearly the same: repeats within a set, and training questions that a benchmark holds.

Both compare sets of word n-grams through an inverted index, which is exact: no pair beyond the threshold is missed, as
MinHash may. What makes it fast is prefix filtering (Chaudhuri et al. 2006; Bayardo et al. 2007): with the n-grams in
order from rare to frequent, two sets of Jaccard similarity t or more share one of the first ``|x| - ceil(t |x|) + 1``
of each, so only those few, rare n-grams are looked up.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

_WORD = re.compile(r"\\[a-z]+|[^\W\d_]+|\d|[^\w\s]", re.UNICODE)
_NOISE = re.compile(r"\\(?:left|right|displaystyle|,|;|!|\s)|[$.,;:!?\"'`“”‘’{}]|\\[()\[\]]")

NGRAM = 3
NEAR = 0.7
OVERLAP_NGRAM = 13
OVERLAP = 0.5
LEAST_WORDS = 8  # of a benchmark question that is looked for within others


def words(text: str) -> list[str]:
    """What questions are compared by: lower case, without punctuation and TeX's spacing; every digit is a word.

    Digits stay and stand alone, so that two instances of one template ("12 apples" and "37 apples") differ by as many
    words as they differ in digits. Operators stay, too: ``3 + 4`` is not ``3 - 4``.
    """
    return _WORD.findall(_NOISE.sub(" ", text.lower()))


def numbers(text: str) -> tuple[str, ...]:
    """The numbers of a text in order; thousands separators are dropped."""
    return tuple(re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text)))


def shingles(tokens: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """The distinct n-grams; one that is shorter, if there are fewer words. Empty only for no words."""
    if len(tokens) < n:
        return {tuple(tokens)} if tokens else set()
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """Text ``row`` is like text ``other`` (an index into the texts, or into the benchmark's): score in [0, 1]."""

    row: int
    other: int
    score: float


def near_duplicates(
    texts: Sequence[str], keys: Sequence[Hashable], threshold: float = NEAR, *, n: int = NGRAM
) -> list[Match]:
    """Texts that repeat an earlier, kept one.

    Two texts are the same question if the Jaccard similarity of their word n-grams is at least ``threshold`` and their
    keys are equal. Of each cluster the first text is kept; a text is compared with kept ones only.

    Args:
        texts: In order of preference.
        keys: What must agree besides, for every text, such as the numbers that they hold.
        threshold: In (0, 1]. At 1 only texts with the same n-grams match.
        n: Words of an n-gram.

    Returns:
        One match per repeated text, with the most similar kept text; ordered by ``row``.
    """
    index = _Jaccard([words(text) for text in texts], threshold, n)
    found = []
    for row, key in enumerate(keys):
        match = index.best(row, row, key)
        if match:
            found.append(match)
        else:
            index.add(row, key)
    return found


def overlaps(
    texts: Sequence[str],
    benchmark: Sequence[str],
    threshold: float = OVERLAP,
    near: float = NEAR,
    *,
    n: int = OVERLAP_NGRAM,
) -> list[Match]:
    """Texts that state a benchmark's question: whole, in large part, or with a few words changed.

    Either of two scores is enough. The first is the share of the benchmark question's word n-grams that stand in the
    text, at least ``threshold``: it finds a question that is quoted within a longer one. A question shorter than ``n``
    words is looked for as a whole, one of fewer than :data:`LEAST_WORDS` words matches equal texts only ("What is
    7 + 5?" is nobody's property). The second is the Jaccard similarity of :func:`near_duplicates`, at least ``near``,
    with whatever numbers: it finds rewordings that break every long n-gram.

    Args:
        texts: Training questions.
        benchmark: Questions that must not be trained on.
        threshold: In (0, 1].
        near: In (0, 1].
        n: Words of an n-gram.

    Returns:
        The best match of every text that has one; ordered by ``row``.
    """
    questions, tokens = [words(text) for text in benchmark], [words(text) for text in texts]
    quoted = _Containment(questions, threshold, n)
    similar = _Jaccard([*questions, *tokens], near, NGRAM)
    for at in range(len(questions)):
        similar.add(at, None)
    found = []
    for row, text in enumerate(tokens):
        matches = [m for m in (quoted.best(row, text), similar.best(len(questions) + row, row, None)) if m]
        found += sorted(matches, key=lambda m: (-m.score, m.other))[:1]
    return found


class _Jaccard:
    """Finds, among the texts added, the one most similar to another."""

    def __init__(self, tokens: Sequence[Sequence[str]], threshold: float, n: int):
        self._threshold = threshold
        sets = [shingles(t, n) for t in tokens]
        counts = Counter(gram for grams in sets for gram in grams)
        # Rare first; ties by the n-gram itself, so that every run finds the same.
        rank = {gram: i for i, gram in enumerate(sorted(counts, key=lambda gram: (counts[gram], gram)))}
        self._grams = [sorted(rank[gram] for gram in grams) for grams in sets]
        self._index: dict[tuple[Hashable, int], list[int]] = defaultdict(list)

    def _prefix(self, at: int) -> list[int]:
        size = len(self._grams[at])
        return self._grams[at][: size - math.ceil(self._threshold * size - 1e-9) + 1]

    def add(self, at: int, key: Hashable) -> None:
        for gram in self._prefix(at):
            self._index[key, gram].append(at)

    def best(self, at: int, row: int, key: Hashable) -> Match | None:
        candidates = {other for gram in self._prefix(at) for other in self._index.get((key, gram), ())}
        mine = set(self._grams[at])
        score, other = max(((self._similarity(mine, other), -other) for other in candidates), default=(0.0, 0))
        return Match(row, -other, score) if score >= self._threshold else None

    def _similarity(self, mine: set[int], other: int) -> float:
        theirs = self._grams[other]
        if min(len(mine), len(theirs)) < self._threshold * max(len(mine), len(theirs)) - 1e-9:
            return 0.0  # it can't reach the threshold whatever they share
        shared = len(mine.intersection(theirs))
        return shared / (len(mine) + len(theirs) - shared)


class _Containment:
    """Finds the question of which the largest share stands in a text."""

    def __init__(self, questions: Sequence[Sequence[str]], threshold: float, n: int):
        self._threshold = threshold
        self._sizes: list[int] = []
        self._index: dict[int, dict[tuple[str, ...], list[int]]] = {}
        self._whole: dict[tuple[str, ...], int] = {}
        for at, question in enumerate(questions):
            self._whole.setdefault(tuple(question), at)
            size = min(n, len(question))
            grams = shingles(question, size) if len(question) >= LEAST_WORDS else set()
            self._sizes.append(len(grams))
            index = self._index.setdefault(size, {}) if grams else {}
            for gram in grams:
                index.setdefault(gram, []).append(at)

    def best(self, row: int, text: Sequence[str]) -> Match | None:
        if text and (same := self._whole.get(tuple(text))) is not None:
            return Match(row, same, 1.0)
        hits: Counter[int] = Counter()
        for size, index in self._index.items():
            for gram in shingles(text, size) if size <= len(text) else ():
                hits.update(index.get(gram, ()))
        score, at = max(((count / self._sizes[at], -at) for at, count in hits.items()), default=(0.0, 0))
        return Match(row, -at, score) if score >= self._threshold else None
