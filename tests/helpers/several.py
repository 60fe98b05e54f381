"""The config of a tiny run that several processes train, for ``--config=several.py:<folder of its tables>``."""

from pathlib import Path

import tiny_runs


def get_config(folder):
    """8 devices in all three ways of splitting; carried groups, a reference, two updates a step, checkpoints."""
    c = tiny_runs.config(Path(folder), prompts=40)
    c.rollout.prompts_per_step, c.filter.oversample = 8, 1.5
    c.batch.slots = 8
    c.mesh.data = c.mesh.fsdp = c.mesh.tensor = 2
    c.algo.updates_per_step, c.algo.kl.coef = 2, 1e-2
    c.eval.every, c.eval.samples = 2, 2
    c.diagnostics.mass_balance_every = c.diagnostics.min_visits = 2
    c.grading.plugins = ("tiny_runs",)
    c.checkpoint.every = 1
    c.train.rehearse = True
    c.processes.lost_after_s = 20.0
    return c
