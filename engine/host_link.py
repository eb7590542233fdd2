"""Small values between the host and the device that computes, without waiting for it more often than once a step.

A plain copy from or to a GPU waits until all that was queued before it is through. These go by pinned memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` on the device: queued there, not waited for."""
    # torch keeps the pinned memory until the copy is through.
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def fetch(*tensors: torch.Tensor) -> list[Any]:
    """What :meth:`torch.Tensor.tolist` gives of each of them, after one wait for them all."""
    here = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return [tensor.tolist() for tensor in here]
