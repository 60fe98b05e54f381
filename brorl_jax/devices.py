"""What accelerators can do at most, from their makers' data sheets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
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


# How the sheets were read. H100 and H200 SXM (nvidia.com/en-us/data-center/h100, /h200): BFLOAT16 1,979 TFLOPS and TF32
# 989 "with sparsity", dense half of it; 3.35 and 4.8 TB/s; NVLink 900 GB/s, which is both ways together, 450 each way.
# B200 (nvidia.com/en-us/data-center/dgx-b200): eight have 72 PFLOPS of sparse FP8, bfloat16 a quarter of that when
# dense, TF32 an eighth (briefs of HGX boards round it to 1,100); 1,440 GB, 64 TB/s, NVLink 14.4 TB/s both ways.
# A100 80GB SXM: figures are dense. Network: a DGX has one InfiniBand card for each GPU, of 400 Gb/s (ConnectX-7), A100
# 200 Gb/s (ConnectX-6). All are peaks; a copy between two H100 reaches about 380 of the 450 GB/s (NVIDIA/nccl #1264).
DEVICES = {
    "b200": Device(
        kinds=("NVIDIA B200",),
        flops=2250e12,
        memory=180e9,
        bandwidth=8e12,
        float32=1125e12,
        node=8,
        link=900e9,
        network=50e9,
        source="NVIDIA DGX B200 data sheet, an eighth of a machine",
    ),
    "h200": Device(
        kinds=("NVIDIA H200",),
        flops=989.5e12,
        memory=141e9,
        bandwidth=4.8e12,
        float32=494.7e12,
        node=8,
        link=450e9,
        network=50e9,
        source="NVIDIA H200 data sheet, SXM; DGX H200",
    ),
    "h100": Device(
        kinds=("NVIDIA H100 80GB HBM3",),
        flops=989.5e12,
        memory=80e9,
        bandwidth=3.35e12,
        float32=494.7e12,
        node=8,
        link=450e9,
        network=50e9,
        source="NVIDIA H100 data sheet, SXM; DGX H100",
    ),
    "a100": Device(
        kinds=("NVIDIA A100-SXM4-80GB",),
        flops=312e12,
        memory=80e9,
        bandwidth=2.039e12,
        float32=156e12,
        node=8,
        link=300e9,
        network=25e9,
        source="NVIDIA A100 80GB data sheet, SXM; DGX A100",
    ),
    "cpu": Device(
        kinds=(),
        flops=86e9,
        memory=24e9,
        bandwidth=23e9,
        float32=86e9,
        node=1,
        link=23e9,
        network=1e9,
        source="two cores of an AMD EPYC, measured: docs/scale.md",
    ),
}


def find(device_kind: str) -> Device | None:
    """The device that jax calls ``device_kind``; None for any other, a part of one (MIG) included."""
    return next((device for device in DEVICES.values() if device_kind in device.kinds), None)
