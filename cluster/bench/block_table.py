"""Which blocks a transfer reads and writes: pure functions of the case and a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.case import CHUNK_TOKENS, Case
from kv_transfer.plan import plan
from kv_transfer.span import Span
from protocol.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a case.

    Attributes:
        source: block ids in the sender's pool.
        target: block ids in the receiver's.
        ships: ``(spans, target blocks)`` of each ship call, in order.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    ships: tuple[tuple[tuple[Span, ...], tuple[int, ...]], ...]

    def spans(self) -> list[Span]:
        """Of all its ship calls."""
        return [span for spans, _ in self.ships for span in spans]


def transfers(case: Case, layout: KVLayout, pool_blocks: int, *, seed: int) -> list[Transfer]:
    """The transfers of one round of ``case``; no two share a block on either side.

    Args:
        case: what is measured.
        layout: of both pools.
        pool_blocks: blocks of either pool, at least ``case.pool_blocks(layout)``.
        seed: the same one draws the same blocks.
    """
    each = case.blocks(layout)
    count = each * case.concurrency
    if case.table == "contiguous":
        source = target = list(range(count))
    else:
        rng = random.Random(seed)  # noqa: S311
        source, target = rng.sample(range(pool_blocks), count), rng.sample(range(pool_blocks), count)
    step = each if case.way == "whole" else max(1, CHUNK_TOKENS // layout.block_size)
    return [
        _transfer(layout, source[first : first + each], target[first : first + each], step)
        for first in range(0, count, each)
    ]


def _transfer(layout: KVLayout, source: Sequence[int], target: Sequence[int], step: int) -> Transfer:
    ships = []
    for first in range(0, len(source), step):
        here, there = source[first : first + step], target[first : first + step]
        ships.append((tuple(plan(layout, here, layout, there)), tuple(there)))
    return Transfer(tuple(source), tuple(target), tuple(ships))
