"""Checkpoints with Orbax: everything a resume needs, written in the background, complete or absent.

One checkpoint holds the learner's state, the groups that are there for the next step (carried into it, or all of them
where they are collected ahead), and a JSON record of the host's state (step, data position, last reference reset,
evaluations). The last ``keep`` are kept, and the best by evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from brorl_jax import atomic, processes
from brorl_jax.errors import UNUSABLE, UserError
from brorl_jax.learner.state import TrainState
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

FORMAT = 1  # of the host record; raise it when its meaning changes
METRIC = "eval/pass@1"

# Orbax warns at every save without a score; most steps have none.
logging.getLogger("absl").addFilter(lambda record: "did not provide metrics" not in str(record.msg))


def _score(metrics: Any) -> float:
    return metrics[METRIC]


class Checkpointer:
    """Checkpoints of one run, in ``<workdir>/checkpoints``.

    Args:
        workdir: The run's directory.
        keep: How many of the latest are kept, beside the best by held-out pass@1.
        tidy: Remove what saves that were killed have left. For the run alone: others may look while it saves.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, keep: int, tidy: bool = False) -> None:
        policies = checkpoint_managers
        self.directory = Path(workdir).resolve() / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(keep),
                        policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False),
                    ]
                ),
                best_fn=_score,  # without it Orbax writes no metrics: another process sees none
                enable_async_checkpointing=True,
                cleanup_tmp_directories=tidy,
            ),
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints."""
        return sorted(self._manager.all_steps())

    @property
    def best(self) -> int | None:
        """Step of the kept checkpoint with the highest held-out pass@1, if any was measured."""
        scored = {step: _score(metrics) for step in self.steps if (metrics := self._manager.metrics(step))}
        return max(scored, key=scored.__getitem__, default=None)

    def save(
        self, step: int, state: TrainState, carried: list[Group], host: dict[str, Any], score: float | None
    ) -> None:
        """Starts a save; the arrays are copied before it returns, so the state may be donated afterwards.

        Args:
            step: Steps done.
            score: Held-out pass@1 measured at this step, if it was.

        Raises:
            UserError: This checkpoint, or the one before, can't be written: the disk is full, for example.
        """
        arrays, meta = pack_groups(carried)
        record = {"format": FORMAT, "shapes": _shapes(_present(state)), "carried": meta, **host}
        with self._writable():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_present(state)),
                    carried=ocp.args.StandardSave(arrays),
                    host=ocp.args.JsonSave(record),
                ),
                metrics=None if score is None else {METRIC: float(score)},
            )

    def amend(self, step: int, host: dict[str, Any], score: float | None) -> None:
        """Replaces some of a complete checkpoint's host record, and adds the score that it was saved without.

        Orbax has no call for this, so it writes its files, each whole or not at all, the record last. The arrays are
        not saved again: until that was done there might be no checkpoint.
        """
        self.wait()
        if processes.is_writer():
            directory = self.directory / str(step)
            if score is not None:
                (directory / "metrics").mkdir(exist_ok=True)
                atomic.write_text(directory / "metrics" / "metrics", json.dumps({METRIC: float(score)}))
            record = directory / "host" / "metadata"
            atomic.write_text(record, json.dumps(json.loads(record.read_text()) | host))
        processes.barrier("a late evaluation")
        self._manager.reload()

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, list[Group], dict[str, Any]]:
        """The latest checkpoint, or that of ``step``, placed like ``like``.

        Raises:
            ValueError: It was written by another version of the format, holds a different model, or can't be read.
        """
        step = self.latest if step is None else step
        host = dict(self._read(step, host=ocp.args.JsonRestore())["host"])
        if host.pop("format") != FORMAT:
            raise ValueError(f"checkpoint {step} has another format; continue it with the version that wrote it")
        _check_shapes(step, host.pop("shapes"), _shapes(_present(like)))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _present(like))
        items = {"state": ocp.args.StandardRestore(abstract), "carried": ocp.args.StandardRestore()}
        restored = self._read(step, **items)
        carried = unpack_groups(restored["carried"], host.pop("carried"))
        return TrainState(**{"reference": None, **restored["state"]}), carried, host

    def restore_params(self, like: Any, step: int) -> Any:
        """The policy's weights alone, placed like ``like``.

        Raises:
            ValueError: The checkpoint holds a different model, or can't be read.
        """
        host = self._read(step, host=ocp.args.JsonRestore())["host"]
        saved = {name: shape for name, shape in host["shapes"].items() if name.startswith("params/")}
        _check_shapes(step, saved, _shapes({"params": like}))
        with self._readable(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            item = {"params": like}
            args = ocp.args.PyTreeRestore(
                item=item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                partial_restore=True,
            )
            return reader.restore(self.directory / str(step) / "state", args)["params"]

    def _read(self, step: int | None, **items: Any) -> Any:
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _readable(self, step: int | None) -> Iterator[None]:
        """Says of whatever reading a damaged checkpoint raises which one it is, and what there is instead."""
        try:
            yield
        except Exception as error:  # of orbax, tensorstore, json and the file system, which have no common base
            earlier = [s for s in self.steps if step is not None and s < step]
            instead = f"step {earlier[-1]} is the newest one" if earlier else "the run begins anew"
            raise ValueError(
                f"checkpoint {step} can't be read ({type(error).__name__}: {error!s:.200}). If it is damaged, move "
                f"{self.directory / str(step)} away; then {instead}."
            ) from error

    def wait(self) -> None:
        """Returns when every started save is complete; raises what ``save`` does."""
        with self._writable():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the manager; raises what ``save`` does."""
        with self._writable():
            self._manager.close()

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        """Says what a full disk means for the run; found later than it happens, since saves are in the background."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore's are ValueErrors that quote the system's number
            quoted = re.search(r"os_error_code='(\d+)'", str(error))
            number = int(quoted[1]) if quoted else getattr(error, "errno", None)
            if number not in UNUSABLE:
                raise
            self._manager.reload()
            newest = (
                "there is no complete one yet"
                if self.latest is None
                else f"the newest complete one is of step {self.latest}"
            )
            raise UserError(
                f"{self.directory}: a checkpoint can't be written ({os.strerror(number)}); {newest}. "
                "When that is mended, the same command goes on from there"
            ) from error


def _present(state: TrainState) -> dict[str, Any]:
    return {name: value for name, value in state._asdict().items() if value is not None}


def _shapes(tree: dict[str, Any]) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(np.shape(x)) for path, x in leaves}


def _check_shapes(step: int | None, saved: dict[str, list[int]], wanted: dict[str, list[int]]) -> None:
    different = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    if different:
        name = min(different, key=lambda name: name.startswith("opt_state"))  # moments say the same, less clearly
        raise ValueError(
            f"checkpoint {step} holds another state: {name} is {saved.get(name, 'absent')} there and "
            f"{wanted.get(name, 'absent')} with this config ({len(different)} arrays differ). "
            "Restore the old model, optim and algo.kl settings, or start in a new workdir."
        )


def pack_groups(groups: list[Group]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Arrays concatenated (JSON would be huge at paper scale), everything else as plain values."""
    samples = [s for g in groups for s in g.samples]
    empty = np.zeros(0, np.int32)
    arrays = {
        "lengths": np.array([len(s.tokens) for s in samples] or [0], np.int64),
        "tokens": np.concatenate([*(s.tokens for s in samples), empty, [0]]).astype(np.int32),
        "logp": np.concatenate([*(s.logp for s in samples), empty, [0]]).astype(np.float32),
    }

    def plain(sample: Sample) -> dict[str, Any]:
        skip = ("tokens", "logp", "advantage", "shaped_reward")
        values = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample) if f.name not in skip}
        return {**values, "reward": None if np.isnan(sample.reward) else float(sample.reward)}

    meta = [
        {
            "prompt": {**dataclasses.asdict(g.prompt), "tokens": g.prompt.tokens.tolist()},
            "samples": [plain(s) for s in g.samples],
        }
        for g in groups
    ]
    return arrays, meta


def unpack_groups(arrays: dict[str, Any], meta: list[dict[str, Any]]) -> list[Group]:
    """The groups that ``pack_groups`` was given."""
    # Once each: where ``arrays`` is a file, every look at it reads an array anew.
    lengths, tokens, logp = (np.asarray(arrays[name]) for name in ("lengths", "tokens", "logp"))
    ends = np.cumsum(lengths)
    at, groups = 0, []
    for entry in meta:
        prompt = Prompt(**{**entry["prompt"], "tokens": np.asarray(entry["prompt"]["tokens"], np.int32)})
        samples = []
        for values in entry["samples"]:
            span = slice(ends[at] - lengths[at], ends[at])
            reward = float("nan") if values["reward"] is None else values["reward"]
            converted = {"finish": Finish(values["finish"]), "status": Status(values["status"]), "reward": reward}
            samples.append(Sample(**{**values, **converted, "tokens": tokens[span], "logp": logp[span]}))
            at += 1
        groups.append(Group(prompt, samples))
    return groups
