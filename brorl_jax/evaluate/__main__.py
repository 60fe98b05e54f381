"""Scores a model, or a checkpoint of a run, on benchmarks.

    python -m brorl_jax.evaluate --config=configs/eval/paper.py --model=<path or hub id[@revision]> --out=runs/eval/a
    python -m brorl_jax.evaluate --config=configs/quickstart.py --checkpoint=runs/quickstart --step=40

The config's ``data.eval``, ``eval``, ``rollout`` and ``grading`` say what is asked, how often, and how it is sampled.
``--out``, for a checkpoint ``<run>/eval/at_<step>`` if not given, keeps every finished prompt (``prompts.jsonl``): the
same command completes an interrupted evaluation. It ends with ``scores.json`` and ``scores.md``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict

from brorl_jax import config as config_lib
from brorl_jax import xla
from brorl_jax.commandline import guarded, make_folder, parser, print_dry_run
from brorl_jax.config import Config
from brorl_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "Directory or hub id, with @revision if wanted.")
flags.DEFINE_string("checkpoint", None, "Or the --workdir of a run.")
flags.DEFINE_string("step", "last", "Which checkpoint of the run: last, best (by its own evaluations), or a step.")
flags.DEFINE_string("out", None, "Where results are kept, and completed from; has a default for a checkpoint.")


def _finish(config: Config) -> None:
    if bool(FLAGS.model) == bool(FLAGS.checkpoint):
        raise UserError("name what to evaluate: either --model=<directory or hub id> or --checkpoint=<workdir>")
    if FLAGS.model:
        config.model.path, _, config.model.revision = FLAGS.model.partition("@")
    else:
        _use_model_of(config, Path(FLAGS.checkpoint))
    if FLAGS.step not in ("last", "best") and not FLAGS.step.isdigit():
        raise UserError(f"--step={FLAGS.step}: must be last, best or a number")
    config_lib.validate(config, purpose="evaluate")
    if FLAGS.model and not FLAGS.dry_run and not FLAGS.out:
        raise UserError("--out is missing; name the folder for the results, or use --dry_run")


def _use_model_of(config: Config, workdir: Path) -> None:
    """Takes the run's model, its system prompt and its stop ids in place of the config's."""
    try:
        run = ConfigDict(json.loads((workdir / "config.json").read_text()))
        config.model.update(run.model)
        config.data.system_prompt = run.data.system_prompt
        config.rollout.stop_ids = tuple(run.rollout.stop_ids)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"--checkpoint={workdir}: cannot use {workdir / 'config.json'}: {error}") from error


def run(_: list[str]) -> None:
    """Evaluates, from wherever the last interruption left it, and prints the table."""
    config = FLAGS.config
    if FLAGS.dry_run:
        print_dry_run(config)
        return
    if FLAGS.out:
        make_folder("--out", Path(FLAGS.out))
    xla.set_cpu_flags(devices=config_lib.derived(config)["devices"])
    from brorl_jax.evaluate import standalone  # late: importing jax takes seconds, a wrong flag should not
    from brorl_jax.interrupt import Interrupted, Stop

    logging.set_verbosity(logging.WARNING)
    checkpoint = (Path(FLAGS.checkpoint), FLAGS.step) if FLAGS.checkpoint else None
    with Stop() as stop:
        try:
            standalone.run(config, checkpoint, Path(FLAGS.out) if FLAGS.out else None, stop.check)
        except Interrupted as signal:
            print(f"{signal}: stopped. The same command completes the evaluation.", file=sys.stderr)
            sys.exit(128 + signal.signum)


if __name__ == "__main__":
    app.run(guarded(run), flags_parser=parser("configs/eval/paper.py", _finish))
