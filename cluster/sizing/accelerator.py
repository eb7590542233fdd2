"""What a device can do, by its maker's data sheet or measured here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from cluster.bench.roofline import Rates
from protocol.errors import ConfigError

HERE = "cpu"
"""The name of the device that is measured instead: this machine's processor."""
MEASUREMENTS = 5
MAX_RATE = 1e18


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device.

    Attributes:
        name: for a person.
        flops: products and sums a second in bfloat16, without sparsity.
        bandwidth: bytes a second from its memory.
        memory: bytes.
        compute_share, bandwidth_share: what of these a serving engine reaches.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    compute_share: float = 0.5
    bandwidth_share: float = 0.7

    def __post_init__(self) -> None:
        for field in ("flops", "bandwidth", "memory"):
            value = getattr(self, field)
            if not 0 < value <= MAX_RATE:
                raise ConfigError(f"{field} must be over 0 and at most {MAX_RATE:g}, got {value}", field=field)
        for field in ("compute_share", "bandwidth_share"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise ConfigError(f"{field} must lie in (0, 1], got {value}", field=field)

    @property
    def rates(self) -> Rates:
        """What of it is reached."""
        return Rates(read=self.bandwidth * self.bandwidth_share, multiply=self.flops * self.compute_share)


PRESETS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "a100": Accelerator(name="A100 SXM 80 GB", flops=312e12, bandwidth=2.039e12, memory=80 * 10**9),
        "h100": Accelerator(name="H100 SXM 80 GB", flops=989.4e12, bandwidth=3.35e12, memory=80 * 10**9),
        "h200": Accelerator(name="H200 SXM 141 GB", flops=989.4e12, bandwidth=4.8e12, memory=141 * 10**9),
        "b200": Accelerator(name="B200 SXM 180 GB", flops=2.25e15, bandwidth=8e12, memory=180 * 10**9),
        "l40s": Accelerator(name="L40S 48 GB", flops=362e12, bandwidth=864e9, memory=48 * 10**9),
        "mi300x": Accelerator(name="MI300X 192 GB", flops=1307.4e12, bandwidth=5.3e12, memory=192 * 10**9),
    }
)
"""From the makers' data sheets, dense bfloat16."""


def accelerator(name: str, dtype: str) -> Accelerator:
    """One of :data:`PRESETS`, or this machine's processor, measured now.

    Args:
        name: of it.
        dtype: what is multiplied where it is measured.

    Raises:
        ConfigError: there is none of that name; lists those there are.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if name.lower() != HERE:
        known = ", ".join((*PRESETS, HERE))
        raise ConfigError(f"device {name!r} is not known; known: {known}", field="device")
    return _measured(dtype)


def _measured(dtype: str) -> Accelerator:
    import psutil
    import torch

    from cluster.bench.machine import this_machine
    from cluster.bench.roofline import Device

    device = Device(torch.device("cpu"), getattr(torch, dtype))
    device.multiply()
    return Accelerator(
        name=f"{this_machine().processor}, {torch.get_num_threads()} threads",
        flops=statistics.median(device.multiply() for _ in range(MEASUREMENTS)),
        bandwidth=statistics.median(device.read() for _ in range(MEASUREMENTS)),
        memory=psutil.virtual_memory().available,
        compute_share=0.7,
    )
