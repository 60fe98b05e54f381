"""When the reference policy becomes a copy of the current one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

ResetReason = Literal["every", "kl_spike", "stall"]


def reset_reason(
    step: int,
    last_reset: int,
    kl: float | None,
    evals: Sequence[tuple[int, float]],
    *,
    every: int,
    kl_spike: float,
    stall: int,
) -> ResetReason | None:
    """Why the reference should be reset after this step, or None. Each rule is off at 0.

    [V2]: every 200-500 steps, or on a KL spike or stalled validation; [V1]: on stall or degradation. Thresholds are
    unpublished.

    * ``every``: at least ``every`` steps since ``last_reset``.
    * ``kl_spike``: ``kl``, the step's KL(policy || reference) in nats per token, exceeds it: an absolute bound, because
      KL starts from 0 after each reset and any ratio to its recent history would fire at once. A step without a KL
      (None) or with NaN never fires: nobody wants that policy as a reference.
    * ``stall``: none of the last ``stall`` evaluations beats the best one before them. All ``stall`` must have
      been made after ``last_reset``, so that a reset gets its chance.

    Args:
        step: The step just finished, counted as in ``evals``.
        last_reset: Step of the last reset, 0 at the start of the run.
        kl: As above.
        evals: ``(step, score)`` of every evaluation so far in order; higher scores are better.
        every: Steps.
        kl_spike: Nats per token.
        stall: Number of evaluations.
    """
    if min(every, kl_spike, stall) < 0:
        raise ValueError(f"reference reset rules must be >= 0: every={every}, kl_spike={kl_spike}, stall={stall}")
    if every and step - last_reset >= every:
        return "every"
    if kl_spike and kl is not None and kl > kl_spike:
        return "kl_spike"
    if stalled(evals, stall) and all(at > last_reset for at, _ in evals[-stall:]):
        return "stall"
    return None


def stalled(evals: Sequence[tuple[int, float]], window: int) -> bool:
    """Whether none of the last ``window`` evaluations beats the best one before them; never with ``window`` 0."""
    if not window or len(evals) <= window:
        return False
    before, recent = evals[:-window], evals[-window:]
    return max(score for _, score in recent) <= max(score for _, score in before)
