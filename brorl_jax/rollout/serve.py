"""Starts the SGLang servers of a config and stops them with itself.

    python -m brorl_jax.rollout.serve --config=configs/brorl_n512.py --workdir=runs/n512 --servers=8

They are as ``rollout.sglang.launch`` describes, and start without weights, which the trainer publishes. For servers on
other machines than the trainer's, or that outlive it: give their addresses to the trainer as ``rollout.sglang.urls``.
``--workdir`` is the run's, on a path that the trainer sees, too: a new model's tokenizer is kept there, and what the
servers write. ``SGLANG_API_KEY`` and ``SGLANG_ADMIN_API_KEY`` lock the servers.
"""

from __future__ import annotations

import pathlib
import shutil
import socket
import sys
import time

from absl import app, flags

from brorl_jax import config as config_lib
from brorl_jax.commandline import guarded, make_folder, parser, print_dry_run
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.interrupt import Interrupted, Stop

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Of the run, on a path that the trainer sees, too.")
flags.DEFINE_integer("servers", 1, "How many, on consecutive ports.", lower_bound=1)
POLL_S = 0.5


def _finish(config: Config) -> None:
    sglang = config.rollout.sglang
    sglang.urls, sglang.router = (), ""  # these are for the trainer
    sglang.launch.servers = FLAGS.servers
    config_lib.validate(config)
    if not FLAGS.dry_run and not FLAGS.workdir:
        raise UserError("--workdir is missing; name the folder of the run, or use --dry_run")


def run(_: list[str]) -> None:
    """Until a signal, or until a server ends, which is an error."""
    if FLAGS.dry_run:
        print_dry_run(FLAGS.config)
        return
    make_folder("--workdir", pathlib.Path(FLAGS.workdir))
    with Stop() as stop:
        try:
            serve(FLAGS.config, pathlib.Path(FLAGS.workdir), FLAGS.servers, stop)
        except Interrupted as signal:
            sys.exit(128 + signal.signum)


def serve(config: Config, workdir: pathlib.Path, count: int, stop: Stop) -> None:
    """Starts ``count`` servers for ``config``, prints each one's address once it answers, and waits.

    Raises:
        UserError: A server did not come up or ended; the message has its last words.
        Interrupted: A signal came; the servers are stopped.
    """
    from brorl_jax import assemble  # late: importing jax takes seconds, a wrong flag should not
    from brorl_jax.rollout.sglang import build, launch

    cfg, tokenizer = assemble.model_and_tokenizer(config, workdir)
    logs = workdir / "servers" / socket.gethostname()
    now = time.time_ns()  # seeds differ between machines and starts
    specs = build.specs(config, cfg, tokenizer, count, boot=logs / "boot", logs=logs, incarnation=now)
    servers = [launch.Server(spec) for spec in specs]
    try:
        for server in servers:
            server.start()
        waiting, end = list(servers), time.monotonic() + config.rollout.sglang.start_timeout_s
        while True:
            stop.check()
            for server in servers:
                if not server.alive():
                    raise UserError(f"the server at {server.spec.url} ended; {server.last_words()}")
            for server in list(waiting):
                if server.answers():
                    waiting.remove(server)
                    print(f"{server.spec.url} serves; its output goes to {server.spec.log}", flush=True)
                elif time.monotonic() > end:
                    raise UserError(f"no answer from {server.spec.url} yet; {server.last_words()}")
            time.sleep(POLL_S)
    finally:
        launch.stop_all(servers)
        shutil.rmtree(logs / "boot", ignore_errors=True)  # the keys are there


if __name__ == "__main__":
    app.run(guarded(run), flags_parser=parser("configs/brorl_n512.py", _finish))
