"""Makes blocks of another form out of a pool's blocks, and a pool's blocks out of those.

Elements are moved and converted; nothing is decided here. :func:`pack` and :func:`unpack` do it between two host
memories. Blocking: call them in a thread of its own. The GIL is free while bytes move. What they are made of works on
tensors of any one device (:mod:`engine.device_pool`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.float8 import LARGEST, narrowed, widened
from engine.kv_cache import TORCH_DTYPES
from protocol.layout import FLOAT8, CacheDtype, KVLayout
from protocol.wire_layout import WireLayout

SMALLEST_SCALE = 2.0**-126
"""Smallest normal number of float32: what is divided by it stays finite."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Move(Protocol):
    """A strided copy, in elements of either side; see :class:`kv_transfer.moves.Move`."""

    @property
    def source(self) -> int:
        """Of the first element."""

    @property
    def target(self) -> int:
        """Of the first element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The indices run over it."""

    @property
    def source_strides(self) -> tuple[int, ...]:
        """One per dimension."""

    @property
    def target_strides(self) -> tuple[int, ...]:
        """One per dimension."""


def pack(
    source: memoryview,
    layout: KVLayout,
    moves: Iterable[Move],
    target: memoryview,
    wire: WireLayout,
    incomplete: Sequence[int],
) -> None:
    """Make wire blocks out of elements of a pool.

    Args:
        source: the pool.
        layout: of the pool.
        moves: which elements go where; block ``b`` of the target begins at element ``b * wire.elements``.
        target: whole wire blocks; all of it is written.
        wire: of the target.
        incomplete: blocks that the moves do not fill; the rest of them becomes zero.
    """
    if not wire.takes_as_they_are(layout):
        pack_tensors(_elements(source, layout.dtype), layout, moves, _raw(target), wire, incomplete)
        return
    _clear(_elements(target, wire.element), wire, incomplete)
    for move in moves:
        _copy(source, move, target, layout.itemsize)


