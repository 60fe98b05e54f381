"""What a run writes and shows while it goes: metrics, rollouts, phase times, a progress display.

Files in the run's directory:
    metrics.jsonl             one JSON object per step, flat keys plus ``step`` and ``time`` (unix seconds)
    metrics.superseded.jsonl  lines of steps that a resume trains again, and torn lines; kept, never read back
    rollouts/step_000010.jsonl.gz   one row per sample

The local files are the record of the run: failing to write them raises. Everything else (TensorBoard, W&B, the
terminal) is a convenience: it may fail on any call, is then switched off with one warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from brorl_jax import atomic, watchdog
from brorl_jax.types import Group, Sample

log = logging.getLogger(__name__)


def clean_text(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD, so that any UTF-8 or JSON reader accepts it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain(value: Any) -> Any:
    """A JSON value: numpy and jax scalars become Python numbers, NaN and infinities ``None``, strings valid Unicode.

    Raises:
        TypeError: for anything that is not a scalar.
    """
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    raise TypeError(f"a metric must be one number, string or None; got {type(value).__name__}: {value!r:.80}")


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a JSON-lines file, and the lines that are none (a kill in mid-write leaves such a line)."""
    rows, torn = [], []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                torn.append(line)
    return rows, torn


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """``path`` becomes these rows, a line each, whole or not at all."""
    atomic.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


class Backend(Protocol):
    """Where metrics go besides the local file. Any call may raise."""

    def write(self, step: int, row: Mapping[str, Any]) -> None: ...
    def truncate_after(self, step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files under ``directory``."""

    def __init__(self, directory: Path):
        from tensorboardX import SummaryWriter

        self._open: Callable[..., Any] = functools.partial(SummaryWriter, logdir=str(directory))
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            # The suffix keeps files apart: their names otherwise differ only by the second they were opened in.
            self._writer = self._open(purge_step=self._purge_step, filename_suffix=f".{uuid.uuid4().hex[:8]}")
        for key, value in row.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """One Weights & Biases run; a resumed run continues it (its id is kept in ``<workdir>/wandb_id``)."""

    def __init__(self, workdir: Path, project: str, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = workdir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=project, name=workdir.name, dir=str(workdir), config=dict(config), id=run_id, resume="allow"
        )
        id_file.write_text(run_id)
        # Our own step as the axis: W&B drops points whose implicit step goes back, as it does after a resume.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log({**{k: v for k, v in row.items() if v is not None}, "step": step})

    def truncate_after(self, step: int) -> None:
        """Nothing to do: points of repeated steps are drawn over the earlier ones."""

    def close(self) -> None:
        self._run.finish()


class MetricLogger:
    """Appends one object per step to ``<workdir>/<stream>.jsonl``, then tells the optional backends.

    Args:
        workdir: The run's directory; created if absent.
        tensorboard: Also write TensorBoard events to ``<workdir>/tensorboard/<stream>``.
        wandb_project: Also log to this W&B project; empty for none.
        config: The resolved config, for W&B.
        stream: ``"metrics"``, or another name such as ``"warmup"`` for a stage with its own step count.

    A torn last line (kill in mid-write) is moved to ``<stream>.superseded.jsonl`` when the file is opened.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        tensorboard: bool = False,
        wandb_project: str = "",
        config: Mapping[str, Any] | None = None,
        stream: str = "metrics",
    ):
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / f"{stream}.jsonl"
        self._superseded = workdir / f"{stream}.superseded.jsonl"
        self._backends: dict[str, Backend] = {}
        self.last_step: int | None = None
        self._file: IO[str] | None = None
        self._keep(lambda row: True)
        if tensorboard:
            self._start("TensorBoard", lambda: TensorBoard(workdir / "tensorboard" / stream))
        if wandb_project:
            self._start("W&B", lambda: WandB(workdir, wandb_project, config or {}))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step: flat keys to scalars; NaN and infinities are stored as null.

        Raises:
            ValueError: ``step`` is not beyond the last step written (a resume calls ``truncate_after`` first).
            TypeError: a value is not a scalar.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"step {step} does not follow step {self.last_step}, the last one in {self.path}; "
                f"after a resume call truncate_after({step - 1}) first"
            )
        row = {"step": int(step), "time": round(time.time(), 3)}
        row |= {key: plain(value) for key, value in metrics.items()}
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.last_step = int(step)
        self._tell(lambda backend: backend.write(int(step), row))

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add to the row of ``step``, if that is the last one, what is measured later."""
        rows, _ = read_jsonl(self.path)
        if not rows or rows[-1]["step"] != step:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        late = {key: plain(value) for key, value in metrics.items()}
        rows[-1] |= late
        write_jsonl(self.path, rows)
        self._tell(lambda backend: backend.write(step, late))

    def truncate_after(self, step: int) -> int:
        """Set aside the lines beyond ``step``, the step of the checkpoint a run resumes from.

        They go to ``<stream>.superseded.jsonl``; the steps are trained and written again. Returns their number.
        """
        moved = self._keep(lambda row: row.get("step", 0) <= step)
        self._tell(lambda backend: backend.truncate_after(step))
        return moved

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._tell(lambda backend: backend.close())
        self._backends.clear()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file with the wanted lines, one per step and in order; the others are set aside first."""
        if self._file is not None:
            self._file.close()
            self._file = None
        rows, torn = read_jsonl(self.path)
        kept: dict[int, dict[str, Any]] = {}
        dropped: list[dict[str, Any]] = [{"torn": line} for line in torn]
        for row in rows:
            if not isinstance(row.get("step"), int) or not wanted(row) or row["step"] in kept:
                dropped.append(row)
            else:
                kept[row["step"]] = row
        self.last_step = max(kept, default=None)
        ends_well = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        if dropped or not ends_well:
            # Set aside before removing: a kill in between leaves a line twice, never nowhere.
            with self._superseded.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in dropped)
            write_jsonl(self.path, (kept[s] for s in sorted(kept)))
        return len(dropped)

    def _start(self, name: str, make: Callable[[], Backend]) -> None:
        try:
            self._backends[name] = make()
        except Exception as error:
            log.warning("%s logging is off: it could not be started (%r). metrics.jsonl has everything.", name, error)

    def _tell(self, call: Callable[[Backend], None]) -> None:
        for name, backend in list(self._backends.items()):
            try:
                call(backend)
            except Exception as error:
                del self._backends[name]
                log.warning("%s logging is switched off: it failed (%r). metrics.jsonl has everything.", name, error)


