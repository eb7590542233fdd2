"""Checks of what the kernels are given: they read raw pointers, so a wrong shape would read a stranger's memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from triton.runtime.interpreter import InterpretedFunction

from engine.float8 import LARGEST
from protocol.errors import ConfigError, EngineFailure
from protocol.layout import Order

TRITON_TYPE: dict[torch.dtype, str] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Element types that the kernels compute in, by Triton's name."""
HALVES = (torch.float16, torch.bfloat16)
"""Element types that are computed in over an eight-bit cache: float32 would not be within the register budget."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head dimensions that are tested and within the register budget."""


class CacheGeometry(NamedTuple):
    """One layer's K and V caches, whatever their order; strides in elements."""

    block_size: int
    kv_heads: int
    head_dim: int
    k_strides: tuple[int, int, int]
    """From block to block, head to head, token to token."""
    v_strides: tuple[int, int, int]


def require(good: bool, field: str, wanted: str, got: object) -> None:
    """Raise EngineFailure that names the operand and its value, unless ``good``."""
    if not good:
        raise EngineFailure(f"{field} must be {wanted}, got {got}", field=field)


def cache_geometry(k_cache: torch.Tensor, v_cache: torch.Tensor, order: Order) -> CacheGeometry:
    """Check one layer's two caches and read their geometry.

    Args:
        k_cache: ``[num_blocks, kv_heads, block_size, head_dim]`` (HND) or
            ``[num_blocks, block_size, kv_heads, head_dim]`` (NHD), any strides but the last, which is 1.
        v_cache: as ``k_cache``.
        order: of both.

    Raises:
        ConfigError: ``order``, the dtype or the head dimension is not served.
        EngineFailure: the two do not fit each other.
    """
    if order not in ("HND", "NHD"):
        raise ConfigError(f"order must be 'HND' or 'NHD', got {order!r}", field="order")
    require(k_cache.dim() == 4, "k_cache", "of four dimensions", tuple(k_cache.shape))
    require(v_cache.shape == k_cache.shape, "v_cache", f"of shape {tuple(k_cache.shape)}", tuple(v_cache.shape))
    require(v_cache.dtype == k_cache.dtype, "v_cache", f"of dtype {k_cache.dtype}", v_cache.dtype)
    require(v_cache.device == k_cache.device, "v_cache", f"on {k_cache.device}", v_cache.device)
    served = [*TRITON_TYPE, *LARGEST]
    if k_cache.dtype not in served:
        raise ConfigError(f"dtype must be one of {served}, got {k_cache.dtype}", field="dtype")
    heads, tokens = (1, 2) if order == "HND" else (2, 1)
    head_dim = k_cache.shape[3]
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}", field="head_dim")
    strides = []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(cache.stride(3) == 1, name, "dense in its last dimension", cache.stride())
        strides.append((cache.stride(0), cache.stride(heads), cache.stride(tokens)))
    return CacheGeometry(k_cache.shape[tokens], k_cache.shape[heads], head_dim, strides[0], strides[1])


def check_operand(
    name: str, tensor: torch.Tensor, like: torch.Tensor, *, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Check one tensor that goes with the cache ``like``.

    Raises:
        EngineFailure: its shape, dtype, device or last stride is not what the kernel reads.
    """
    require(tensor.shape == shape, name, f"of shape {shape}", tuple(tensor.shape))
    require(tensor.dtype == dtype, name, f"of dtype {dtype}", tensor.dtype)
    require(tensor.device == like.device, name, f"on {like.device}", tensor.device)
    require(tensor.numel() == 0 or tensor.stride(-1) == 1, name, "dense in its last dimension", tensor.stride())


def computed_in(name: str, tensor: torch.Tensor, cache: torch.Tensor) -> torch.dtype:
    """The dtype that ``tensor`` must have: the cache's; over an eight-bit cache its own, of those computed in.

    Raises:
        EngineFailure: nothing is computed in it.
    """
    if cache.dtype not in LARGEST:
        return cache.dtype
    require(tensor.dtype in HALVES, name, f"of one of {list(HALVES)}", tensor.dtype)
    return tensor.dtype


def check_queries(q: torch.Tensor, k_cache: torch.Tensor, cache: CacheGeometry) -> int:
    """Check queries ``[T, heads, head_dim]`` of the cache ``k_cache``.

    Returns:
        Heads, a multiple of the cache's (GQA).

    Raises:
        EngineFailure: they do not fit the cache.
    """
    require(q.dim() == 3, "q", "of three dimensions", tuple(q.shape))
    tokens, heads = q.shape[:2]
    require(heads > 0 and heads % cache.kv_heads == 0, "q", f"of a multiple of {cache.kv_heads} heads", heads)
    check_operand("q", q, k_cache, shape=(tokens, heads, cache.head_dim), dtype=computed_in("q", q, k_cache))
    return heads


def check_scoring(scale: float, window: int, softcap: float) -> None:
    """Check how scores are made.

    Raises:
        EngineFailure: a value is out of range.
    """
    require(math.isfinite(scale), "scale", "finite", scale)
    require(window >= 0, "window", "at least 0", window)
    require(softcap >= 0.0 and math.isfinite(softcap), "softcap", "at least 0 and finite", softcap)


def check_device(cache: torch.Tensor, kernel: object) -> None:
    """Check that ``kernel`` can run where the cache lies.

    Raises:
        ConfigError: it lies in host memory and the kernel is compiled for a GPU.
    """
    if cache.device.type == "cpu" and not isinstance(kernel, InterpretedFunction):
        raise ConfigError("device must be a GPU for the Triton kernels, got cpu", field="device")
