"""Which bytes go where: a pure function of two layouts and two block lists."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch, LayoutMismatch
from protocol.layout import KVLayout

MAX_SPAN_BYTES = 256 << 20
"""Longest span that :func:`plan` makes of more than one block; keeps large ships divisible between streams."""


def plan(
    source: KVLayout,
    source_blocks: Sequence[int],
    target: KVLayout,
    target_blocks: Sequence[int],
    *,
    max_span_bytes: int = MAX_SPAN_BYTES,
) -> list[Span]:
    """The fewest spans that copy ``source_blocks[i]`` onto ``target_blocks[i]`` for every ``i``.

    Blocks that are neighbours in both pools travel as one span, whatever their order in the lists. Spans come in
    the order of their targets, never overlap there, and hold whole blocks.

    Args:
        source: layout of the pool that is read.
        source_blocks: block ids in it; the same block may stand more than once.
        target: layout of the pool that is written; equal to ``source``.
        target_blocks: block ids in it, each at most once.
        max_span_bytes: no span is longer, unless one block is.

    Raises:
        LayoutMismatch: the layouts differ; names both values of each field that does.
        IntegrityMismatch: the lists differ in length, name a negative id, or name a target twice.
    """
    differing = source.differences(target)
    if differing:
        raise LayoutMismatch("source (here) and target (there) layouts differ: " + "; ".join(differing))
    if len(source_blocks) != len(target_blocks):
        raise IntegrityMismatch(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks")
    block_bytes = source.block_bytes
    longest = max(1, max_span_bytes // block_bytes)
    spans: list[Span] = []
    first_source = first_target = count = 0
    for to, origin in sorted(zip(target_blocks, source_blocks, strict=True)):
        if count and to == first_target + count - 1:
            raise IntegrityMismatch(f"target block {to} is named twice", field="target_blocks")
        adjacent = to == first_target + count and origin == first_source + count
        if count and adjacent and count < longest:
            count += 1
            continue
        if count:
            spans.append(Span(first_source * block_bytes, first_target * block_bytes, count * block_bytes))
        first_source, first_target, count = origin, to, 1
    if count:
        spans.append(Span(first_source * block_bytes, first_target * block_bytes, count * block_bytes))
    return spans
