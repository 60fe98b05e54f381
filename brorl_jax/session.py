"""A run: its parts, its host state, and how both are made, saved and restored."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax

from brorl_jax import assemble, evaluate, overlap, processes, rehearsal, warmup, watchdog
from brorl_jax import config as config_lib
from brorl_jax.assemble import Model
from brorl_jax.checkpoint import Checkpointer
from brorl_jax.collect import Collected
from brorl_jax.config import Config
from brorl_jax.data.stream import PromptStream
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Stop
from brorl_jax.learner.state import TrainState
from brorl_jax.learner.step import make_score, make_train_step
from brorl_jax.metrics import PhaseTimer
from brorl_jax.models import sharding
from brorl_jax.report.collect import flatten
from brorl_jax.rewards import Grader, self_test
from brorl_jax.rollout.api import Engine
from brorl_jax.types import Group, Prompt

SELF_TEST_PROMPTS = 64  # of each source, graded with their own gold answer before anything is trained


@dataclasses.dataclass(kw_only=True)
class Session:
    """The parts of a run and where it stands.

    Attributes:
        state: The learner's state, on the mesh.
        step: Steps done.
        carried: Groups kept by the last step beyond its need.
        ahead: The next step's groups where they were collected beside the last step's updates; with the carried ones.
        last_reset: Step of the last reference reset.
        evals: ``(step, held-out pass@1)`` of every evaluation.
        owes_evaluation: That of ``step`` was given up.
    """

    config: Config
    workdir: Path
    model: Model
    held_out: dict[str, list[Prompt]]
    prompts: PromptStream
    engine: Engine
    grader: Grader
    optimizer: optax.GradientTransformation
    train_step: Callable[..., Any]
    score: Callable[..., Any]
    set_advantages: Callable[[list[Group], int], None]
    mass_balance: Callable[..., dict[str, float]]
    checkpointer: Checkpointer
    timer: PhaseTimer
    stop: Stop
    state: TrainState
    step: int = 0
    carried: list[Group] = dataclasses.field(default_factory=list)
    ahead: Collected | None = None
    last_reset: int = 0
    evals: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    owes_evaluation: bool = False

    @property
    def records(self) -> Path:
        """Where this process keeps its metrics: ``workdir``, unless it is one of several and not the first."""
        return processes.folder(self.workdir)

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides arrays."""
        return {
            "step": self.step,
            "prompts": self.prompts.state(),
            "last_reset": self.last_reset,
            **self.evaluations(),
        }

    def evaluations(self) -> dict[str, Any]:
        """The part of the host's state that an evaluation changes."""
        return {"evals": self.evals, "owes_evaluation": self.owes_evaluation}

    def save(self, score: float | None = None) -> None:
        """Checkpoints the run as it stands, unless that was done; ``score`` is this step's held-out pass@1, if any."""
        if self.checkpointer.latest != self.step:
            groups, host = self.carried, self.host_state()
            if self.ahead is not None:
                groups, host["ahead"] = overlap.to_record(self.ahead)
            self.checkpointer.save(self.step, self.state, groups, host, score)


