"""A linear layer whose weight may be packed for the CPU's matrix units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.fused import FusedOps
from engine.native.library import Kernels, kernels_for

_TILE_OUTPUTS, _TILE_INPUTS = 16, 32
"""Outputs and inputs of a tile of our own kernel's weights."""
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
        self._native: NativeWeight | None = None

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

    def pack(self, *, gated: bool = False) -> None:
        """Reorder the weight for the CPU's matrix units, where there are any that we know; drops the plain one.

        Args:
            gated: it will be called through :meth:`silu_and_mul` only.
        """
        weight = self._weight
        if weight.device.type != "cpu":
            return
        native = NativeWeight.of(weight, gated=gated)
        packed = None if native is not None else self._reordered()
        if native is None and packed is None:
            return
        self._native, self._packed = native, packed
        self._weight = weight.new_empty(0)

    def _reordered(self) -> torch.Tensor | None:
        """The weight in oneDNN's own order, where this build and this CPU can."""
        try:
            packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS_HINT)
            probe = self._weight.new_zeros(1, self._weight.shape[1])
            torch.ops.mkldnn._linear_pointwise(probe, packed, self._bias, "none", [], "")
        except (AttributeError, RuntimeError):  # a private operation: absent in some builds, refused by some CPUs
            return None
        return packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, outputs] of ``x`` [N, inputs]."""
        if self._native is not None:
            return self._native.product(x, self._bias)
        if self._packed is None:
            return functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result

    def silu_and_mul(self, x: torch.Tensor, ops: FusedOps) -> torch.Tensor:
        """[N, outputs / 2] of ``x`` [N, inputs]: SiLU of the first half of what a call gives times the second."""
        if self._native is not None:
            return self._native.product(x, self._bias)
        return ops.silu_and_mul(self(x))


class NativeWeight:
    """A bfloat16 weight in the order of our own kernel; :meth:`of` makes one where that is possible.

    Args:
        kernels: the built library.
        weight: [outputs, inputs], bfloat16; copied.
        kind: which dot products to use, as :attr:`Kernels.linear_kind`; the CPU must have them.
        gated: a product is SiLU of its first half times its second; ``outputs`` is even.
    """

    def __init__(self, kernels: Kernels, weight: torch.Tensor, kind: int, *, gated: bool = False) -> None:
        self._rows, self._inputs = weight.shape
        self._padded = -(-self._inputs // _TILE_INPUTS) * _TILE_INPUTS
        # The panels of the two halves take turns.
        parts = weight.chunk(2) if gated else (weight,)
        self._outputs = self._rows // len(parts)
        panels = -(-self._outputs // _TILE_OUTPUTS)
        panel = _TILE_OUTPUTS * self._padded
        self._packed = kernels.weight_memory.take(len(parts) * panels * panel, weight.dtype)
        self._kernel = kernels.gated_linear if gated else kernels.linear
        self._kind = kind
        self._threads = torch.get_num_threads()
        for index, part in enumerate(parts):
            rows, first = part.contiguous(), self._packed[index * panel :]
            kernels.linear_pack(rows.data_ptr(), first.data_ptr(), self._outputs, self._inputs, len(parts))

    @classmethod
    def of(cls, weight: torch.Tensor, *, gated: bool = False) -> NativeWeight | None:
        """``weight`` packed, where the CPU has dot products of bfloat16 and the kernels are there."""
        kernels = kernels_for(weight.dtype, weight.device)
        if kernels is None or kernels.linear_kind == 0 or weight.dtype != torch.bfloat16:
            return None
        return cls(kernels, weight, kernels.linear_kind, gated=gated)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Of ``x`` [N, inputs]; each row alone, whatever the others are.

        Returns:
            [N, outputs], ``x @ weight.T + bias``; or what is ``gated`` of it, [N, outputs / 2].
        """
        if self._padded != self._inputs:
            x = functional.pad(x, (0, self._padded - self._inputs))
        elif not x.is_contiguous():
            x = x.contiguous()
        tokens = x.shape[0]
        out = x.new_empty(tokens, self._outputs)
        self._kernel(
            *(self._kind, x.data_ptr(), self._packed.data_ptr(), None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), tokens, self._rows, self._padded, self._threads),
        )
        return out
