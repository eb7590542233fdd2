"""Attention backends by name; each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from engine.attention.backend import AttentionBackend
    from protocol.layout import KVLayout

_BACKENDS = {
    "reference": "engine.attention.reference:ReferenceAttention",
    "sdpa": "engine.attention.sdpa:SDPAttention",
    "triton": "engine.attention.triton:TritonAttention",
}


def create_backend(name: str, layout: KVLayout, device: torch.device) -> AttentionBackend:
    """The backend called ``name``; ``auto`` is triton on CUDA where it serves the model, and sdpa elsewhere.

    Raises:
        ConfigError: no backend has this name, or it does not serve ``layout`` or ``device``.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and _in_triton(layout) else "sdpa"
    path = _BACKENDS.get(name)
    if path is None:
        raise ConfigError(f"attention must be auto, {', '.join(sorted(_BACKENDS))}, got {name!r}", field="attention")
    if name == "triton" and device.type != "cuda":
        raise ConfigError(f"attention {name!r} needs a CUDA device, got device {str(device)!r}", field="attention")
    module, _, attribute = path.partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend(layout, device)


def _in_triton(layout: KVLayout) -> bool:
    head_dims: tuple[int, ...] = import_module("engine.kernels.operands").HEAD_DIMS
    return layout.head_dim in head_dims
