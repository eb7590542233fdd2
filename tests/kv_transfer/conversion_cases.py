"""Random pairs of layouts, and a naive copy of one element at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kv_transfer.conversion import Conversion, convert
from kv_transfer.shards import heads_of, shares
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

Pool = npt.NDArray[np.int64]
POOL = 12


@dataclass(frozen=True)
class Case:
    """One shard on either side, block tables of a whole sequence, and what is wanted of it."""

    source: KVLayout
    target: KVLayout
    source_table: tuple[int, ...]
    target_table: tuple[int, ...]
    tokens: range
    layers: range
    total_heads: int

    @property
    def heads(self) -> range:
        """The model's heads that this source ships to this target."""
        found = shares(self.total_heads, self.source.shard_count, self.target.shard_index, self.target.shard_count)
        return next((share.heads for share in found if share.source_index == self.source.shard_index), range(0))

    def blocks(self, layout: KVLayout, table: tuple[int, ...]) -> tuple[int, ...]:
        if not self.tokens:
            return ()
        return table[self.tokens.start // layout.block_size : layout.blocks_for(self.tokens.stop)]

    def plan(self, *, back: bool = False) -> Conversion:
        sides = [(self.source, self.source_table), (self.target, self.target_table)]
        (source, here), (target, there) = reversed(sides) if back else sides
        total = None if (source.shard_count, target.shard_count) == (1, 1) else self.total_heads
        return convert(
            source,
            self.blocks(source, here),
            WireLayout(target),
            self.blocks(target, there),
            self.tokens,
            layers=self.layers,
            total_heads=total,
        )

    def place(self, layout: KVLayout, table: tuple[int, ...], where: tuple[int, int, int, int, int]) -> int:
        """The element of ``(token, layer, half, head of the model, dim)`` in a pool, straight from the definition."""
        token, layer, half, head, dim = where
        block, slot = divmod(layout.slot(list(table), token), layout.block_size)
        local = head - heads_of(layout.shard_index, layout.shard_count, self.total_heads).start
        inner = (local, slot, dim) if layout.order == "HND" else (slot, local, dim)
        return int(np.ravel_multi_index((block, layer, half, *inner), layout.pool_shape(POOL)))

    def pairs(self) -> list[tuple[int, int]]:
        """``(source, target)`` of every wanted element."""
        return [
            (
                self.place(self.source, self.source_table, (token, layer, half, head, dim)),
                self.place(self.target, self.target_table, (token, layer, half, head, dim)),
            )
            for token in self.tokens
            for layer in self.layers
            for half in (0, 1)
            for head in self.heads
            for dim in range(self.source.head_dim)
        ]


@st.composite
def cases(draw: st.DrawFn, *, sharded: bool = True) -> Case:
    counts = st.sampled_from((1, 2, 4)) if sharded else st.just(1)
    total_heads = draw(st.sampled_from((1, 2, 4) if sharded else (1, 2, 3)))
    num_layers, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def layout() -> KVLayout:
        count = draw(counts)
        index = draw(st.integers(0, count - 1))
        return KVLayout(
            num_layers=num_layers,
            kv_heads=len(heads_of(index, count, total_heads)),
            head_dim=head_dim,
            block_size=draw(st.integers(1, 5)),
            dtype="float32",
            order=draw(st.sampled_from(("HND", "NHD"))),
            shard_index=index,
            shard_count=count,
        )

    source, target = layout(), layout()
    length = draw(st.integers(1, min(source.block_size, target.block_size) * POOL))
    start = draw(st.integers(0, length))
    first_layer = draw(st.integers(0, num_layers))

    def table(layout: KVLayout) -> tuple[int, ...]:
        count = layout.blocks_for(length)
        if draw(st.booleans()):
            first = draw(st.integers(0, POOL - count))
            return tuple(range(first, first + count))
        return tuple(draw(st.permutations(range(POOL)))[:count])

    return Case(
        source,
        target,
        table(source),
        table(target),
        range(start, draw(st.integers(start, length))),
        range(first_layer, draw(st.integers(first_layer, num_layers))),
        total_heads,
    )


def carry_out(plan: Conversion, source: Pool, target: Pool) -> None:
    """Copy run by run."""
    for origin, to, length in plan.runs().tolist():
        target[to : to + length] = source[origin : origin + length]


def carry_out_moves(plan: Conversion, source: Pool, target: Pool) -> None:
    """Copy move by move."""
    size = source.itemsize
    for move in plan.moves:
        views = [
            np.lib.stride_tricks.as_strided(pool[first:], move.shape, [stride * size for stride in strides])
            for pool, first, strides in (
                (source, move.source, move.source_strides),
                (target, move.target, move.target_strides),
            )
        ]
        views[1][...] = views[0]


def pool_of(layout: KVLayout, seed: int = 1) -> Pool:
    """A pool in which every element is another number."""
    count = layout.pool_bytes(POOL) // layout.itemsize
    return np.arange(count, dtype=np.int64) + seed * (1 << 32)
