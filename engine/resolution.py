"""What an engine's settings stand for on this machine and with this model: device, types, geometry, sizes."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from engine.config import EngineConfig
from engine.kv_scales import cache_scales
from engine.models.config import ModelConfig
from engine.pool_memory import PoolMemory
from protocol.errors import ConfigError
from protocol.layout import CacheDtype, FloatDtype, KVLayout

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def resolve_device(name: str) -> torch.device:
    """The device that ``name`` stands for.

    Raises:
        ConfigError: this process has no such device.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda:0" if available else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not available or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {name!r} is not there", field="device")
        return torch.device("cuda", device.index or 0)
    return device


def resolve_dtype(config: EngineConfig, device: torch.device) -> FloatDtype:
    """The element type of weights and activations that ``config.dtype`` stands for on ``device``."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cuda":
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if any(capabilities.get(name) for name in _BF16_INSTRUCTIONS) else "float32"


def resolve_cache_dtype(config: EngineConfig, dtype: FloatDtype) -> CacheDtype:
    """The element type of the cache that ``config.kv_cache_dtype`` stands for where ``dtype`` is computed in."""
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def resolve_layout(config: EngineConfig, model_config: ModelConfig, dtype: FloatDtype) -> KVLayout:
    """The geometry of the cache where ``dtype`` is computed in."""
    cache_dtype = resolve_cache_dtype(config, dtype)
    return KVLayout(
        num_layers=model_config.num_layers,
        kv_heads=model_config.kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        dtype=cache_dtype,
        order=config.order,
        scales=cache_scales(Path(config.model), model_config.num_layers, cache_dtype),
    )


def pool_blocks(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """Blocks of the pool, by number or by memory.

    Raises:
        ConfigError: ``pool_memory`` is too little for a pool, or more than ``device`` has free.
    """
    if config.pool_memory is None:
        return config.num_blocks
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    return PoolMemory.parse(config.pool_memory).blocks(layout, free)


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig, num_blocks: int | None) -> int:
    """Tokens of one sequence at most.

    Args:
        config: what is asked for.
        model_config: what the model knows.
        num_blocks: of the pool; None where that is not known yet.

    Raises:
        ConfigError: ``config`` asks for more than the model knows positions for, or than the pool holds.
    """
    held = model_config.max_positions if num_blocks is None else config.longest(num_blocks)
    if config.max_model_len is None:
        return min(model_config.max_positions, held)
    if config.max_model_len > model_config.max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's {model_config.max_positions} positions",
            field="max_model_len",
        )
    return config.max_model_len
