"""What servers say about themselves, and what the engine counted, as one step's metrics.

Counters of ``GET /metrics`` (servers started with ``--enable-metrics``) are read at the ends of a step and differ by
what the step did; gauges are read every ``POLL_S`` while groups are generated. The server's own ``cache_hit_rate`` is
that of its last prefill; a step's is made of the counters.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable

from brorl_jax.rollout.sglang.client import Refused, ServerFailure
from brorl_jax.rollout.sglang.generation import Ledger
from brorl_jax.rollout.sglang.pool import Pool, Worker

POLL_S = 2.0
COUNTERS = ("prompt_tokens_total", "cached_tokens_total", "generation_tokens_total", "num_retracted_requests_total")
GAUGES = ("num_running_reqs", "num_queue_reqs", "token_usage")
_LINE = re.compile(r"sglang:(\w+)(?:\{([^}]*)\})? (\S+)")


def read(text: str, names: Iterable[str]) -> dict[str, float]:
    """The named metrics of a Prometheus text, summed over data-parallel ranks (tensor ranks repeat one another)."""
    wanted, found = set(names), defaultdict(float)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in wanted:
            continue
        rank = re.search(r'tp_rank="(\d+)"', match[2] or "")
        if rank is None or rank[1] == "0":
            found[match[1]] += float(match[3])
    return dict(found)


class Watch:
    """Reads the servers of a pool. All methods but ``pop`` belong to the engine's event loop."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._counters: dict[Worker, dict[str, float]] = {}
        self._grown: defaultdict[str, float] = defaultdict(float)
        self._gauges: defaultdict[str, list[float]] = defaultdict(list)

    async def read_once(self) -> None:
        """Reads the counters of every serving worker; one that does not answer, or has no metrics, is left out."""
        await asyncio.gather(*(self._read(worker, ()) for worker in self.pool.serving))

    async def poll_forever(self) -> None:
        """Reads again and again until cancelled, also what stands at the moment: meant for while requests run."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.gather(*(self._read(worker, GAUGES) for worker in self.pool.serving))

    async def _read(self, worker: Worker, gauges: Iterable[str]) -> None:
        try:
            text = await worker.client.text("/metrics")
        except (ServerFailure, Refused):
            return
        now, before = read(text, COUNTERS), self._counters.get(worker)
        for name, value in now.items():
            # The first reading of a server is its past; a counter that fell belongs to a restarted one.
            last = value if before is None else before.get(name, 0.0)
            self._grown[name] += value - last if value >= last else value
        self._counters[worker] = now
        for name, value in read(text, gauges).items():
            self._gauges[name].append(value)

    def pop(self, seconds: float) -> dict[str, float]:
        """Metrics since the last ``pop``, of which ``seconds`` were spent generating; servers may not say all."""
        grown, gauges = dict(self._grown), dict(self._gauges)
        self._grown.clear()
        self._gauges.clear()
        out: dict[str, float] = {}
        if grown.get("prompt_tokens_total"):
            out["engine/cache_hit_rate"] = grown.get("cached_tokens_total", 0.0) / grown["prompt_tokens_total"]
        if "generation_tokens_total" in grown and seconds > 0:
            out["engine/server_tokens_per_s"] = grown["generation_tokens_total"] / seconds
        if "num_retracted_requests_total" in grown:
            out["engine/retractions"] = grown["num_retracted_requests_total"]
        for name, key in (("num_running_reqs", "running"), ("num_queue_reqs", "queued"), ("token_usage", "kv_used")):
            if values := gauges.get(name):
                out[f"engine/{key}_mean"] = sum(values) / len(values)
                out[f"engine/{key}_max"] = max(values)
        return out


def ledger_metrics(ledger: Ledger, seconds: float) -> dict[str, float]:
    """A step's ledger as metrics; every reason that occurred has its own key."""
    dropped = sum(ledger.dropped.values())
    out = {
        "engine/requested": ledger.requested,
        "engine/delivered": ledger.delivered,
        "engine/dropped": dropped,
        "engine/cancelled": ledger.cancelled,
        "engine/retries": sum(ledger.retried.values()),
        "engine/generate_s": seconds,
    }
    out |= {f"engine/dropped_{reason}": count for reason, count in ledger.dropped.items()}
    out |= {f"engine/retried_{reason}": count for reason, count in ledger.retried.items()}
    if ledger.prompt_tokens:
        out["engine/cached_share"] = ledger.cached_tokens / ledger.prompt_tokens
    if seconds > 0:
        out["engine/samples_per_s"] = ledger.delivered / seconds
    return {key: float(value) for key, value in out.items()}
