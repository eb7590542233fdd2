"""Small values between the host and the device that computes, without waiting for it more often than once a step.

A plain copy from or to a GPU waits until all that was queued before it is through. These go by pinned memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


def upload(
    values: Sequence[float] | Sequence[int] | NDArray[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``values`` on the device: queued there, not waited for. On a CPU it may be their memory, not to be written."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # torch keeps the pinned memory until the copy is through.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def fetch(*tensors: torch.Tensor) -> list[Any]:
    """What :meth:`torch.Tensor.tolist` gives of each of them, after one wait for them all."""
    here = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return [tensor.tolist() for tensor in here]
