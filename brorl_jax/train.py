"""The training loop, one step after another in nine numbered parts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from brorl_jax import assemble, batches, collect, evaluate, overlap, processes, report, throughput, watchdog
from brorl_jax import config as config_lib
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Interrupted, Stop
from brorl_jax.learner import optim, reference
from brorl_jax.learner import state as state_lib
from brorl_jax.metrics import MetricLogger, PhaseTimer, RolloutWriter, plain, rss_gib
from brorl_jax.models import hf, sharding
from brorl_jax.profiling import Profiler
from brorl_jax.progress import Progress
from brorl_jax.rollout.api import Request, request
from brorl_jax.session import Session, open_session
from brorl_jax.types import Group, Prompt

COUNTED = ("samples", "tokens")

Metrics = dict[str, float]
Fates = list[tuple[Group, str]]  # groups and what became of them, for the rollout files


def run(config: Config, workdir: Path, *, profile: range = range(0)) -> None:
    """Trains ``config`` in ``workdir``, or continues the run found there, and writes its report.

    Args:
        profile: Steps to be traced, into ``<workdir>/profile``.

    Raises:
        UserError: Something the user can mend, in one line.
        SystemExit: Stopped by a signal (status 128 + signal), or finished without a single update (status 1).
    """
    config = config_lib.freeze(config)
    with watchdog.watching(config.train.stall_timeout_s, processes.folder(workdir) / "stacks.txt"):
        with Stop() as stop, assemble.build_grader(config) as grader:
            try:
                session = open_session(config, workdir, stop, grader)
                with contextlib.closing(session.engine):
                    _loop(session, Profiler(profile, session.records / "profile"))
            except Interrupted as signal:
                if processes.is_writer():
                    print(f"{signal}: stopped. The same command resumes the run in {workdir}.", file=sys.stderr)
                sys.exit(128 + signal.signum)
        _finish(session)


def step(s: Session) -> tuple[Metrics, Fates]:
    """One step, from the next prompts to published weights."""
    # 1. prompts, 2. rollouts, 3. rewards and 4. filter: in rounds, until enough groups are worth training on
    collected = s.ahead or _collect(s, s.step, s.carried, s.timer, s.stop.check)
    metrics = collect.metrics(collected)
    if s.config.rollout.overlap and s.step + 1 < s.config.train.steps:
        ahead, figures = _update_and_collect(s, collected)
    else:
        ahead, figures = None, _update(s, collected)
    metrics |= figures
    s.carried, s.ahead, s.step = collected.carried, ahead, s.step + 1

    # 8. publish: the next sample comes from the new weights
    with s.timer("publish"):
        s.engine.publish(sharding.local_copy(s.state.params), int(s.state.updates))
    return metrics | s.engine.metrics(), _fates(collected)


def _update(s: Session, collected: collect.Collected) -> Metrics:
    """Trains on the groups of a step."""
    config, timer, groups = s.config, s.timer, collected.kept
    metrics: Metrics = {}

    # 5. advantages, from the shaped rewards of all groups together
    s.set_advantages(groups, s.step)

    # 6. batch: one per update, all of one shape, with the log-probabilities an update compares with
    several = config.algo.updates_per_step > 1  # even if a starved step has groups for one only
    with timer("pack"):
        layout, updates = assemble.layout(config), config.algo.updates_per_step
        packed = batches.pack_updates(groups, layout, updates, s.model.mesh, version=collected.version)
    with timer("score"):
        packed = batches.add_scores(packed, s.score, s.state, old=several)

    # diagnostics of these rollouts, before the weights move
    every = config.diagnostics.mass_balance_every
    if every and s.step % every == 0:
        with timer("diagnose"):
            metrics |= s.mass_balance(s.state.params, groups, version=int(s.state.updates))

    # 7. update
    with timer("update"):
        results = []
        for batch in packed:
            s.state, update, logp = s.train_step(s.state, batch)
            update = jax.device_get(update)
            watchdog.alive("an update")
            if int(s.state.updates) == 1:
                batches.check_first_update(update, s.model.compute.dtype)
            results.append((update, batch.old_logp if several else logp))
    metrics |= batches.metrics(groups, [update for update, _ in results])
    old_logps = [old_logp for _, old_logp in results]
    metrics |= batches.mismatch_metrics(packed, old_logps)
    _check_mismatch(s, metrics, collected, lambda: batches.worst_samples(groups, packed, old_logps))
    return metrics


def _update_and_collect(s: Session, collected: collect.Collected) -> tuple[collect.Collected | None, Metrics]:
    """``_update``, while the engine draws the next step's groups from the weights that this step begins with."""
    version, timer = int(s.state.updates), PhaseTimer(annotate=jax.profiler.TraceAnnotation)

    def work(check: Callable[[], None]) -> tuple[collect.Collected, float]:
        ahead = _collect(s, s.step + 1, collected.carried, timer, check)
        return ahead, timer.pop()["time/step_s"]

    with overlap.background(work) as future:
        metrics = _update(s, collected)
        metrics["overlap/staleness"] = overlap.staleness(collected.kept, version)
        started = time.perf_counter()
        try:
            with s.timer("rollout"):  # what the updates did not hide
                ahead, seconds = future.result()
        except Interrupted:  # by an engine that looks for signals itself; the loop stops once this step is recorded
            return None, metrics
        waited = time.perf_counter() - started
    overlap.check_versions(ahead, version)
    return ahead, metrics | {"overlap/collect_s": seconds, "overlap/hidden_s": seconds - waited}


