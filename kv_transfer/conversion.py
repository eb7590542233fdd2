"""Which elements go where between two layouts that differ: a pure function of both, of block lists and of tokens.

Block size, inner order and shard count need elements in another place; dtypes need them changed on the way, which
:class:`Conversion` describes and whoever carries it out does. For equal layouts :func:`kv_transfer.plan.plan` has less
to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_transfer.moves import Move, Runs, joined, runs_of
from kv_transfer.shards import layout_heads, shares
from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch, LayoutMismatch
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout


@dataclass(frozen=True, slots=True)
class Conversion:
    """What it takes to make target blocks out of source blocks.

    Attributes:
        source: layout of the pool that is read.
        target: of the blocks that are made.
        moves: where each element goes, in elements of either side; a target block begins at its id times
            ``target.elements``. The element type of ``source`` becomes that of ``target``, with the scales that either
            has.
        incomplete: target blocks that the moves do not fill.
    """

    source: KVLayout
    target: WireLayout
    moves: tuple[Move, ...]
    incomplete: tuple[int, ...]

    @property
    def moves_only(self) -> bool:
        """Whether every element arrives as it is."""
        return self.target.takes_as_they_are(self.source)

    def runs(self) -> Runs:
        """The fewest contiguous runs, in the order of their targets."""
        return runs_of(self.moves)

    def spans(self) -> list[Span]:
        """The fewest spans of bytes, in the order of their targets.

        Raises:
            LayoutMismatch: elements change on the way, so that no copy of bytes will do; names both dtypes, or scales.
        """
        if not self.moves_only:
            here, there = self.source.dtype, self.target.element
            if here != there:
                differing = f"dtype: {here!r} here, {there!r} there"
            else:
                differing = "; ".join(self.source.differences(self.target.layout))
            raise LayoutMismatch(f"spans move bytes and convert nothing: {differing}", field="dtype")
        size = self.source.itemsize
        return [Span(source * size, target * size, count * size) for source, target, count in self.runs().tolist()]


def convert(
    source: KVLayout,
    source_blocks: Sequence[int],
    target: WireLayout,
    target_blocks: Sequence[int],
    tokens: range,
    *,
    layers: range | None = None,
    total_heads: int | None = None,
) -> Conversion:
    """What brings ``tokens`` of a sequence from source blocks into target blocks.

    Args:
        source: layout of the pool that is read.
        source_blocks: ids of the blocks that hold ``tokens``: the first holds ``tokens.start``, the last
            ``tokens.stop - 1``.
        target: of the blocks that are written.
        target_blocks: their ids, likewise; each at most once.
        tokens: positions in the sequence; a plain range.
        layers: that are wanted; None is all.
        total_heads: KV heads of the whole model; None where neither side is a shard. Of the heads that both shards
            hold, the plan moves those that the source is to ship (:func:`kv_transfer.shards.shares`).

    Raises:
        LayoutMismatch: the layouts are not of one model's geometry; names both values.
        IntegrityMismatch: the block lists do not fit ``tokens``, name a negative id, or name a target twice.
    """
    chosen = range(source.num_layers) if layers is None else layers
    differing = source.geometry_differences(target.layout, shards=total_heads is None)
    if differing:
        raise LayoutMismatch("source (here) and target (there) cannot be converted: " + "; ".join(differing))
    if chosen.step != 1 or chosen.start < 0 or chosen.stop > source.num_layers:
        raise IntegrityMismatch(f"layers must be a plain range within [0, {source.num_layers}), got {chosen}")
    _check_blocks("source", source_blocks, source.block_size, tokens)
    _check_blocks("target", target_blocks, target.layout.block_size, tokens)
    if len(set(target_blocks)) != len(target_blocks):
        raise IntegrityMismatch("a target block is named twice", field="target_blocks")
    heads, source_head, target_head = _heads(source, target.layout, total_heads)
    here, there = _Side(source, source_blocks, tokens), _Side(target.layout, target_blocks, tokens)
    moves = [
        Move(
            here.offset(begin, chosen.start, source_head),
            there.offset(begin, chosen.start, target_head),
            (len(chosen), 2, end - begin, heads, source.head_dim),
            here.strides,
            there.strides,
        )
        for begin, end in _pieces(tokens, source.block_size, target.layout.block_size)
        if heads and chosen
    ]
    whole = heads == target.layout.kv_heads and len(chosen) == source.num_layers
    return Conversion(source, target, joined(moves), there.unfilled(tokens) if whole else tuple(target_blocks))


class _Side:
    """Where one side keeps an element of the tokens that its blocks hold."""

    def __init__(self, layout: KVLayout, blocks: Sequence[int], tokens: range) -> None:
        self._size = layout.block_size
        self._blocks = blocks
        self._first = tokens.start // layout.block_size
        half = layout.kv_heads * layout.block_size * layout.head_dim
        if layout.order == "HND":
            self._head, self._token = layout.block_size * layout.head_dim, layout.head_dim
        else:
            self._head, self._token = layout.head_dim, layout.kv_heads * layout.head_dim
        self._block = layout.num_layers * 2 * half
        self.strides = (2 * half, half, self._token, self._head, 1)

    def offset(self, token: int, layer: int, head: int) -> int:
        """Of the first element of a token's K."""
        index, inside = divmod(token, self._size)
        block = self._blocks[index - self._first]
        return block * self._block + layer * self.strides[0] + inside * self._token + head * self._head

    def unfilled(self, tokens: range) -> tuple[int, ...]:
        """Blocks of which ``tokens`` are not all."""
        ends = [index for index, edge in ((0, tokens.start), (-1, tokens.stop)) if edge % self._size]
        return tuple(dict.fromkeys(self._blocks[index] for index in ends if self._blocks))


def _pieces(tokens: range, source_size: int, target_size: int) -> list[tuple[int, int]]:
    """``tokens`` cut wherever either side's blocks end."""
    cuts = {tokens.start, tokens.stop}
    for size in (source_size, target_size):
        cuts.update(range(tokens.start + size - tokens.start % size, tokens.stop, size))
    return list(pairwise(sorted(cuts)))


def _heads(source: KVLayout, target: KVLayout, total_heads: int | None) -> tuple[int, int, int]:
    """How many heads move, and the first of them in either shard."""
    if total_heads is None:
        return source.kv_heads, 0, 0
    here, there = layout_heads(source, total_heads), layout_heads(target, total_heads)
    for share in shares(total_heads, source.shard_count, target.shard_index, target.shard_count):
        if share.source_index == source.shard_index:
            return len(share.heads), share.heads.start - here.start, share.heads.start - there.start
    return 0, 0, 0


def _check_blocks(side: str, blocks: Sequence[int], block_size: int, tokens: range) -> None:
    field = f"{side}_blocks"
    if tokens.step != 1 or tokens.start < 0:
        raise IntegrityMismatch(f"tokens must be a plain range from 0 or more, got {tokens}", field="tokens")
    wanted = -(-tokens.stop // block_size) - tokens.start // block_size if tokens else 0
    if len(blocks) != wanted:
        raise IntegrityMismatch(
            f"{len(blocks)} {side} blocks, {wanted} of {block_size} tokens hold {tokens}", field=field
        )
    if min(blocks, default=0) < 0:
        raise IntegrityMismatch(f"{side} block {min(blocks)} is negative", field=field)
