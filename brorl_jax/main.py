"""Trains one experiment, or prints what it would be.

    python -m brorl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m brorl_jax.main --config=configs/brorl_n512.py --config.rollout.n=64 --dry_run

``--config.<field>=<value>`` overrides any field of the config. The same command resumes an interrupted run. A mistake
in flags or config ends with one line on stderr and exit status 2 before anything is imported, loaded or written.
"""

from __future__ import annotations

import os
import pathlib

from absl import app, flags, logging

from brorl_jax import config as config_lib
from brorl_jax import processes, profiling, xla
from brorl_jax.commandline import guarded, make_folder, parser, print_dry_run
from brorl_jax.config import Config
from brorl_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Where the run is written, and resumed from.")
flags.DEFINE_string("processes", "1", "How many processes train together, or slurm: as srun says.")
flags.DEFINE_integer("process_id", None, "Number of this one, from 0.")
flags.DEFINE_string("coordinator", "", "host:port of process 0, reachable by all.")
flags.DEFINE_string("profile", "", "Steps to trace into <workdir>/profile, such as 3 or 3:5, both included.")


def _finish(config: Config) -> None:
    config_lib.validate(config)
    profiling.parse(FLAGS.profile, config.train.steps)
    processes.check(config, _place().count)
    if not FLAGS.dry_run and not FLAGS.workdir:
        raise UserError("--workdir is missing; name the folder of the run, or use --dry_run")


def _place() -> processes.Place:
    return processes.place(FLAGS.processes, FLAGS.process_id, FLAGS.coordinator, os.environ)


def run(_: list[str]) -> None:
    """Prints the dry run, or trains."""
    config = FLAGS.config
    if FLAGS.dry_run:
        print_dry_run(config)
        return
    place = _place()
    make_folder("--workdir", pathlib.Path(FLAGS.workdir))
    xla.set_cpu_flags(devices=config_lib.derived(config)["devices"] // place.count)
    logging.set_verbosity(logging.WARNING)  # jax, orbax and tensorboardX talk at length
    with processes.together(place, config, FLAGS.workdir):
        _train(config)


def _train(config: Config) -> None:
    from brorl_jax import train  # late: importing jax takes seconds, a wrong flag should not

    steps = profiling.parse(FLAGS.profile, config.train.steps)
    train.run(config, pathlib.Path(FLAGS.workdir), profile=steps)


if __name__ == "__main__":
    app.run(guarded(run), flags_parser=parser("configs/quickstart.py", _finish))
