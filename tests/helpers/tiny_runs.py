"""Whole runs of a tiny model: seconds each, and every group worth training on. For the tests of the loop.

Rewards come from a verifier that calls half of all answers right, so that a random model has mixed groups at once.
Compiled programs are kept from run to run; a run without that is 3 seconds slower.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from brorl_jax import assemble, session, train, warmup
from brorl_jax.config import default, source, to_json
from brorl_jax.learner.step import make_next_token, make_score, make_train_step
from brorl_jax.rewards import registry

PROMPTS = 12


def _coin(answer: str, prompt: Any) -> float:
    """1 for the gold answer, and for every other answer with probability 1/2, by its checksum."""
    return float(answer == prompt.gold or zlib.crc32(f"{prompt.gold}/{answer}".encode()) % 2)


if "coin" not in registry.names():  # this module may be imported under two names
    registry.register("coin", default_format="whole", where="inline")(_coin)


def write_tables(folder: Path, prompts: int = PROMPTS) -> None:
    """``train.jsonl`` and ``eval.jsonl``: questions of one length, so that shapes repeat."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, verb, count in (("train", "say", prompts), ("eval", "tell", 3)):
        rows = [{"question": f"{verb} {10 + i}", "answer": str(5 * i)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, prompts: int = PROMPTS, **changes: Any) -> Any:
    """4 prompts x 4 samples of at most 6 tokens; ``changes`` as ``algo__kl__coef=0.1``. Tables go to ``folder``."""
    write_tables(folder, prompts)
    c = default()
    c.data.train.small = source("jsonl", path=str(folder / "train.jsonl"), verifier="coin")
    c.data.eval.held = source("jsonl", path=str(folder / "eval.jsonl"), verifier="coin")
    c.data.warmup.gold = source("jsonl", path=str(folder / "train.jsonl"), verifier="coin")
    c.data.max_prompt_tokens = 16
    c.model.new.update(family="qwen3", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, vocab_size=300)
    c.rollout.update(prompts_per_step=4, n=4, max_tokens=6, stop_ids=tuple(range(3, 60)))
    c.rollout.local.update(rows=16, chunk=6)
    c.algo.updates_per_step = 1
    c.algo.kl.coef = 0.0
    c.optim.update(lr=1e-2, base_samples=16)
    c.batch.update(slots=4, rows=4, row_tokens=6)
    c.train.steps = 4
    c.train.rehearse = False
    c.checkpoint.update(every=0, keep=2)
    c.warmup.batch = 4
    c.log.tensorboard = False
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return c


_PROGRAMS: dict[Any, Any] = {}


def _kept(make: Any, key: Any) -> Any:
    if key not in _PROGRAMS:
        _PROGRAMS[key] = make()
    return _PROGRAMS[key]


def keep_programs(monkeypatch: Any) -> None:
    """Compiles equal programs once per process, whichever run asks for them."""

    def memo(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
            algo = {k: v for k, v in config.algo.to_dict().items() if k != "reference"}  # read by the loop only
            parts = [str(algo), to_json(config.optim), config.rollout.max_tokens, str(args), str(kwargs)]
            return _kept(lambda: function(config, *args, **kwargs), (name, *parts))

        return wrapped

    def train_step(cfg: Any, objective: Any, compute: Any, optimizer: Any, *placed: Any) -> Any:
        key = ("step", cfg, id(objective), compute, id(optimizer))
        return _kept(lambda: make_train_step(cfg, objective, compute, optimizer, *placed), key)

    def score(cfg: Any, compute: Any) -> Any:
        return _kept(lambda: make_score(cfg, compute), ("score", cfg, compute))

    def next_token(cfg: Any, compute: Any) -> Any:
        return _kept(lambda: make_next_token(cfg, compute), ("next_token", cfg, compute))

    def state_maker(model: Any, optimizer: Any, *, original: Any = assemble.state_maker, **how: bool) -> Any:
        key = ("state", model.cfg, model.mesh, id(optimizer), *sorted(how.items()))
        return _kept(lambda: original(model, optimizer, **how), key)

    for name in ("objective", "sft_objective", "optimizer"):
        monkeypatch.setattr(assemble, name, memo(name, getattr(assemble, name)))
    monkeypatch.setattr(assemble, "state_maker", state_maker)
    monkeypatch.setattr(assemble, "make_next_token", next_token)
    monkeypatch.setattr(session, "make_train_step", train_step)
    monkeypatch.setattr(session, "make_score", score)
    monkeypatch.setattr(warmup, "make_train_step", train_step)


class Killed(BaseException):
    """Stands for kill -9: nothing in the package may catch it."""


def image(workdir: Path, to: Path) -> Path:
    """The workdir as a kill -9 at this moment leaves it; background writers may be at work."""

    def copy(source: str, target: str) -> None:
        try:
            shutil.copyfile(source, target)
        except FileNotFoundError:  # renamed meanwhile
            Path(target).unlink(missing_ok=True)

    for folder, _, files in os.walk(workdir):
        (to / Path(folder).relative_to(workdir)).mkdir(parents=True, exist_ok=True)
        for name in files:
            copy(f"{folder}/{name}", str(to / Path(folder).relative_to(workdir) / name))
    return to


def killed_at(monkeypatch: Any, at: int, config: Any, workdir: Path, to: Path) -> Path:
    """Runs until ``at`` steps are done; returns the image at that moment."""
    with monkeypatch.context() as patch:

        def step(s: Any, original: Any = train.step) -> Any:
            if s.step == at:
                image(workdir, to)
                raise Killed
            return original(s)

        patch.setattr(train, "step", step)
        try:
            train.run(config, workdir)
        except Killed:
            return to
    raise AssertionError(f"the run ended before step {at}")


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def rollouts(workdir: Path, step: int) -> list[dict[str, Any]]:
    """The rows of one step's rollout file."""
    with gzip.open(workdir / "rollouts" / f"step_{step:06d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def checkpoint(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpointed state by name, read by Orbax alone."""
    import jax

    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore((workdir / "checkpoints" / str(step) / "state").absolute())
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def host_record(workdir: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds besides arrays."""
    return json.loads((workdir / "checkpoints" / str(step) / "host" / "metadata").read_text())


def same_run(ours: Path, theirs: Path, steps: int) -> None:
    """Asserts bit-equal final states, the same rollouts byte for byte, and the same metrics without gap or repeat."""
    assert host_record(ours, steps) == host_record(theirs, steps)
    a, b = checkpoint(ours, steps), checkpoint(theirs, steps)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    for step in range(1, steps + 1):
        file = f"rollouts/step_{step:06d}.jsonl.gz"
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    rows, others = metrics(ours), metrics(theirs)
    assert [r["step"] for r in rows] == [r["step"] for r in others]
    for row, other in zip(rows, others, strict=True):
        timed = {k for k in {*row, *other} if k.startswith(("time", "throughput/", "memory/", "grading/"))}  # or cached
        assert {k: v for k, v in row.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
