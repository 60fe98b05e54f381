"""Whose turn it is: sources in proportion to their weights, exactly.

Grain's own mix rounds the weights to multiples of a hundredth of the smallest and counts the positions of prompts that
are then left out; over a long run, or with a source of which much is filtered, the shares drift. Here turns are given
for prompts delivered, and after any number of them every source is within one prompt of its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction


class Turns:
    """A deterministic sequence of source names.

    After k turns a source of weight w has had between ``k w / W - 1`` and ``k w / W + 1`` of them, W the sum of weights
    (R. Tijdeman, "The chairman assignment problem", 1980: of the sources that are behind, the one whose next turn is
    due first). Weights are taken as the decimal numbers that they print as, and all arithmetic is exact.

    Args:
        weights: Of every source, above 0.

    Attributes:
        taken: Turns so far, by source. All the state there is; may be set.
    """

    def __init__(self, weights: Mapping[str, float]):
        exact = {name: Fraction(repr(float(weights[name]))) for name in sorted(weights)}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}
        self._total = sum(self._weights.values())
        self.taken = dict.fromkeys(exact, 0)

    def next(self) -> str:
        """The source that the next prompt comes from; it has then had its turn."""
        turn = sum(self.taken.values()) + 1
        slack = max(1, 2 * len(self.taken) - 2)

        def behind(name: str) -> int:
            """How far the source is behind its share at this turn, times ``total``."""
            return self._weights[name] * turn - self._total * self.taken[name]

        eligible = [name for name in self.taken if slack * behind(name) >= self._total]
        latest = (slack - 1) * self._total
        name = min(eligible, key=lambda n: Fraction(latest - slack * behind(n), self._weights[n]))
        self.taken[name] += 1
        return name
