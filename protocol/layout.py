"""The shape of a paged KV cache, and all byte arithmetic on it.

Storage is block-major: ``[num_blocks, num_layers, 2, ...]`` in one allocation, where the inner order is HND
``[kv_heads, block_size, head_dim]`` or NHD ``[block_size, kv_heads, head_dim]``. A block with all its layers is one
contiguous span, and so is a layer range of one block.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Literal

import msgspec

from protocol.errors import ConfigError

Order = Literal["HND", "NHD"]
FloatDtype = Literal["float32", "float16", "bfloat16"]
"""Element types that are computed in."""
CacheDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]

ITEMSIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}
"""Bytes per element by dtype name."""
FLOAT8 = ("float8_e4m3", "float8_e5m2")
"""Element types that are kept and not computed in: what they stand for is the element times a scale."""
MAX_SCALES = 1 << 14
SCALE_RANGE = (2.0**-64, 2.0**64)
"""Between these a scale and what it scales stay finite in float32."""

PADDING_BLOCK = 0
"""Block 0 is reserved: padded rows of a batch read and write there."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Scales = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_SCALES)]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of one shard of a paged KV cache.

    Attributes:
        num_layers: transformer layers that hold KV.
        kv_heads: KV heads in this shard.
        head_dim: elements per head.
        block_size: tokens per block.
        dtype: element type of the cache.
        order: inner order of a block's one layer and one of K, V.
        shard_index, shard_count: which slice of the heads this is.
        scales: of an eight-bit cache: K's and V's of each layer in turn, float32 numbers; empty where all are 1.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    num_layers: _Positive
    kv_heads: _Positive
    head_dim: _Positive
    block_size: _Positive
    dtype: CacheDtype = "bfloat16"
    order: Order = "NHD"
    shard_index: _Index = 0
    shard_count: _Positive = 1
    scales: _Scales = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_size", "shard_count"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"dtype must be one of {sorted(ITEMSIZE)}, got {self.dtype!r}", field="dtype")
        if self.order not in ("HND", "NHD"):
            raise ConfigError(f"order must be 'HND' or 'NHD', got {self.order!r}", field="order")
        if not 0 <= self.shard_index < self.shard_count:
            raise ConfigError(
                f"shard_index must lie in [0, {self.shard_count}), got {self.shard_index}", field="shard_index"
            )
        self._check_scales()

    def _check_scales(self) -> None:
        if not self.scales:
            return
        if self.dtype not in FLOAT8:
            raise ConfigError(f"scales are for dtype {' or '.join(FLOAT8)}, got {self.dtype!r}", field="scales")
        if len(self.scales) != 2 * self.num_layers:
            raise ConfigError(
                f"scales must be two for each of {self.num_layers} layers, got {len(self.scales)}", field="scales"
            )
        low, high = SCALE_RANGE
        for scale in self.scales:
            if not (math.isfinite(scale) and low <= scale <= high):
                raise ConfigError(f"scales must lie in [{low}, {high}], got {scale}", field="scales")

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What K's and V's elements of a layer are to be multiplied by."""
        return (self.scales[2 * layer], self.scales[2 * layer + 1]) if self.scales else (1.0, 1.0)

    def same_elements(self, other: KVLayout) -> bool:
        """Whether the same bytes stand for the same numbers in both."""
        return (self.dtype, self.scales) == (other.dtype, other.scales)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers: ``2 * layers * kv_heads * head_dim * itemsize``."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def half_bytes(self) -> int:
        """Bytes of K (or V) of one layer of one block."""
        return self.kv_heads * self.block_size * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer of one block."""
        return 2 * self.half_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with all its layers."""
        return self.num_layers * self.layer_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a pool of ``num_blocks`` blocks."""
        return num_blocks * self.block_bytes

    def block_span(self, block_id: int, *, layers: range | None = None) -> tuple[int, int]:
        """``(offset, nbytes)`` in the pool of a block, or of a contiguous layer range of it."""
        chosen = range(self.num_layers) if layers is None else layers
        if chosen.step != 1 or chosen.start < 0 or chosen.stop > self.num_layers:
            raise ConfigError(f"layers must be a plain range within [0, {self.num_layers}), got {chosen}")
        offset = block_id * self.block_bytes + chosen.start * self.layer_bytes
        return offset, len(chosen) * self.layer_bytes

    def inner_shape(self) -> tuple[int, int, int]:
        """Shape of K (or V) of one layer of one block, in this layout's order."""
        if self.order == "HND":
            return (self.kv_heads, self.block_size, self.head_dim)
        return (self.block_size, self.kv_heads, self.head_dim)

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the whole pool's tensor."""
        return (num_blocks, self.num_layers, 2, *self.inner_shape())

    def slot(self, block_table: list[int], position: int) -> int:
        """Flat slot of a token: ``block_table[i // block_size] * block_size + i % block_size``."""
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def fingerprint(self) -> str:
        """Sixteen hex digits, equal in every process for equal layouts."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    def differences(self, other: KVLayout) -> list[str]:
        """One line per field in which the two layouts differ, naming both values."""
        return self._differences(other, self.__struct_fields__)

    def geometry_differences(self, other: KVLayout, *, shards: bool = True) -> list[str]:
        """As :meth:`differences`, of the fields that no conversion can bridge.

        Args:
            other: the other layout.
            shards: whether shards must be the same; between different ones each layout holds heads of its own.
        """
        geometry = ("num_layers", "head_dim")
        return self._differences(other, (*geometry, "kv_heads", "shard_index", "shard_count") if shards else geometry)

    def _differences(self, other: KVLayout, names: tuple[str, ...]) -> list[str]:
        return [
            self._scale_difference(other)
            if name == "scales"
            else f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]

    def _scale_difference(self, other: KVLayout) -> str:
        """The first that differs: there may be hundreds."""
        for layer in range(min(self.num_layers, other.num_layers)):
            for part, here, there in zip("KV", self.scales_of(layer), other.scales_of(layer), strict=True):
                if here != there:
                    return f"scales: {here:g} for {part} of layer {layer} here, {there:g} there"
        return f"scales: {len(self.scales)} here, {len(other.scales)} there"
