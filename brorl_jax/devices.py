"""What accelerators can do at most, from their makers' data sheets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    Attributes:
        kinds: What jax calls it, ``jax.Device.device_kind``.
        flops: FLOP/s, peak of dense bfloat16 matrix products (data sheets give twice that, "with sparsity").
        memory: Bytes of device memory.
        bandwidth: Bytes/s of device memory.
        source: Data sheet.
    """

    kinds: tuple[str, ...]
    flops: float
    memory: float
    bandwidth: float
    source: str


DEVICES = {
    "h200": Device(("NVIDIA H200",), 989.5e12, 141e9, 4.8e12, "NVIDIA H200 data sheet, SXM"),
    "h100": Device(("NVIDIA H100 80GB HBM3",), 989.5e12, 80e9, 3.35e12, "NVIDIA H100 data sheet, SXM"),
    "a100": Device(("NVIDIA A100-SXM4-80GB",), 312e12, 80e9, 2.039e12, "NVIDIA A100 80GB data sheet, SXM"),
}


def find(device_kind: str) -> Device | None:
    """The device that jax calls ``device_kind``; None for any other, a part of one (MIG) included."""
    return next((device for device in DEVICES.values() if device_kind in device.kinds), None)
