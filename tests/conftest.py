"""Set up before jax is imported: eight simulated CPU devices, and a cache of compiled programs.

Tests of one device are unaffected by the others; sharding tests need them. A value already in the environment wins.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from brorl_jax import xla

REPO = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests" / "helpers"))  # tiny_cases

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
xla.set_cpu_flags(fast_compile=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Folder of public benchmark files beside the checkout; the test is skipped where it is absent."""
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the benchmark files in {folder}")
    return folder
