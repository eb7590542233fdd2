"""A linear layer whose weight may be packed for the CPU's matrix units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

_ROWS_HINT = 8
"""Rows of the activations that the packed form is tuned for: a small decode batch."""


class Linear:
    """``x @ weight.T + bias``.

    Life cycle: allocated empty, filled through :meth:`part`, packed once or never, then called.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self._bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    def part(self, name: str, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Destinations of checkpoint layer ``name``, which fills ``rows`` of the outputs."""
        found = {f"{name}.weight": self._weight[rows]}
        if self._bias is not None:
            found[f"{name}.bias"] = self._bias[rows]
        return found

    def parts(self, sizes: Sequence[tuple[str, int]]) -> dict[str, torch.Tensor]:
        """Destinations of several checkpoint layers, ``(name, outputs)``, stacked in this order."""
        found: dict[str, torch.Tensor] = {}
        first = 0
        for name, outputs in sizes:
            found |= self.part(name, slice(first, first + outputs))
            first += outputs
        assert first == self._weight.shape[0]
        return found

    def share(self, weight: torch.Tensor) -> None:
        """Use ``weight``, which belongs to another layer (tied embeddings)."""
        assert weight.shape == self._weight.shape
        self._weight = weight

    def pack(self) -> None:
        """Reorder the weight for oneDNN, where this build and this CPU can; drops the plain one."""
        if self._weight.device.type != "cpu":
            return
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS_HINT)
            probe = self._weight.new_zeros(1, self._weight.shape[1])
            torch.ops.mkldnn._linear_pointwise(probe, packed, self._bias, "none", [], "")
        except (AttributeError, RuntimeError):  # a private operation: absent in some builds, refused by some CPUs
            return
        self._packed = packed
        self._weight = torch.empty(0, dtype=self._weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, outputs] of ``x`` [N, inputs]."""
        if self._packed is None:
            return functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result
