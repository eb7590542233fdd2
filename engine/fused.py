"""Pointwise work of a layer in one pass over memory; torch's operations are the reference, C++ is for the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from engine.native.library import DTYPES, Kernels, kernels_for


class FusedOps(ABC):
    """What the models need between their matrix products. Results agree within rounding, whichever class gives them."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``delta`` to ``x`` in place, then the root mean square norm of ``x`` (Zhang and Sennrich, 2019).

        Args:
            x: [T, size], contiguous; the residual stream.
            delta: like ``x``; None adds nothing.
            weight: [size].
            eps: added to the mean square.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, size]: SiLU of the first half of ``gate_up`` [T, 2 * size] times the second."""


class TorchOps(FusedOps):
    """With torch's own operations, on any device."""

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See :class:`FusedOps`."""
        if delta is not None:
            x.add_(delta)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :class:`FusedOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


class NativeOps(FusedOps):
    """With the C++ kernels.

    Args:
        kernels: the built library.
        dtype: of all tensors, one of :data:`engine.native.library.DTYPES`.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        self._add_rms_norm = kernels.add_rms_norm
        self._silu_and_mul = kernels.silu_and_mul
        self._half = DTYPES.index(dtype)
        self._threads = torch.get_num_threads()

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See :class:`FusedOps`."""
        assert x.is_contiguous()
        assert delta is None or delta.is_contiguous()
        out = torch.empty_like(x)
        tokens, size = x.shape
        added = None if delta is None else delta.data_ptr()
        self._add_rms_norm(
            self._half, x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), tokens, size, eps, self._threads
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :class:`FusedOps`."""
        assert gate_up.is_contiguous()
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, size)
        self._silu_and_mul(self._half, gate_up.data_ptr(), out.data_ptr(), tokens, size, self._threads)
        return out


def fused_ops(dtype: torch.dtype, device: torch.device) -> FusedOps:
    """The fastest that serve tensors of ``dtype`` on ``device``."""
    kernels = kernels_for(dtype, device)
    return TorchOps() if kernels is None else NativeOps(kernels, dtype)
