"""What an engine takes for its steps and has room for: all that a simulated worker knows of its hardware."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from protocol.errors import ConfigError
from protocol.layout import KVLayout

_Time = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]
_Least = Annotated[int, msgspec.Meta(ge=1, le=1 << 27)]


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's engine. Times in seconds.

    Attributes:
        layout: of its pool.
        num_blocks: of its pool.
        step_tokens: prompt tokens of a step at most.
        max_sequences: prompts, or sequences, of a step at most.
        prefill_fixed, prefill_per_token, prefill_per_pair: of a step of prefill: in any case, for each token in it, and
            for each pair of a token and one before it.
        decode_fixed, decode_per_sequence, decode_per_context: of a step of decode: in any case, for each sequence, and
            for each token of their contexts.
        ttft, tpot: what a request wants of it where it is not said.
        mixed_tokens: of a step of decode that also computes prompts, those of the sequences in it included.
    """

    layout: KVLayout
    num_blocks: _Least
    step_tokens: _Least
    max_sequences: _Least
    prefill_fixed: _Time
    prefill_per_token: _Time
    prefill_per_pair: _Time
    decode_fixed: _Time
    decode_per_sequence: _Time
    decode_per_context: _Time
    ttft: _Time
    tpot: _Time
    mixed_tokens: _Least = 512

    @property
    def token_bytes(self) -> float:
        """K and V of a token, in bytes."""
        return self.layout.block_bytes / self.layout.block_size

    def prefill_seconds(self, tokens: int, pairs: float) -> float:
        """A step of prefill."""
        return self.prefill_fixed + self.prefill_per_token * tokens + self.prefill_per_pair * pairs


def _of_hardware(
    layout: KVLayout,
    *,
    parameters: float,
    width: int,
    tflops: float,
    gb_per_s: float,
    memory_gb: float,
    ttft: float,
    tpot: float,
) -> EngineProfile:
    """By arithmetic: half of the peak FLOPs, 80 % of the bandwidth, 90 % of the memory, weights in bfloat16."""
    flops, bandwidth = 0.5 * tflops * 1e12, 0.8 * gb_per_s * 1e9
    weights = 2.0 * parameters
    token_bytes = layout.block_bytes / layout.block_size
    per_token = 2.0 * parameters / flops
    return EngineProfile(
        layout=layout,
        num_blocks=int((0.9 * memory_gb * 1e9 - weights) / layout.block_bytes),
        step_tokens=8192,
        max_sequences=256,
        prefill_fixed=2e-3,
        prefill_per_token=per_token,
        prefill_per_pair=4.0 * layout.num_layers * width / flops,
        decode_fixed=weights / bandwidth + 1e-3,
        decode_per_sequence=per_token / 2,
        decode_per_context=token_bytes / bandwidth,
        ttft=ttft,
        tpot=tpot,
    )


_LLAMA_8B = KVLayout(num_layers=32, kv_heads=8, head_dim=128, block_size=16)
_LLAMA_70B = KVLayout(num_layers=80, kv_heads=8, head_dim=128, block_size=16)
PROFILES: Mapping[str, EngineProfile] = MappingProxyType(
    {
        # As measured by the engine's benchmark, one thread: docs/performance.md, "The engine's steps".
        "smollm2-cpu": EngineProfile(
            layout=KVLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=16),
            num_blocks=8192,
            step_tokens=512,
            max_sequences=64,
            prefill_fixed=28e-3,
            prefill_per_token=4.6e-4,
            prefill_per_pair=1.8e-7,
            decode_fixed=35e-3,
            decode_per_sequence=1.1e-3,
            decode_per_context=3.3e-6,
            ttft=2.0,
            tpot=0.1,
        ),
        "a100-llama8b": _of_hardware(
            _LLAMA_8B,
            parameters=8.0e9, width=4096, tflops=312, gb_per_s=2039, memory_gb=80, ttft=1.0, tpot=0.05,
        ),
        "h100-llama8b": _of_hardware(
            _LLAMA_8B,
            parameters=8.0e9, width=4096, tflops=989, gb_per_s=3350, memory_gb=80, ttft=0.5, tpot=0.03,
        ),
        # Eight GPUs as one, at 70 % of what they are by themselves.
        "h100x8-llama70b": _of_hardware(
            _LLAMA_70B,
            parameters=70.6e9, width=8192, tflops=0.7 * 8 * 989, gb_per_s=0.7 * 8 * 3350, memory_gb=8 * 80,
            ttft=1.0, tpot=0.04,
        ),
    }
)  # fmt: skip
"""By name."""


def profile_of(name: str) -> EngineProfile:
    """A preset, or what a JSON file says.

    Raises:
        ConfigError: there is neither a preset nor a file of that name (lists the presets), or a field of the file is
            missing or out of range.
    """
    if name in PROFILES:
        return PROFILES[name]
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=EngineProfile)
    except OSError as error:
        known = ", ".join(PROFILES)
        raise ConfigError(f"profile {name!r} is neither a file nor one of: {known}", field="profile") from error
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"profile {name!r}: {error}", field="profile") from error
