"""Rotary position embedding (Su et al., 2021) as ``config.json`` describes it, and how it is stretched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.fields import count, flag, number, numbers
from protocol.errors import CheckpointUnavailable, UnsupportedArchitecture

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Angles of the positions.

    Attributes:
        type: default; dynamic (bloc97, 2023: as default up to the model's positions, which are all that is served);
            linear (positions divided by ``factor``); llama3 (only low frequencies are); yarn (Peng et al., 2023: low
            frequencies are divided, high ones kept, a ramp between); longrope (Ding et al., 2024: each frequency has
            its own divisor; here the ones for contexts of up to ``original_positions``).
        theta: base of the wavelengths.
        rotary_dim: leading elements of a head that are turned; the others are left as they are.
        factor: stretch; 1 where there is none.
        low_freq_factor, high_freq_factor: llama3's borders between the frequencies.
        original_positions: what the model was first trained on, where it is stretched.
        beta_fast, beta_slow: yarn's borders, in turns over ``original_positions``.
        truncate: whether yarn's borders are whole dimensions.
        divisors: longrope's, one per pair of elements.
        amplitude: of the cosines and sines.
    """

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    amplitude: float = 1.0

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeConfig:
        """What :func:`~engine.models.config_fields.fields_of` an architecture say of a model with such heads.

        Raises:
            CheckpointUnavailable: a value is missing or out of range; names it.
            UnsupportedArchitecture: it is of a type that is not known here.
        """
        # transformers 5 writes rope_parameters; earlier releases wrote rope_theta and, where stretched, rope_scaling.
        values = fields["rope_scaling"] or fields["rope_parameters"] or {}
        if not isinstance(values, dict):
            raise CheckpointUnavailable(f"config.json: rope parameters must be an object, got {values!r}")
        for name, value in values.items():
            if isinstance(value, dict):
                raise UnsupportedArchitecture(f"rope parameters of their own for {name!r} are not supported")
        kind = _kind(values)
        fraction = number(values, "partial_rotary_factor", number(fields, "partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * fraction)
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise CheckpointUnavailable(
                f"config.json: partial_rotary_factor {fraction} of head_dim {head_dim} is no even number of elements"
            )
        theta = number(values, "rope_theta", number(fields, "rope_theta"))
        # Beside the rope parameters it has precedence over what is among them.
        name = "original_max_position_embeddings"
        original = count(values if fields[name] is None else fields, name, max_positions)
        match kind:
            case "linear":
                return cls(kind, theta, rotary_dim, number(values, "factor"))
            case "llama3":
                return _llama3(values, theta, rotary_dim, original)
            case "yarn":
                return _yarn(values, theta, rotary_dim, original, max_positions)
            case "longrope":
                return _longrope(values, theta, rotary_dim, original, max_positions)
            case _:
                return cls(kind, theta, rotary_dim)


def _kind(values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in values):  # former names
        return "longrope"
    if kind not in ROPE_TYPES:
        raise UnsupportedArchitecture(f"rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)} are")
    return str(kind)


def _llama3(values: Mapping[str, Any], theta: float, rotary_dim: int, original: int) -> RopeConfig:
    low, high = number(values, "low_freq_factor"), number(values, "high_freq_factor")
    if high <= low:
        raise CheckpointUnavailable(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
    return RopeConfig(
        "llama3",
        theta,
        rotary_dim,
        number(values, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original,
    )


def _yarn(values: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_positions: int) -> RopeConfig:
    factor = number(values, "factor", max_positions / original)
    if values.get("attention_factor") is not None:
        amplitude = number(values, "attention_factor")
    elif values.get("mscale") and values.get("mscale_all_dim"):
        amplitude = _yarn_amplitude(factor, number(values, "mscale")) / _yarn_amplitude(
            factor, number(values, "mscale_all_dim")
        )
    else:
        amplitude = _yarn_amplitude(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        rotary_dim,
        factor,
        original_positions=original,
        beta_fast=number(values, "beta_fast", 32.0),
        beta_slow=number(values, "beta_slow", 1.0),
        truncate=flag(values, "truncate", default=True),
        amplitude=amplitude,
    )


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(
    values: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_positions: int
) -> RopeConfig:
    factor = number(values, "factor", max_positions / original)
    amplitude = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        rotary_dim,
        factor,
        original_positions=original,
        divisors=numbers(values, "short_factor", rotary_dim // 2),
        amplitude=number(values, "attention_factor", amplitude),
    )