def open_session(config: Config, workdir: Path, stop: Stop, grader: Grader) -> Session:
    """Builds every part of a run, then restores its newest checkpoint or makes the weights, warm start included.

    The grader is the caller's to close.

    Raises:
        UserError: Something is missing, or the data or the model are not those of the checkpoint.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with _no_tokenizer_of_a_refused_run(config, workdir):
        model = processes.writer_first(lambda: assemble.build_model(config, workdir), "the model")
        try:
            held_out = assemble.held_out_prompts(config, model.tokenizer)
            prompts = assemble.prompt_stream(config, config.data.train, model.tokenizer, held_out)
            processes.check_same(prompts.state()["depends_on"], "the training data")
            _self_test(config, model, held_out, grader)
        except (ValueError, FileNotFoundError) as error:
            raise UserError(str(error)) from error
    optimizer = assemble.optimizer(config, assemble.learning_rate(config), config.optim.warmup_steps)
    checkpointer = Checkpointer(workdir, keep=config.checkpoint.keep, tidy=True)
    make_state, placed = assemble.training_state_maker(config, model, optimizer)
    restored = _restore(checkpointer, placed, prompts)
    if processes.is_writer():
        _write_config(config, workdir, resuming=restored is not None)  # not before: a refused config leaves no trace
    if restored is None:
        weights = model.weights()
        if config.warmup.steps:
            measure = _measure(config, model, held_out, grader, stop)
            weights = warmup.run(config, workdir, model, weights, held_out, stop, measure)
        restored = {"state": make_state(weights)}
    session = Session(
        config=config,
        workdir=workdir,
        model=model,
        held_out=held_out,
        prompts=prompts,
        engine=assemble.build_engine(
            config, model, workdir=workdir, incarnation=restored.get("step", 0), check=processes.lone(stop.check)
        ),
        grader=grader,
        optimizer=optimizer,
        train_step=make_train_step(model.cfg, assemble.objective(config), model.compute, optimizer, placed),
        score=make_score(model.cfg, model.compute),
        set_advantages=assemble.advantage_setter(config),
        mass_balance=assemble.mass_balance(config, model),
        checkpointer=checkpointer,
        timer=PhaseTimer(annotate=jax.profiler.TraceAnnotation),
        stop=stop,
        **restored,
    )
    try:
        session.save()
        if config.train.rehearse and session.step < config.train.steps:
            watchdog.alive("the rehearsal")
            session.state = rehearsal.rehearse(config, model, session.state, session.train_step, session.score)
        watchdog.alive("publish")
        session.engine.publish(sharding.local_copy(session.state.params), int(session.state.updates))
    except BaseException:
        session.engine.close()  # servers that it started, perhaps
        raise
    return session


@contextlib.contextmanager
def _no_tokenizer_of_a_refused_run(config: Config, workdir: Path) -> Iterator[None]:
    """All that a new run has written so far is the tokenizer trained for it: an error takes that along."""
    try:
        yield
    except BaseException:
        if not (config.model.path or assemble.has_checkpoint(workdir)) and processes.is_writer():
            shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
        raise


def _measure(
    config: Config, model: Model, held_out: dict[str, list[Prompt]], grader: Grader, stop: Stop
) -> Callable[[Any], float]:
    """Held-out pass@1 of weights, by the embedded engine: servers would load weights anew for every look."""
    engine = assemble.local_engine(config, model)

    def measure(params: Any) -> float:
        engine.publish(sharding.local_copy(params), 0)
        scores, _ = evaluate.held_out_scores(
            config, model.tokenizer, engine, grader, held_out, processes.lone(stop.check)
        )
        return scores["eval/pass@1"]

    return measure


def _restore(checkpointer: Checkpointer, placed: TrainState, prompts: PromptStream) -> dict[str, Any] | None:
    """The session's fields from the newest checkpoint, or None without one. Moves ``prompts`` to its position."""
    if checkpointer.latest is None:
        return None
    try:
        state, groups, host = checkpointer.restore(placed)
        prompts.restore(host["prompts"])
    except ValueError as error:
        raise UserError(f"cannot resume from {checkpointer.directory}: {error}") from error
    evals = [(int(step), float(score)) for step, score in host["evals"]]
    ahead = overlap.from_record(groups, host["ahead"]) if "ahead" in host else None
    return {
        "state": state,
        "carried": [] if ahead else groups,
        "ahead": ahead,
        "step": host["step"],
        "last_reset": host["last_reset"],
        "evals": evals,
        "owes_evaluation": host.get("owes_evaluation", False),  # absent in checkpoints of earlier versions
    }


def _self_test(config: Config, model: Model, held_out: dict[str, list[Prompt]], grader: Grader) -> None:
    """Gold answers must score 1 before anything is trained on scores."""
    for name, source in config.data.train.items():
        prompts = assemble.prompt_stream(config, {name: source}, model.tokenizer, {}).take(SELF_TEST_PROMPTS)
        self_test(prompts, grader)
    for prompts in held_out.values():
        self_test(prompts[:SELF_TEST_PROMPTS], grader)


def _write_config(config: Config, workdir: Path, *, resuming: bool) -> None:
    """Saves the resolved config; on a resume with another one, says what changed and keeps the old file beside it."""
    path = workdir / "config.json"
    text = config_lib.to_json(config)
    if resuming and path.exists() and path.read_bytes() != text.encode():
        try:
            old, new = flatten(json.loads(path.read_text())), flatten(json.loads(text))
        except (ValueError, AttributeError) as error:
            old = new = {}
            print(f"note: {path} can't be compared with this config ({error})", file=sys.stderr)
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                print(f"note: resuming with {key} = {new.get(key)!r}, was {old.get(key)!r}", file=sys.stderr)
        path.rename(workdir / f"config.until_{int(path.stat().st_mtime)}.json")
    path.write_text(text)
