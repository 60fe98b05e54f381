"""The command, as a user types it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]


def plan(*arguments, config="quickstart"):
    """(exit status, stdout, stderr)."""
    command = [sys.executable, "-m", "brorl_jax.plan", f"--config={REPO}/configs/{config}.py", *arguments]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_a_small_config_on_two_devices():
    status, out, errors = plan("--devices=2", "--device=cpu", "--mean_tokens=4")
    assert status == 0, errors
    assert "mesh data=2 x fsdp=1" in out and "fits: " in out and "all-reduce" in out
    assert re.search(r"100 steps: [\d.]+ to [\d.]+ (s|min)\n", out) and "0.0 to 0.0" not in out
    # by hand: 64 prompts of up to 24 tokens, 16 responses of 4: 6 x 655,360 weights x 64 x (23 + 16 x 4) + attention
    needed = float(re.search(r"([\d.e+]+) needed, in closed form", out)[1])
    layers, head = 3 * 128 * (2 * 128 + 2 * 64 + 3 * 384), 128 * 512
    pairs = 23 * 24 // 2 + 16 * (4 * 23 + 4 * 5 // 2)
    assert needed == pytest.approx(64 * 3 * (2 * (layers * 87 + head * 64) + 4 * 3 * 128 * pairs), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device=h1000"], "unknown; known are b200, h200"),
        (["--devices=-1"], "must be 1 or more"),
        (["--mfu=2"], "a share, above 0 and at most 1"),
        (["--mean_tokens=1e9"], "between 0 and rollout.max_tokens"),
        (["--config.rollout.n=1"], "config.rollout.n = 1"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    status, out, errors = plan(*arguments)
    assert status == 2 and out == "" and len(errors.splitlines()) == 1
    assert errors.startswith("error: ") and words in errors


@pytest.mark.slow
def test_the_papers_arm_on_64_devices():
    """Compiled in its real size; blockwise attention executes less than the whole square and stores no scores."""
    executed, temporaries = {}, {}
    for attention in ("xla", "blockwise"):
        status, out, errors = plan("--devices=64", f"--config.model.attention={attention}", config="brorl_n512")
        assert status == 0, errors
        assert "mesh data=8 x fsdp=8" in out and "fits: " in out
        executed[attention] = float(re.search(r"([\d.e+]+) in matrix products", out)[1])
        temporaries[attention] = float(re.search(r"([\d.]+) of temporaries", out)[1])
    assert executed["blockwise"] < executed["xla"] and temporaries["blockwise"] < temporaries["xla"] / 2
