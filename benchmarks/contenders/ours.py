"""brorl_jax: the parts of its training loop, without evaluation, checkpoints and logs.

``python -m benchmarks.contenders.ours '{"n": 512, ...}' [memory]``; with ``memory``, only the update, of made-up
rollouts, and what it needs.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import work as shared
from benchmarks.contenders.work import Work
from brorl_jax import batches
from brorl_jax.data.packing import Layout
from brorl_jax.learner import advantages, losses, mismatch, optim, reduce
from brorl_jax.learner import state as state_lib
from brorl_jax.learner.step import Compute, Objective, make_train_step
from brorl_jax.models import sharding, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.api import Sampling, request
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.types import Batch, Finish, Group, Prompt, Sample, Status

PACKAGES = ("jax", "jaxlib", "optax")


def model(work: Work) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocab_size=work.vocab,
        hidden=work.width,
        layers=work.layers,
        heads=work.heads,
        kv_heads=work.kv_heads,
        head_dim=work.width // work.heads,
        ffn=work.ffn,
        max_positions=work.prompt_tokens + work.response_tokens,
    )


def objective(max_tokens: int) -> Objective:
    """PPO clip over all tokens, one update per step, no reference."""
    return Objective(
        policy=losses.bind("ppo_clip", {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 0.0}),
        weights=reduce.get("token"),
        mismatch=mismatch.get("none"),
        kl=None,
        kl_coef=0.0,
        max_tokens=max_tokens,
        on_policy=True,
    )


class Trainer:
    """Weights, optimiser and the compiled update."""

    def __init__(self, work: Work, layout: Layout, compute: Compute) -> None:
        self.cfg, self.layout, self.mesh = model(work), layout, sharding.make_mesh()
        optimizer = optim.make_optimizer(
            work.learning_rate, warmup_steps=0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=work.clip_norm
        )
        self.train_step = make_train_step(self.cfg, objective(work.response_tokens), compute, optimizer)

        def create() -> state_lib.TrainState:
            params = transformer.init(jax.random.key(0), self.cfg, jnp.float32)
            return state_lib.create(params, optimizer, reference=False)

        shardings = sharding.like_weights(self.mesh, self.cfg, jax.eval_shape(create))
        self.state = jax.jit(create, out_shardings=shardings)()

    def batch(self, groups: list[Group], step: int) -> Batch:
        """Rewards, advantages and packing."""
        for sample in (s for g in groups for s in g.samples):
            sample.status, sample.reward = Status.TRUNCATED, shared.reward(int(sample.tokens[0]))
        estimate = functools.partial(advantages.get("grpo"), normalise="none")
        batches.set_advantages(groups, step, estimate=estimate, shape=lambda r, *_, **__: r, clip=0.0)
        return batches.pack_updates(groups, self.layout, 1, self.mesh)[0]


def prompts(work: Work, step: int) -> list[Prompt]:
    def one(i: int) -> Prompt:
        return Prompt(f"bench/{step}/{i}", np.array(work.prompt(step, i), np.int32), "", "", "", "bench")

    return [one(i) for i in range(work.prompts)]


def made_up(work: Work) -> list[Group]:
    """Groups of random tokens."""
    rng = np.random.default_rng(0)

    def sample(i: int) -> Sample:
        tokens = rng.integers(work.vocab, size=work.response_tokens, dtype=np.int32)
        return Sample(i, i, tokens, np.zeros(len(tokens), np.float32), Finish.LENGTH, 0)

    return [Group(p, [sample(i) for i in range(work.n)]) for p in prompts(work, 0)]


def run(work: Work) -> None:
    """Whole steps."""
    rows = min(work.n, work.rows)
    trainer = Trainer(work, Layout(slots=work.rows // rows, rows=rows, row_tokens=work.response_tokens), Compute())
    before = jax.device_get(trainer.state.params)
    engine = LocalEngine(trainer.cfg, rows=work.samples, chunk=work.response_tokens)
    engine.publish(trainer.state.params, 0)
    sampling = Sampling(max_tokens=work.response_tokens)
    meter = shared.Meter()
    generate = meter.generation(lambda requests: list(engine.generate(requests, sampling)))
    for step in range(work.steps + 1):
        meter.begin()
        groups = generate([request(p, work.n, run_seed=0, step=step) for p in prompts(work, step)])
        batch = trainer.batch(groups, step)
        trainer.state, metrics, _ = trainer.train_step(trainer.state, batch)
        metrics = jax.device_get(metrics)
        engine.publish(trainer.state.params, step + 1)
        jax.block_until_ready(trainer.state)
        meter.generated(sum(len(s.tokens) for g in groups for s in g.samples))
        context = sum(len(g.prompt.tokens) * len(g.samples) for g in groups)
        meter.trained(metrics["batch/tokens"], context)
        meter.end()
    after = jax.device_get(trainer.state.params)
    moved = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)))
    _report(before, steps=meter.steps, moved=moved)


def run_memory(work: Work) -> None:
    """Two updates of made-up rollouts in micro-batches of one shape, whatever N is."""
    trainer = Trainer(work, Layout(slots=1, rows=work.micro_rows, row_tokens=work.response_tokens), Compute())
    batch = trainer.batch(made_up(work), 0)
    update = trainer.train_step.lower(trainer.state, batch).compile()  # type: ignore[attr-defined]
    plan = update.memory_analysis()
    state = trainer.state
    shared.reset_peak()  # compilers need memory, too
    before = shared.memory("VmRSS")
    for _ in range(2):
        state, metrics, _ = update(state, batch)
    trained = int(jax.block_until_ready(metrics)["batch/tokens"])
    _report(
        state.params,
        trained_tokens=trained,
        micro_batches=int(batch.n_micro),
        batch_bytes=sum(np.asarray(x).nbytes for x in batch),
        compiled_temp_bytes=plan.temp_size_in_bytes,
        compiled_argument_bytes=plan.argument_size_in_bytes,
        rss_before_gib=before,
        rss_peak_gib=shared.memory("VmHWM"),
    )


def _report(params: Any, **result: Any) -> None:
    shared.report("brorl_jax", PACKAGES, parameters=sum(x.size for x in jax.tree.leaves(params)), **result)


if __name__ == "__main__":
    (run_memory if sys.argv[2:] == ["memory"] else run)(shared.from_argv())
