"""Rotary position embedding (Su et al., 2021) from a table."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.type == "linear":
        return frequencies / config.factor
    if config.type == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    # Long wavelengths are stretched, short ones are kept, and those between are blended.
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_positions / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / config.factor + blend * frequencies


class RotaryTable:
    """Cosines and sines of every position a sequence may have.

    Args:
        config: frequencies.
        head_dim: elements per head; the first half is paired with the second.
        length: positions.
        dtype: of the table; the angles are computed in float32.
        device: where it lies.
    """

    def __init__(
        self, config: RopeConfig, *, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(config, head_dim)
        self._cos = angles.cos().to(device, dtype)
        self._sin = angles.sin().to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [T, 1, head_dim / 2], at int64 ``positions`` [T]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, head_dim] turned by the angles of :meth:`RotaryTable.at`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
