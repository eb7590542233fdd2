"""What work must read and multiply at least, and how fast this device does either.

The roofline (Williams et al., 2009): no program is faster than the slower of its bytes at the memory's speed and its
products at the speed of one large product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

Bound = Literal["memory", "compute"]
HOST_READ_BYTES, DEVICE_READ_BYTES = 256 << 20, 2 << 30
"""Read at once; far more than the caches of a CPU, and of a GPU, hold."""
HOST_SIDE, DEVICE_SIDE = 1024, 8192
"""Of the square matrices that are multiplied."""


class Work(NamedTuple):
    """What must be done.

    Attributes:
        nbytes: read or written, each once.
        flops: two for each multiplication.
    """

    nbytes: int
    flops: int


class Rates(NamedTuple):
    """Of this device; bytes and operations a second."""

    read: float
    multiply: float


def floor(work: Work, rates: Rates) -> tuple[float, Bound]:
    """Seconds that the work takes at least, and what for."""
    memory, compute = work.nbytes / rates.read, work.flops / rates.multiply
    return (memory, "memory") if memory >= compute else (compute, "compute")


class Device:
    """A device and what it can do.

    Args:
        device: which.
        dtype: of the products.
        now: a clock, in seconds.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._now = now
        on_host = device.type == "cpu"
        read, side = (HOST_READ_BYTES, HOST_SIDE) if on_host else (DEVICE_READ_BYTES, DEVICE_SIDE)
        self._memory = torch.ones(read // 4, dtype=torch.int32, device=device)
        self._square = torch.randn(side, side, device=device).to(dtype)

    @property
    def name(self) -> str:
        """For a person."""
        return "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def synchronize(self) -> None:
        """Wait for all that has been asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call of ``work``, to its end."""
        self.synchronize()
        began = self._now()
        work()
        self.synchronize()
        return self._now() - began

    def read(self) -> float:
        """Read so much that no cache holds anything else then; bytes a second."""
        return self._memory.nbytes / self.seconds(lambda: self._memory.sum(dtype=torch.int32))

    def multiply(self) -> float:
        """One large product; operations a second."""
        return float(2 * self._square.shape[0] ** 3 / self.seconds(lambda: self._square @ self._square))
