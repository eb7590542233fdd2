"""Rotary position embedding (Su et al., 2021) from a table."""

from __future__ import annotations

import math

import torch

from engine.models.rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position of each pair of elements, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    periods = config.theta**exponents
    frequencies = 1.0 / periods
    match config.type:
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(periods, config)
        case "longrope":
            # Divided once: a second rounding would grow with the position.
            return 1.0 / (torch.tensor(config.divisors, dtype=torch.float32) * periods)
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    # Long wavelengths are stretched, short ones are kept, and those between are blended.
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_positions / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    # Pairs up to the first border turn often enough to be kept, those from the second on are stretched.
    first, last = (_pair_with_turns(turns, config) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    pairs = torch.arange(len(periods), dtype=torch.float32)
    kept = 1.0 - ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return 1.0 / (config.factor * periods) * (1.0 - kept) + 1.0 / periods * kept


def _pair_with_turns(turns: float, config: RopeConfig) -> float:
    """Which pair of elements, as a real number, turns so often over the original positions."""
    wavelength = config.original_positions / (2 * math.pi * turns)
    return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))


class RotaryTable:
    """Cosines and sines of every position a sequence may have.

    Args:
        config: angles; of the elements it turns the first half is paired with the second.
        length: positions.
        dtype: of the table; the angles are computed in float32.
        device: where it lies.
    """

    def __init__(self, config: RopeConfig, *, length: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(config)
        self._cos = (angles.cos() * config.amplitude).to(device, dtype)
        self._sin = (angles.sin() * config.amplitude).to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [T, 1, rotary_dim / 2], at int64 ``positions`` [T]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, head_dim] turned by the angles of :meth:`RotaryTable.at`; elements beyond them stay."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
