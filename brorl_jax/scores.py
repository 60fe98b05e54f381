"""From graded samples to scores, and from two sets of scores to a comparison. NumPy on the host.

A *row* is one evaluated prompt with the rewards, lengths and finish reasons of its samples: what an evaluation leaves
on disk, and all that scores are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from brorl_jax.types import Finish, Group

RESAMPLES = 2000
FULL_MARKS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One prompt's samples.

    Attributes:
        prompt_id: ``Prompt.id``.
        source: Name of the benchmark.
        rewards: In [0, 1]; None for a sample without a score (aborted, grader error, timeout).
        lengths: Tokens of each response.
        finish: ``stop``, ``length`` or ``abort``, each.
    """

    prompt_id: str
    source: str
    rewards: list[float | None]
    lengths: list[int]
    finish: list[str]

    @classmethod
    def of(cls, group: Group, source: str) -> Row:
        """The row of a graded group."""
        return cls(
            group.prompt.id,
            source,
            [s.reward if s.status and s.status.scored else None for s in group.samples],
            [len(s.tokens) for s in group.samples],
            [str(s.finish) for s in group.samples],
        )

    @property
    def scored(self) -> np.ndarray:
        """float64 ``[n]``, the rewards that exist."""
        return np.array([r for r in self.rewards if r is not None], np.float64)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Any) -> Row:
        """The row that ``to_json`` wrote.

        Raises:
            ValueError: It is something else; found here, since a damaged number would show far from its file.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(row, dict) or sorted(row) != sorted(names):
            raise ValueError(f"a row has the fields {', '.join(names)}, got {row!r:.80}")
        r = cls(**row)
        lists = r.rewards, r.lengths, r.finish
        if (
            not all(isinstance(text, str) for text in (r.prompt_id, r.source))
            or not all(isinstance(values, list) and len(values) == len(r.finish) for values in lists)
            or not all(x is None or (_is_number(x) and 0 <= x <= 1) for x in r.rewards)
            or not all(_is_number(x) and x >= 0 for x in r.lengths)
            or not all(x in tuple(Finish) for x in r.finish)
        ):
            raise ValueError(f"not what a prompt's samples can be: {row!r:.120}")
        return r


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By source and prompt, so that no figure depends on which prompt was done first."""
    return sorted(rows, key=lambda row: (row.source, row.prompt_id))


