"""The gated MLP of a layer (Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.fused import fused_ops
from engine.models.config import ModelConfig
from engine.models.linear import Linear


class GatedMLP:
    """Gate and up in one linear, their product, and down.

    Life cycle: made empty, filled through :meth:`destinations`, sealed once, then called.

    Args:
        config: geometry.
        at: name of the layer's MLP in the checkpoint.
        dtype: of the weights.
        device: where they lie.
        gate_up: names of gate's and up's tensors in it, or of the one that holds both.
        down: name of down's.
    """

    def __init__(
        self,
        config: ModelConfig,
        at: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._at = at
        self._sizes = [(f"{at}.{name}", 2 * inner // len(gate_up)) for name in gate_up]
        self._down_name = f"{at}.{down}"
        self._activation = config.activation
        self._ops = fused_ops(dtype, device)
        self._gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype, device=device)
        self._down = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype, device=device)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        return self._gate_up.parts(self._sizes) | self._down.part(self._down_name)

    def seal(self) -> None:
        """Pack the linears."""
        self._gate_up.pack(gated=self._activation == "silu")
        self._down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of normed ``x`` [T, hidden]."""
        if self._activation == "silu":
            return self._down(self._gate_up.silu_and_mul(x, self._ops))
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.gelu(gate, approximate="tanh").mul_(up))
