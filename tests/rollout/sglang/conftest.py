"""One real server per model for the whole session; the fake one per test."""

from __future__ import annotations

import pytest
import sglang_cases as cases
from fake_sglang import FakeServer


@pytest.fixture(scope="session")
def real_qwen3(tmp_path_factory):
    with cases.real_server(tmp_path_factory.mktemp("qwen3"), cases.QWEN3) as server:
        yield server


@pytest.fixture(scope="session")
def real_llama(tmp_path_factory):
    with cases.real_server(tmp_path_factory.mktemp("llama"), cases.LLAMA) as server:
        yield server


@pytest.fixture
def fake(tmp_path):
    with FakeServer(cases.boot_directory(tmp_path / "boot"), context=cases.CONTEXT + 8) as server:
        yield server


@pytest.fixture
def fakes(tmp_path):
    """Two of them."""
    boot = cases.boot_directory(tmp_path / "boot")
    with FakeServer(boot, context=cases.CONTEXT + 8) as a, FakeServer(boot, context=cases.CONTEXT + 8) as b:
        yield a, b


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.sglang, pytest.mark.slow])])
def url(request):
    """A server's address: the same tests for the fake and for the real one."""
    if request.param == "fake":
        return request.getfixturevalue("fake").url
    return request.getfixturevalue("real_qwen3").spec.url
