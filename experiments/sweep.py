"""Runs the arms of a sweep one after another, or prints their commands for a cluster.

    python -m experiments.sweep --config=configs/sweeps/n_fixed_samples.py --out=runs/sweeps/n --seeds 0 1 2
    python -m experiments.sweep --config=configs/sweeps/lr_rule.py --base=configs/quickstart.py --out=runs/sweeps/lr
    python -m experiments.sweep --config=... --out=... --print           # one command per line, for a job array
    python -m experiments.sweep --config=... --out=... --only $SLURM_ARRAY_TASK_ID

A sweep file names its base config (``BASE``) and its arms, overrides by name (``get_arms(base)``). Every arm is
validated before the first one starts. The same command goes on where it was cut off: finished arms are skipped, a begun
one resumes. Further ``--config.<field>=<value>`` go to every arm.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brorl_jax import config as config_lib
from brorl_jax.commandline import load, make_folder
from brorl_jax.config_fields import check_override
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Interrupted, Stop
from brorl_jax.metrics import read_jsonl
from experiments import files

POLL_S = 0.2


class Arm(NamedTuple):
    """One run: its directory, and the command that starts or resumes it."""

    name: str
    workdir: Path
    command: list[str]
    steps: int
    may_stall: bool

    @property
    def finished(self) -> bool:
        """It came to its end, export and report included, and no steps were added since."""
        rows, _ = read_jsonl(self.workdir / "metrics.jsonl")
        done = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
        last = ("model/config.json", "report.html")  # a report can also be asked for while it runs
        return (done >= self.steps or self.may_stall) and all((self.workdir / name).exists() for name in last)


def arm(name: str, base: str, overrides: Mapping[str, Any], workdir: Path) -> Arm:
    """An arm whose config is sound.

    Raises:
        UserError: The overrides name no field, or make a config that cannot run.
    """
    config = load(base)
    for path, value in overrides.items():
        check_override(path, config)
        *sections, leaf = path.split(".")
        node = config
        for section in sections:
            node = node[section]
        node[leaf] = type(node[leaf])(value)
    try:
        config_lib.validate(config)
    except UserError as error:
        raise UserError(f"arm {name}: {error}") from error
    flags = [f"--config.{path}={_flag(value)}" for path, value in overrides.items()]
    command = [sys.executable, "-m", "brorl_jax.main", f"--config={base}", f"--workdir={workdir}", *flags]
    return Arm(name, workdir, command, config.train.steps, config.train.stop_stalled > 0)


def _flag(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def read(file: str) -> tuple[str, Callable[[Any], dict[str, dict[str, Any]]]]:
    """The base config that a sweep names, and its function from a base config to overrides by arm.

    Raises:
        UserError: The file is no sweep.
    """
    if not Path(file).is_file():
        raise UserError(f"--config={file}: there is no such file; name one of configs/sweeps")
    names = runpy.run_path(file)
    if "BASE" not in names or "get_arms" not in names:
        raise UserError(f"--config={file}: a sweep needs BASE and get_arms(base)")
    return names["BASE"], names["get_arms"]


def arms(file: str, base: str | None, out: Path, seeds: Sequence[int], extra: Mapping[str, Any]) -> list[Arm]:
    """Every arm of the sweep ``file`` with every seed, seeds together so that a cut-off sweep has whole comparisons.

    Raises:
        UserError: The file is no sweep, or an arm cannot run.
    """
    own, get_arms = read(file)
    base = base or own
    chosen = get_arms(load(base))
    return [
        arm(f"{name}/seed_{seed}", base, {**overrides, "seed": seed, **extra}, out / name / f"seed_{seed}")
        for seed in dict.fromkeys(seeds)  # one named twice would be two jobs in one folder
        for name, overrides in chosen.items()
    ]


def run(todo: Sequence[Arm]) -> None:
    """Runs what is not finished, in order.

    Raises:
        UserError: An arm failed; those before it are kept.
    """
    for number, a in enumerate(todo):
        if a.finished:
            print(f"[{number + 1}/{len(todo)}] {a.name}: finished", flush=True)
            continue
        print(f"[{number + 1}/{len(todo)}] {a.name}: {shlex.join(a.command)}", flush=True)
        call(a.name, a.command)


def call(name: str, command: Sequence[str]) -> None:
    """Runs a command to its end; it ends with us, whatever way that is.

    Raises:
        UserError: It failed.
        Interrupted: A signal came; the command was told and has stopped at a safe place.
    """
    with Stop() as stop:
        # In a session of its own a Ctrl-C reaches it through us alone: once, since a second one would kill it.
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)
        while (status := child.poll()) is None:
            try:
                stop.check()
            except Interrupted as signal_:
                print(f"{signal_}: waiting for {name} to stop", file=sys.stderr, flush=True)
                child.terminate()
                child.wait()
                raise
            time.sleep(POLL_S)
    if status:
        raise UserError(f"{name} ended with status {status}; the same command goes on from here")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


@files.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Runs or prints a sweep; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.sweep", description="Runs the arms of a sweep.")
    parser.add_argument("--config", required=True, metavar="FILE", help="a file of configs/sweeps")
    parser.add_argument("--base", metavar="FILE", help="another base config than the sweep's own")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="runs go to DIR/<arm>/seed_<seed>")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--print", action="store_true", help="print the commands instead")
    parser.add_argument("--only", type=int, metavar="I", help="run the I-th printed command only, from 0")
    args, rest = parser.parse_known_args(argv)
    extra = {}
    for item in rest:
        path, equals, value = item.removeprefix("--config.").partition("=")
        if not item.startswith("--config.") or not equals:
            raise UserError(f"{item}: not an option; overrides are --config.<field>=<value>")
        try:
            extra[path] = json.loads(value)
        except ValueError:
            extra[path] = value
    todo = arms(args.config, args.base, args.out, args.seeds, extra)
    if args.only is not None:
        if not 0 <= args.only < len(todo):
            raise UserError(f"--only {args.only}: there are commands 0 to {len(todo) - 1}")
        todo = todo[args.only : args.only + 1]
    if args.print:
        print("\n".join(shlex.join(a.command) for a in todo))
    else:
        make_folder("--out", args.out)
        run(todo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
