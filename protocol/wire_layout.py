"""How the blocks of a decode worker's pool look on their way to it.

Mostly as they lie in the pool. With a wire dtype the elements cross as another type, in the pool's own order. As
``float8_e4m3``, where that is not the pool's own type, each head of K, and of V, of a layer of a block is divided by a
scale of its own, and the scales follow the elements::

    [num_layers, 2, *inner_shape] of float8_e4m3 | padding | [num_layers, 2, kv_heads] of float32 | padding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from protocol.layout import ITEMSIZE, CacheDtype, KVLayout

WireDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3"]

WIRE_DTYPES: tuple[WireDtype, ...] = get_args(WireDtype)
"""Element types that blocks can be asked to cross in."""

SCALE_BYTES = 4
ALIGNMENT = 16
"""Scales, and each block with scales, begin at a multiple of this."""


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Geometry of a block on the wire.

    Attributes:
        layout: of the pool that the block is for.
        dtype: element type on the wire; None is the pool's own.
    """

    layout: KVLayout
    dtype: WireDtype | None = None

    @property
    def element(self) -> CacheDtype:
        """Element type on the wire."""
        return self.dtype or self.layout.dtype

    @property
    def as_in_pool(self) -> bool:
        """Whether a block crosses as it lies in the pool."""
        return self.element == self.layout.dtype

    @property
    def scaled(self) -> bool:
        """Whether scales follow the elements."""
        return self.element == "float8_e4m3" and not self.as_in_pool

    @property
    def itemsize(self) -> int:
        """Bytes per element on the wire."""
        return ITEMSIZE[self.element]

    def takes_as_they_are(self, source: KVLayout) -> bool:
        """Whether elements of a pool of ``source`` cross without being changed; where they go is another matter."""
        if self.as_in_pool:
            return source.same_elements(self.layout)
        return not self.scaled and source.dtype == self.element

    @property
    def elements(self) -> int:
        """Elements of one block."""
        return self.layout.block_bytes // self.layout.itemsize

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """Shape of one block's scales."""
        return (self.layout.num_layers, 2, self.layout.kv_heads)

    @property
    def scale_offset(self) -> int:
        """Where in a block its scales begin; without scales, its end."""
        data = self.elements * self.itemsize
        return _aligned(data) if self.scaled else data

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        if not self.scaled:
            return self.scale_offset
        layers, halves, heads = self.scale_shape
        return _aligned(self.scale_offset + layers * halves * heads * SCALE_BYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