class RolloutWriter:
    """Writes the samples of each step to ``<workdir>/rollouts/step_<step>.jsonl.gz``.

    Read one with ``pandas.read_json(path, lines=True, dtype={"gold": str, "response": str})``. Columns: step,
    prompt_id, source, verifier, prompt, gold, sample, seed, response, n_tokens, finish, status, reward,
    shaped_reward, advantage, mean_logp (nats per token), weight_version, outcome (what became of the group).

    Args:
        workdir: The run's directory.
        mode: ``"all"`` or ``True``, ``"none"`` or ``False``, or how many groups to keep per step (int or digits).

    Raises:
        ValueError: for any other mode.
    """

    def __init__(self, workdir: str | os.PathLike[str], mode: str | int | bool):
        self.directory = Path(workdir) / "rollouts"
        if mode is True or mode == "all":
            self._limit: int | None = None
        elif mode is False or mode == "none":
            self._limit = 0
        elif str(mode).isdigit():
            self._limit = int(mode)
        else:
            raise ValueError(f'log.rollouts must be "all", "none" or a number of groups per step; got {mode!r}')

    def write(self, step: int, groups: Iterable[tuple[Group, str]]) -> Path | None:
        """Write (group, outcome) pairs; an outcome is ``"trained"``, ``"carried"`` or the reason it was dropped.

        A sample of a trained group that carries no reward gets the outcome ``"excluded: <status>"``. The file
        appears complete or not at all. Returns its path, ``None`` when the mode keeps nothing.
        """
        if self._limit == 0:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step_{step:06d}.jsonl.gz"
        tmp = path.with_suffix(".tmp")
        # mtime=0: the same rollouts give the same bytes. Streamed: a step's text may be gigabytes.
        with tmp.open("wb") as raw, gzip.GzipFile("", "wb", 4, raw, mtime=0) as file:
            for number, (group, outcome) in enumerate(groups):
                if self._limit is not None and number >= self._limit:
                    break
                for sample in group.samples:
                    row = _rollout_row(step, group, sample, outcome)
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        os.replace(tmp, path)
        return path

    def truncate_after(self, step: int) -> int:
        """Move the files of steps beyond ``step`` to ``rollouts/superseded/``; returns their number."""
        numbers = {p: p.name[5:].split(".")[0] for p in sorted(self.directory.glob("step_*.jsonl.gz"))}
        late = [p for p, number in numbers.items() if number.isdigit() and int(number) > step]  # others are not ours
        aside = self.directory / "superseded"
        for path in late:
            aside.mkdir(exist_ok=True)
            again = len(list(aside.glob(path.name.replace(".jsonl.gz", ".*"))))
            os.replace(path, aside / path.name.replace(".jsonl.gz", f".{again}.jsonl.gz"))
        return len(late)


def _rollout_row(step: int, group: Group, sample: Sample, outcome: str) -> dict[str, Any]:
    if outcome == "trained" and (sample.status is None or not sample.status.scored):
        outcome = f"excluded: {sample.status or 'not graded'}"
    prompt = group.prompt
    row = {
        "step": step,
        "prompt_id": prompt.id,
        "source": prompt.source,
        "verifier": prompt.verifier,
        "prompt": prompt.text,
        "gold": prompt.gold,
        "sample": sample.index,
        "seed": sample.seed,
        "response": sample.text,
        "n_tokens": len(sample.tokens),
        "finish": str(sample.finish),
        "status": None if sample.status is None else str(sample.status),
        "reward": sample.reward,
        "shaped_reward": sample.shaped_reward,
        "advantage": sample.advantage,
        "mean_logp": float(sample.logp.mean()) if len(sample.logp) else None,
        "weight_version": sample.weight_version,
        "outcome": outcome,
    }
    return {key: plain(value) for key, value in row.items()}


class PhaseTimer:
    """Adds up the seconds of each phase of a step.

    >>> timer = PhaseTimer()
    >>> with timer("rollout"):
    ...     pass
    >>> sorted(timer.pop())
    ['time/rollout_s', 'time/step_s']

    Args:
        annotate: Entered for each phase with its name, such as ``jax.profiler.TraceAnnotation``.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        annotate: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self._clock, self._annotate = clock, annotate
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; a phase entered several times in a step is summed, also when its body raises."""
        start = self._clock()
        watchdog.alive(phase)
        try:
            with self._annotate(phase):
                yield
        finally:
            watchdog.alive(f"the end of {phase}")
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def pop(self) -> dict[str, float]:
        """``time/<phase>_s`` of every phase and ``time/step_s``, the seconds since the last ``pop``; starts anew."""
        now = self._clock()
        times = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        times["time/step_s"] = now - self._since
        self._seconds, self._since = {}, now
        return times


def rss_gib() -> float:
    """Resident memory of this process in GiB (NaN where /proc is absent); logged as ``memory/rss_gib``."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return math.nan
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
