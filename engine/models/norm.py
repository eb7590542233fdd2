"""Root mean square norms (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.fused import fused_ops


class Norm(Protocol):
    """A norm's weight, and the residual that goes before it.

    Attributes:
        weight: [size], to be filled from the checkpoint before :meth:`seal`.
    """

    weight: torch.Tensor

    def seal(self) -> None:
        """The weight is filled."""

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Normed ``x`` [T, size], of its own shape, once ``delta`` has been added to it in place."""


class RMSNorm:
    """The one that nearly all families use; see :class:`Norm`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._eps = eps
        self._ops = fused_ops(dtype, device)

    def seal(self) -> None:
        """See :class:`Norm`."""

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`Norm`."""
        return self._ops.add_rms_norm(x, delta, self.weight, self._eps)


class CenteredRMSNorm:
    """Gemma's: its weight is a difference from 1, and it rounds once, after the product; see :class:`Norm`."""

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self._eps = eps

    def seal(self) -> None:
        """See :class:`Norm`."""
        self.weight += 1.0

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`Norm`."""
        if delta is not None:
            x.add_(delta)
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps).to(x.dtype)
