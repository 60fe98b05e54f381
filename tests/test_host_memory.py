"""Host memory over a long run (P45): what is kept of every step, by whatever part, would grow with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_cases as cases
import tiny_runs

REPO = Path(__file__).resolve().parents[1]
STEPS = 200
EARLY, LATE = slice(30, 80), slice(150, 200)  # highest use within each: garbage is collected every 20 steps or so
# One run grew by 10 MiB (869 to 879, two busy cores of an AMD EPYC): at checkpoints, of which Orbax takes 0.4 MiB each,
# and after collections, level for a dozen steps in between. Samples alone are 0.11 MiB a step, so to keep them would
# be 13 more.
MOST_MIB = 15.0


@pytest.mark.slow
def test_memory_is_flat_over_200_steps_with_servers(tmp_path):
    path = os.pathsep.join([str(REPO), str(REPO / "tests" / "helpers")])
    command = [sys.executable, str(REPO / "tests" / "helpers" / "long_run.py"), str(tmp_path)]
    with cases.FakeServer(cases.boot_directory(tmp_path / "boot"), context=cases.CONTEXT) as server:
        done = subprocess.run(
            [*command, server.url, str(STEPS)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=3600,
        )
    assert done.returncode == 0, done.stderr
    mib = [1024 * row["memory/rss_gib"] for row in tiny_runs.metrics(tmp_path / "run")[1:]]
    assert len(mib) == STEPS
    grown = max(mib[LATE]) - max(mib[EARLY])
    assert grown < MOST_MIB, mib