def _collect(
    s: Session, step: int, carried: list[Group], timer: PhaseTimer, check: Callable[[], None]
) -> collect.Collected:
    """The groups of the step after ``step`` steps. Interrupted, it leaves the prompts as if it had not begun."""
    position = s.prompts.state()
    generate = _generator(s, step, timer, check)
    try:
        return collect.collect(s.prompts.take, generate, assemble.collection_rules(s.config), carried)
    except Interrupted:
        s.prompts.restore(position)  # nothing was updated: these prompts are still to come
        raise


def _generator(s: Session, step: int, timer: PhaseTimer, check: Callable[[], None]) -> Any:
    """The function from prompts to graded groups of a step; a prompt that comes again gets new seeds."""
    config, sampling = s.config, assemble.training_sampling(s.config, s.model.tokenizer)
    seen: Counter[str] = Counter()

    def generate(prompts: list[Prompt]) -> list[Group]:
        requests = []
        for prompt in prompts:
            first = seen[prompt.id] * config.rollout.n
            requests.append(request(prompt, config.rollout.n, run_seed=config.seed, step=step, first=first))
            seen[prompt.id] += 1

        def rollouts(share: list[Request]) -> list[Group]:
            return collect.rollouts(s.engine, s.model.tokenizer, share, sampling, s.grader, timer, check)

        return collect.shared(rollouts, requests, timer)

    return generate


def _fates(collected: collect.Collected) -> Fates:
    trained, carried = ({id(g) for g in groups} for groups in (collected.kept, collected.carried))
    new = {id(g) for g, _ in collected.judged}
    fates = [(g, "trained") for g in collected.kept if id(g) not in new]
    for group, verdict in collected.judged:
        fate = "trained" if id(group) in trained else "carried" if id(group) in carried else verdict
        fates.append((group, fate))
    return fates


def _loop(s: Session, profiler: Profiler) -> None:
    """Steps until ``train.steps``, or a stall of held-out accuracy. A signal leaves a checkpoint of the last step."""
    config, main = s.config, processes.is_writer()
    logger = MetricLogger(
        s.records,
        tensorboard=config.log.tensorboard and main,
        wandb_project=config.log.wandb_project if main else "",
        config=config.to_dict(),
    )
    writer = RolloutWriter(s.records, config.log.rollouts and main)
    logger.truncate_after(s.step or -1)  # the start is measured again unless a later checkpoint holds its result
    writer.truncate_after(s.step)
    total = config.train.steps
    title = processes.title(config.name)
    with logger, profiler, Progress(total, start=s.step, title=title, every=config.log.every) as progress:
        try:
            if s.step:
                progress.note(f"resuming after step {s.step}")
                if s.owes_evaluation:
                    _evaluate_late(s, logger)
            elif config.data.eval and config.eval.before_training:
                row = _evaluate(s)  # given up, it is measured anew on the resume
                logger.write(0, row)
                progress.update(0, row)
            s.timer.pop()
            s.grader.pop_metrics()  # of what came before the first step
            while s.step < total and not _stalled(s):
                with profiler.step(s.step + 1):
                    _record(s, *step(s), logger, writer, progress)
                s.stop.check_together()
        except Interrupted:
            s.save()
            s.checkpointer.close()
            raise


def _record(
    s: Session, metrics: Metrics, fates: Fates, logger: MetricLogger, writer: RolloutWriter, progress: Progress
) -> None:
    """9. record: evaluation, rollouts, metrics, checkpoint."""
    config, last = s.config, s.step == s.config.train.steps
    metrics |= {"optim/lr": _learning_rate(s)} | _reset_reference(s, metrics)
    if config.data.eval and config.eval.every and (s.step % config.eval.every == 0 or last):
        with s.timer("eval"):
            try:
                metrics |= _evaluate(s)
            except Interrupted:  # the loop stops once this step is recorded; the resumed run evaluates it
                s.owes_evaluation = True
        last = last or _stalled(s)
    writer.write(s.step, fates)
    metrics |= s.grader.pop_metrics() | _costs(s, metrics, [group for group, fate in fates if fate == "trained"])
    logger.write(s.step, metrics)
    # Last: what is logged beyond the newest checkpoint is set aside on a resume, what is missing stays missing.
    with s.timer("checkpoint"):
        score = dict(s.evals).get(s.step)
        best = score is not None and score >= max(value for _, value in s.evals)
        due = config.checkpoint.every and s.step % config.checkpoint.every == 0
        if due or best or last:
            s.save(score)
    progress.update(s.step, metrics)
    for message in s.grader.pop_errors():
        progress.note(f"step {s.step}: not graded: {message}")
    for warning in collect.warnings(metrics, first=s.step == 1):
        progress.note(f"step {s.step} {warning}")


