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
    "native": "engine.attention.native:NativeAttention",
    "reference": "engine.attention.reference:ReferenceAttention",
    "sdpa": "engine.attention.sdpa:SDPAttention",
    "triton": "engine.attention.triton:TritonAttention",
}

BACKENDS = tuple(_BACKENDS)
"""Their names."""


def create_backend(
    name: str, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` is triton on CUDA and native on a CPU where they serve, and sdpa elsewhere.

    Args:
        name: as registered.
        layout: of the cache.
        device: where it is.
        dtype: of queries, keys and values; None is the cache's own.

    Raises:
        ConfigError: no backend has this name, or it does not serve ``layout`` or ``device``.
    """
    if name == "auto":
        name = _automatic(layout, device, dtype)
    path = _BACKENDS.get(name)
    if path is None:
        raise ConfigError(f"attention must be auto, {', '.join(sorted(_BACKENDS))}, got {name!r}", field="attention")
    if name == "triton" and device.type != "cuda":
        raise ConfigError(f"attention {name!r} needs a CUDA device, got device {str(device)!r}", field="attention")
    module, _, attribute = path.partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend(layout, device, dtype)


def _automatic(layout: KVLayout, device: torch.device, dtype: torch.dtype | None) -> str:
    if device.type == "cuda":
        return "triton" if import_module("engine.attention.triton").serves(layout, dtype) else "sdpa"
    return "native" if import_module("engine.attention.native").serves(layout, device, dtype) else "sdpa"
