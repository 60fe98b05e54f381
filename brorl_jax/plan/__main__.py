"""Will it fit, how long will it take: plans a config for devices that are not here.

    python -m brorl_jax.plan --config=configs/brorl_n512.py --devices=64 --device=h100

Compiles the config's real train step for one device of a simulated mesh on this machine's processor. No weights, no
accelerator, no download. ``--config.<field>=<value>`` overrides any field, as in ``brorl_jax.main``.
"""

from __future__ import annotations

import os
import re

from absl import app, flags

from brorl_jax import config as config_lib
from brorl_jax import devices, xla
from brorl_jax.commandline import guarded, parser, print_dry_run
from brorl_jax.config import Config
from brorl_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_integer("devices", 0, "How many; 0: as many as config.mesh has.")
flags.DEFINE_string("device", "h100", f"Of which kind: {', '.join(devices.DEVICES)}.")
flags.DEFINE_string("model_config", None, "A config.json with the model's shape, if it is not known without download.")
flags.DEFINE_float("mean_tokens", 0.0, "Of a response; 0: rollout.max_tokens, the most there can be.")
flags.DEFINE_float("pass_rate", 1.0, "Share of the generated groups that dynamic sampling keeps.")
flags.DEFINE_float("mfu", 0.4, "Share of a device's peak FLOP/s that matrix products reach.")
flags.DEFINE_float("bandwidth", 0.7, "Share of a device's memory bandwidth that is reached.")


def _finish(config: Config) -> None:
    config_lib.validate(config)
    if FLAGS.device not in devices.DEVICES:
        raise UserError(f"--device={FLAGS.device}: unknown; known are {', '.join(devices.DEVICES)}")
    given = {name: float(FLAGS[name].value) for name in ("devices", "mean_tokens", "pass_rate", "mfu", "bandwidth")}
    if given["devices"] < 0:
        raise UserError(f"--devices={FLAGS.devices}: must be 1 or more, or 0 for the config's mesh")
    for name in ("pass_rate", "mfu", "bandwidth"):
        if not 0 < given[name] <= 1:
            raise UserError(f"--{name}={given[name]:g}: a share, above 0 and at most 1")
    if not 0 <= given["mean_tokens"] <= config.rollout.max_tokens:
        most = config.rollout.max_tokens
        raise UserError(f"--mean_tokens={given['mean_tokens']:g}: between 0 and rollout.max_tokens = {most}")


def _simulate(count: int) -> None:
    """Makes jax, not yet imported, see ``count`` processors and nothing else."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the partitioner's remarks are in the list of collectives
    flag = r"--xla_force_host_platform_device_count=\d+"
    os.environ["XLA_FLAGS"] = re.sub(flag, "", os.environ.get("XLA_FLAGS", ""))
    xla.set_cpu_flags(devices=count, fast_compile=True)


def run(_: list[str]) -> None:
    """Prints the plan."""
    config = FLAGS.config
    if FLAGS.dry_run:
        print_dry_run(config)
        return
    count = FLAGS.devices or config_lib.derived(config)["devices"]
    _simulate(count)
    from brorl_jax.plan import page, predict  # late: they import jax

    assumed = predict.Assumed(
        FLAGS.mean_tokens or config.rollout.max_tokens, FLAGS.pass_rate, FLAGS.mfu, FLAGS.bandwidth
    )
    target = page.Target(count, FLAGS.device, devices.DEVICES[FLAGS.device], assumed)
    for line in page.plan(config, target, FLAGS.model_config):
        print(line, flush=True)


if __name__ == "__main__":
    app.run(guarded(run), flags_parser=parser("configs/brorl_n512.py", _finish))
