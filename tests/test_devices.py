"""The table of accelerators."""

import jax
import pytest

from brorl_jax import assemble, devices
from brorl_jax.config import default
from brorl_jax.errors import UserError


def test_devices_are_found_by_what_jax_calls_them_and_by_nothing_else():
    assert devices.find("NVIDIA H200") is devices.DEVICES["h200"]
    assert devices.find("NVIDIA H100 80GB HBM3") is devices.DEVICES["h100"]
    for other in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""):
        assert devices.find(other) is None


@pytest.mark.parametrize(("name", "intensity"), [("h100", 295), ("h200", 206), ("a100", 153)])
def test_peaks_are_of_the_right_magnitude(name, intensity):
    """FLOPs per byte at which compute takes as long as memory, as roofline plots of these chips have it."""
    device = devices.DEVICES[name]
    assert device.flops / device.bandwidth == pytest.approx(intensity, rel=0.01)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it works")
def test_a_kernel_of_gpus_is_refused_elsewhere_before_anything_is_built(tmp_path):
    config = default()
    config.model.update(attention="cudnn", compute_dtype="bfloat16")
    with pytest.raises(UserError, match=r"model.attention = 'cudnn': needs a GPU, jax has a cpu; use 'blockwise'"):
        assemble.build_model(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
