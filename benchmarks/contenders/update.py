"""The update alone, of made-up rollouts: seconds of each, and the memory that its program plans for and uses.

``python -m benchmarks.contenders.update '{"n": 512, ...}' <xla|blockwise> <shared|repeated>``; ``repeated`` computes
the prompt anew for every rollout, with the same program in other shapes, so that nothing else differs.
"""

from __future__ import annotations

import sys
import time

import jax

from benchmarks.contenders import ours
from benchmarks.contenders import work as shared
from benchmarks.contenders.work import Work
from brorl_jax.data.packing import Layout
from brorl_jax.learner.step import Compute
from brorl_jax.types import Group


def run(work: Work, attention: str, prompts: str) -> None:
    rows = 1 if prompts == "repeated" else min(work.n, work.rows)
    layout = Layout(slots=work.rows // rows, rows=rows, row_tokens=work.response_tokens)
    trainer = ours.Trainer(work, layout, Compute(attention=attention))
    groups = ours.made_up(work)
    if prompts == "repeated":
        trainer.batch(groups, 0)  # advantages are a group's
        packed = [Group(g.prompt, [s]) for g in groups for s in g.samples]
    else:
        packed = groups
    batch = trainer.batch(packed, 0)
    update = trainer.train_step.lower(trainer.state, batch).compile()  # type: ignore[attr-defined]
    plan, state = update.memory_analysis(), trainer.state
    shared.reset_peak()  # compilers need memory, too
    before, seconds, busy, trained = shared.memory("VmRSS"), [], [], 0
    for _ in range(work.steps + 1):
        others, start = shared.others_seconds(), time.perf_counter()
        state, metrics, _ = update(state, batch)
        trained = int(jax.block_until_ready(metrics)["batch/tokens"])
        seconds.append(time.perf_counter() - start)
        busy.append(max(0.0, (shared.others_seconds() - others) / seconds[-1]))
    shared.report(
        "brorl_jax",
        ours.PACKAGES,
        seconds=seconds,
        others_cores=max(busy[1:]),
        trained_tokens=trained,
        micro_batches=int(batch.n_micro),
        compiled_temp_bytes=plan.temp_size_in_bytes,
        rss_before_gib=before,
        rss_peak_gib=shared.memory("VmHWM"),
        parameters=sum(x.size for x in jax.tree.leaves(state.params)),
    )


if __name__ == "__main__":
    run(shared.from_argv(), *sys.argv[2:])