def _stalled(s: Session) -> bool:
    return reference.stalled(s.evals, s.config.train.stop_stalled)


def _costs(s: Session, metrics: Metrics, trained: list[Group]) -> Metrics:
    """Seconds by phase, samples and response tokens generated per second of the whole step, speed of the updates."""
    times = s.timer.pop()
    updates = throughput.of_updates(s.model.cfg, trained, times["time/update_s"], s.model.mesh)
    rates = {f"throughput/{what}_per_s": metrics[f"{what}/generated"] / times["time/step_s"] for what in COUNTED}
    return times | rates | updates | {"memory/rss_gib": rss_gib()}


def _learning_rate(s: Session) -> float:
    """Of the last update that was not skipped, by the optimiser's own count."""
    counts = optax.tree_utils.tree_get_all_with_path(s.state.opt_state, "count")
    rate = optim.lr_schedule(assemble.learning_rate(s.config), s.config.optim.warmup_steps)
    return float(rate(jnp.maximum(jax.device_get(counts[-1][1]) - 1, 0)))


def _evaluate(s: Session) -> Metrics:
    """Held-out pass@1 with the present weights, also written to ``eval/``.

    Raises:
        Interrupted: A signal came, and this is the only process: then there is no score.
    """
    check = processes.lone(s.stop.check)
    metrics, rows = evaluate.held_out_scores(s.config, s.model.tokenizer, s.engine, s.grader, s.held_out, check)
    if processes.is_writer():
        evaluate.write(s.workdir, s.step, metrics, rows)
    if math.isfinite(metrics["eval/pass@1"]):  # an evaluation without a scored sample says nothing
        s.evals.append((s.step, metrics["eval/pass@1"]))
    return metrics


def _evaluate_late(s: Session, logger: MetricLogger) -> None:
    """The evaluation that a signal ended. The step's row and checkpoint become what they would have been."""
    if s.config.data.eval:  # the config may have changed
        logger.amend(s.step, _evaluate(s))
    s.owes_evaluation = False
    s.checkpointer.amend(s.step, s.evaluations(), dict(s.evals).get(s.step))


def _check_mismatch(
    s: Session, metrics: Metrics, collected: collect.Collected, worst: Callable[[], list[dict[str, Any]]]
) -> None:
    """Stops the run, its rollouts written and nothing checkpointed, when engine and trainer have drifted apart."""
    limit, step = s.config.algo.mismatch.stop_above, s.step + 1
    if limit and not metrics.get("mismatch/mean", 0.0) <= limit:  # NaN stops it, too
        dump = RolloutWriter(s.records, "all").write(step, _fates(collected))
        samples, file = worst(), s.records / f"mismatch_step_{step:06d}.json"
        named = {k: plain(v) for k, v in metrics.items() if k.startswith("mismatch/")}
        file.write_text(json.dumps({"step": step, "metrics": named, "worst": samples}, indent=1))
        s.checkpointer.close()
        raise UserError(
            f"step {step}: engine and trainer disagree by {metrics['mismatch/mean']:.3g} nats per token on average, "
            f"more than algo.mismatch.stop_above = {limit:g}; worst is sample {samples[0]['sample']} of "
            f"{samples[0]['prompt_id']!r}, see {file}; the step's rollouts are in {dump}, "
            f"the last checkpoint is of step {s.checkpointer.latest}"
        )


def _reset_reference(s: Session, metrics: Metrics) -> Metrics:
    """Makes the policy its own reference when one of the rules of ``algo.reference`` says so."""
    if s.state.reference is None:
        return {}
    rules = s.config.algo.reference
    reason = reference.reset_reason(
        s.step,
        s.last_reset,
        metrics.get("policy/kl_ref"),
        s.evals,
        every=rules.every,
        kl_spike=rules.kl_spike,
        stall=rules.stall,
    )
    if reason is None:
        return {"reference/reset": 0.0}
    s.state = state_lib.reset_reference(s.state, s.optimizer, reset_optimiser=rules.reset_optimiser)
    s.last_reset = s.step
    return {"reference/reset": 1.0, f"reference/reset_{reason}": 1.0}


def _finish(s: Session) -> None:
    """Writes the report, says where everything is and exports the weights."""
    watchdog.alive("the end of the run")
    s.checkpointer.close()
    weights = sharding.local_copy(s.state.params)
    if processes.is_writer():
        page = report.write_report([s.workdir])
        print(report.summary(s.workdir, page))
        try:
            hf.save_pretrained(s.workdir / "model", s.model.cfg, weights, s.model.tokenizer.directory)
        except FileExistsError as error:
            raise UserError(
                f"the run is done, its model not exported: {error}; the same command then exports it"
            ) from error
    updates, skipped = int(s.state.updates), int(s.state.skipped)
    processes.end_together("the report")
    if updates == skipped:
        sys.exit(f"error: no update was made in {s.step} steps ({skipped} skipped): see groups/* in metrics.jsonl")