def pass_at_k(n: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased chance that one of ``k`` samples is right, from ``correct`` right ones of ``n >= k`` drawn.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374), as a product that cannot overflow.

    Raises:
        ValueError: Some ``n < k``.
    """
    n, correct = np.asarray(n, np.int64), np.asarray(correct, np.int64)
    if k < 1 or np.any(n < k):
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples per prompt, the smallest n is {n.min()}")
    drawn = np.arange(k)
    left = np.maximum(n[..., None] - correct[..., None] - drawn, 0)
    return 1.0 - np.prod(left / (n[..., None] - drawn), axis=-1)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... and ``n`` itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def resampled_means(values: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """float64 ``[resamples]``, means of bootstrap samples (with replacement, same size) of ``values``."""
    rng, n = np.random.default_rng(seed), len(values)
    return np.array([values[rng.integers(n, size=n)].mean() for _ in range(resamples)])


def standard_error(values: np.ndarray) -> float:
    """Bootstrap standard error of the mean over prompts; NaN for fewer than two."""
    return float(resampled_means(values).std()) if len(values) > 1 else float("nan")


def source_scores(rows: Sequence[Row]) -> dict[str, float]:
    """Scores of one benchmark.

    Returns:
        ``pass@1``: mean raw reward over prompts and their samples (avg@k; for a continuous verifier its mean reward).
        ``full_marks``: the same with a sample's reward cut to 1 for full marks and 0 for less.
        ``pass@<k>``: for k = 2, 4, ... and the number of samples, by full marks; of prompts with k scored samples.
        ``stderr``: of ``pass@1``, bootstrap over prompts.
        ``length``, ``length_correct``: mean response tokens, of all scored samples and of those with full marks.
        ``truncated_rate``: share of scored samples that met the token limit.
        ``prompts``, ``unscored_rate``: how many prompts, and the share of samples without a score.
    """
    with_score = [r for r in rows if len(r.scored)]
    means = np.array([r.scored.mean() for r in with_score])
    scored = np.array([r is not None for row in rows for r in row.rewards], bool)
    rewards = np.array([np.nan if r is None else r for row in rows for r in row.rewards], np.float64)
    lengths = np.array([n for row in rows for n in row.lengths], np.float64)
    truncated = np.array([f == Finish.LENGTH for row in rows for f in row.finish], bool)
    scores = {"pass@1": _mean(means), "stderr": standard_error(means)}
    n = np.array([len(r.scored) for r in with_score], np.int64)
    right = np.array([(r.scored >= FULL_MARKS).sum() for r in with_score], np.int64)
    for k in powers_of_two(max((len(r.rewards) for r in rows), default=1))[1:]:
        enough = n >= k
        scores[f"pass@{k}"] = _mean(pass_at_k(n[enough], right[enough], k)) if enough.any() else float("nan")
    return scores | {
        "full_marks": _mean(np.array([(r.scored >= FULL_MARKS).mean() for r in with_score])),
        "length": _mean(lengths[scored]),
        "length_correct": _mean(lengths[scored & (rewards >= FULL_MARKS)]),
        "truncated_rate": _mean(truncated[scored]),
        "prompts": float(len(rows)),
        "unscored_rate": 1.0 - _mean(scored),
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def metrics(rows: Iterable[Row], headings: Mapping[str, str]) -> dict[str, float]:
    """``eval/<source>/<score>`` of every benchmark, and averages of ``pass@1`` and ``length``.

    Args:
        headings: Source -> what it is averaged under, ``math`` or, with a second level, ``reasoning_gym/algebra``.

    Returns:
        The benchmarks' scores; ``eval/<score>``, the mean over benchmarks; ``eval/average/<heading>/<score>`` for every
        heading and its first level; and where a first level has second ones, ``eval/average/<first>/plain/<score>``,
        the mean over those. (The paper's Reasoning Gym average is weighted by tasks, ProRL's card has the plain one.)
    """
    by_source: dict[str, list[Row]] = {}
    for row in in_order(rows):
        by_source.setdefault(row.source, []).append(row)
    scores = {source: source_scores(chosen) for source, chosen in by_source.items()}
    result = {f"eval/{source}/{name}": value for source, s in scores.items() for name, value in s.items()}
    under: dict[str, list[str]] = {}
    for source in scores:
        heading = headings.get(source, "")
        for name in dict.fromkeys([heading.split("/")[0], heading]):
            if name:
                under.setdefault(name, []).append(source)
    for name in ("pass@1", "length"):
        result[f"eval/{name}"] = _mean(np.array([s[name] for s in scores.values()]))
        averages = {h: _mean(np.array([scores[source][name] for source in chosen])) for h, chosen in under.items()}
        result |= {f"eval/average/{heading}/{name}": value for heading, value in averages.items()}
        for first in averages:
            second = [value for heading, value in averages.items() if heading.startswith(f"{first}/")]
            if second:
                result[f"eval/average/{first}/plain/{name}"] = _mean(np.array(second))
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """``B - A`` over the prompts that both have.

    Attributes:
        prompts: How many.
        a, b: Mean rewards.
        difference: Mean of the prompts' differences.
        low, high: Its 95 % bootstrap interval over prompts.
        t: Paired t statistic; NaN where all differences are equal.
        p: One-tailed, of the hypothesis that B is no better than A.
    """

    prompts: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    t: float
    p: float


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> Difference:
    """Compares mean rewards by prompt id; prompts that one side lacks are left out.

    Raises:
        ValueError: Fewer than two prompts in common.
    """
    common = sorted(a.keys() & b.keys())
    if len(common) < 2:
        raise ValueError(f"{len(common)} prompts in common; a comparison needs at least 2")
    x, y = (np.array([side[key] for key in common], np.float64) for side in (a, b))
    differences = y - x
    if np.ptp(differences) == 0:
        t = p = float("nan")
    else:
        t, p = map(float, stats.ttest_rel(y, x, alternative="greater"))
    low, high = np.percentile(resampled_means(differences), (2.5, 97.5))
    mean = float(differences.mean())
    return Difference(len(common), float(x.mean()), float(y.mean()), mean, float(low), float(high), t, p)


def compare(a: Iterable[Row], b: Iterable[Row]) -> dict[str, Difference]:
    """``paired`` for every benchmark that both have, and ``all`` prompts together (the paper's test).

    Raises:
        ValueError: No benchmark in common.
    """
    sides: list[dict[str, dict[str, float]]] = []
    for rows in (a, b):
        side: dict[str, dict[str, float]] = {}
        for row in rows:
            if len(row.scored):
                side.setdefault(row.source, {})[row.prompt_id] = float(row.scored.mean())
        sides.append(side)
    common = [source for source in sides[0] if source in sides[1]]
    if not common:
        names = [", ".join(side) or "no prompt with a score" for side in sides]
        raise ValueError(f"no benchmark in common: {names[0]} against {names[1]}")
    result = {source: paired(sides[0][source], sides[1][source]) for source in common}
    whole = [{key: v for source in common for key, v in side[source].items()} for side in sides]
    return result | {"all": paired(*whole)}