def pack_tensors(
    pool: torch.Tensor,
    layout: KVLayout,
    moves: Iterable[Move],
    made: torch.Tensor,
    wire: WireLayout,
    incomplete: Sequence[int],
) -> None:
    """:func:`pack` between tensors of one device.

    Args:
        pool: all elements, [elements].
        layout: of the pool.
        moves: which elements go where.
        made: bytes of whole wire blocks, [bytes]; all of it is written.
        wire: of what is made.
        incomplete: blocks that the moves do not fill; the rest of them becomes zero.
    """
    as_they_are = wire.takes_as_they_are(layout)
    in_place = as_they_are or not (wire.scaled or wire.element in FLOAT8 or layout.scales)
    if in_place:
        elements = made.view(TORCH_DTYPES[wire.element])
    else:
        elements = torch.empty(made.nbytes // wire.block_bytes * wire.elements, device=made.device)
    _clear(elements, wire, incomplete)
    for move in moves:
        wanted = pool.as_strided(move.shape, move.source_strides, move.source)
        elements.as_strided(move.shape, move.target_strides, move.target).copy_(wanted)
    if in_place:
        return
    if layout.scales:
        elements.view(-1, *wire.layout.pool_shape(1)[1:]).mul_(_pool_scales(layout, made.device))
    if wire.scaled:
        _quantise(elements, made.view(-1, wire.block_bytes), wire)
    elif wire.element in FLOAT8:
        made.view(TORCH_DTYPES[wire.element]).copy_(_as_pool_elements(elements, wire.layout).view(-1))
    else:
        made.view(TORCH_DTYPES[wire.element]).copy_(elements)


def unpack(source: memoryview, wire: WireLayout, blocks: Iterable[int], pool: memoryview) -> None:
    """Make pool blocks out of wire blocks; block ``b`` of one becomes block ``b`` of the other.

    Args:
        source: holds block ``b`` at ``b * wire.block_bytes``.
        wire: of the source.
        blocks: which.
        pool: of the layout ``wire.layout``.
    """
    cache = _elements(pool, wire.layout.dtype).view(-1, *wire.layout.pool_shape(1)[1:])
    landed = _raw(source).view(-1, wire.block_bytes)
    for block in blocks:
        # One by one, which stays in the cache between the passes.
        cache[block] = unpacked(landed[block : block + 1], wire)[0]


def unpacked(landed: torch.Tensor, wire: WireLayout) -> torch.Tensor:
    """Elements of whole wire blocks; those of an eight-bit pool as they lie in it, others to be converted yet.

    Args:
        landed: [blocks, wire.block_bytes] bytes.
        wire: of them.

    Returns:
        ``[blocks, *wire.layout.pool_shape(1)[1:]]``, on the same device.
    """
    if wire.scaled:
        values, scales = _parts(landed, wire)
        found = widened(values, torch.float32).mul_(scales)
    else:
        found = landed.view(TORCH_DTYPES[wire.element]).view(-1, *wire.layout.pool_shape(1)[1:])
    if wire.as_in_pool or wire.layout.dtype not in FLOAT8:
        return found
    return _as_pool_elements(found, wire.layout)


def _raw(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _elements(memory: memoryview, dtype: CacheDtype) -> torch.Tensor:
    return _raw(memory).view(TORCH_DTYPES[dtype])


def _pool_scales(layout: KVLayout, device: torch.device) -> torch.Tensor:
    """Of every layer's K and V, [layers, 2, 1, 1, 1]."""
    scales = [layout.scales_of(layer) for layer in range(layout.num_layers)]
    return torch.tensor(scales, dtype=torch.float32, device=device).view(-1, 2, 1, 1, 1)


def _as_pool_elements(values: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """What ``values`` of whole blocks become in an eight-bit pool, [blocks, layers, 2, ...]."""
    blocks = values.view(-1, *layout.pool_shape(1)[1:])
    return narrowed(blocks, TORCH_DTYPES[layout.dtype], _pool_scales(layout, values.device))


def _clear(elements: torch.Tensor, wire: WireLayout, blocks: Iterable[int]) -> None:
    for block in blocks:
        elements[block * wire.elements : (block + 1) * wire.elements] = 0


def _copy(source: memoryview, move: Move, target: memoryview, itemsize: int) -> None:
    """Without torch, which would split it between threads that the engine's step needs."""
    views = [
        np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, _UNSIGNED[itemsize])[first:],
            move.shape,
            [stride * itemsize for stride in strides],
        )
        for memory, first, strides in (
            (source, move.source, move.source_strides),
            (target, move.target, move.target_strides),
        )
    ]
    np.copyto(views[1], views[0])


def _parts(raw: torch.Tensor, wire: WireLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of [blocks, bytes]; scales have size 1 in the dimensions that share one."""
    values = raw[:, : wire.elements].view(torch.float8_e4m3fn).view(-1, *wire.layout.pool_shape(1)[1:])
    layers, halves, heads = wire.scale_shape
    end = wire.scale_offset + layers * halves * heads * torch.float32.itemsize
    shared = (heads, 1, 1) if wire.layout.order == "HND" else (1, heads, 1)
    scales = raw[:, wire.scale_offset : end].view(torch.float32).view(-1, layers, halves, *shared)
    return values, scales


def _quantise(elements: torch.Tensor, made: torch.Tensor, wire: WireLayout) -> None:
    values, scales = _parts(made, wire)
    together = (-2, -1) if wire.layout.order == "HND" else (-3, -1)
    found = elements.view(values.shape)
    # On a CPU block by block, which stays in the cache between these passes; elsewhere a launch costs more.
    groups = zip(found, values, scales, strict=True) if made.device.type == "cpu" else [(found, values, scales)]
    for block, value, scale in groups:
        largest = block.abs().amax(together, keepdim=True)
        # Infinity less itself is not a number: with one that is not finite, all that share its scale arrive so.
        scale.copy_(largest.add_(largest - largest).div_(LARGEST[value.dtype]).clamp_(min=SMALLEST_SCALE))
        value.copy_(block.div_(scale))
