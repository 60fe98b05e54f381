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
        float32: FLOP/s, peak of dense float32 matrix products (on GPUs as TensorFloat-32).
        node: Devices of one machine.
        link: Bytes/s that a device sends to others of its machine, one way.
        network: Bytes/s that it sends to other machines, with a network card of its own.
        source: Data sheet.
    """

    kinds: tuple[str, ...]
    flops: float
    memory: float
    bandwidth: float
    float32: float
    node: int
    link: float
    network: float
    source: str


# NVLink is given both ways together: 900 GB/s are 450 each way. Network: one 400 Gb/s card for each GPU (A100: 200).
DEVICES = {
    "b200": Device(
        ("NVIDIA B200",),
        2250e12,
        180e9,
        8e12,
        1125e12,
        8,
        900e9,
        50e9,
        "NVIDIA DGX B200 data sheet, an eighth of a machine",
    ),
    "h200": Device(
        ("NVIDIA H200",), 989.5e12, 141e9, 4.8e12, 494.7e12, 8, 450e9, 50e9, "NVIDIA H200 data sheet, SXM; DGX H200"
    ),
    "h100": Device(
        ("NVIDIA H100 80GB HBM3",),
        989.5e12,
        80e9,
        3.35e12,
        494.7e12,
        8,
        450e9,
        50e9,
        "NVIDIA H100 data sheet, SXM; DGX H100",
    ),
    "a100": Device(
        ("NVIDIA A100-SXM4-80GB",),
        312e12,
        80e9,
        2.039e12,
        156e12,
        8,
        300e9,
        25e9,
        "NVIDIA A100 80GB data sheet, SXM; DGX A100",
    ),
    "cpu": Device((), 69e9, 24e9, 21.5e9, 69e9, 1, 21.5e9, 1e9, "two cores of an AMD EPYC, measured: docs/scale.md"),
}


def find(device_kind: str) -> Device | None:
    """The device that jax calls ``device_kind``; None for any other, a part of one (MIG) included."""
    return next((device for device in DEVICES.values() if device_kind in device.kinds), None)
