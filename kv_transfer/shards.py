"""Which heads a shard holds, and which source shard ships what a target shard wants.

With fewer KV heads than shards each head has several holders, as tensor parallelism replicates it. One of them ships to
a given target; the targets take turns among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from protocol.errors import LayoutMismatch
from protocol.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Share:
    """What one source shard ships to a target shard.

    Attributes:
        source_index: of the shard that ships.
        heads: of the whole model; adjacent.
    """

    source_index: int
    heads: range


def heads_of(index: int, count: int, total_heads: int) -> range:
    """The model's KV heads that shard ``index`` of ``count`` holds.

    Raises:
        LayoutMismatch: ``count`` neither divides ``total_heads`` nor is a multiple of it; names both.
    """
    if total_heads % count and count % total_heads:
        raise LayoutMismatch(f"shard_count {count} does not fit {total_heads} KV heads", field="shard_count")
    first = index * total_heads // count
    return range(first, first + max(1, total_heads // count))


def layout_heads(layout: KVLayout, total_heads: int) -> range:
    """The model's KV heads that are in ``layout``.

    Raises:
        LayoutMismatch: it holds another number of them than its shard should; names both.
    """
    heads = heads_of(layout.shard_index, layout.shard_count, total_heads)
    if layout.kv_heads != len(heads):
        raise LayoutMismatch(
            f"kv_heads: shard {layout.shard_index} of {layout.shard_count} holds {layout.kv_heads}, "
            f"and {len(heads)} of {total_heads} are its",
            field="kv_heads",
        )
    return heads


def shares(total_heads: int, source_count: int, target_index: int, target_count: int) -> tuple[Share, ...]:
    """Which shards of ``source_count`` ship to shard ``target_index`` of ``target_count``, and which heads.

    Each head that the target wants is shipped by exactly one of its holders.

    Raises:
        LayoutMismatch: as :func:`heads_of`.
    """
    wanted = heads_of(target_index, target_count, total_heads)
    heads_of(0, source_count, total_heads)
    holders = max(1, source_count // total_heads)
    receivers = max(1, target_count // total_heads)
    turn = target_index % receivers * holders // receivers

    def source_of(head: int) -> int:
        return head * source_count // total_heads + turn

    def found() -> Iterator[Share]:
        for index, heads in groupby(wanted, source_of):
            run = list(heads)
            yield Share(index, range(run[0], run[-1] + 1))

    return tuple(found())
