"""The checksum of a part: 64 bits of xxh3 over what announces it and then its bytes, in the order of its targets.

Each end reckons it from its own memory. It finds what memory, links and programs break; it is no proof of who sent the
bytes. The library lets other threads run while it reads a large piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from kv_transfer.gate import Gate

Checksum = xxhash.xxh3_64
SUM_BYTES = 8
PIECE_BYTES = 1 << 20
"""What is read at a time: bounds how long a gate is held, or an event loop held up."""


def pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The views in order, cut so that none is longer than PIECE_BYTES."""
    for view in views:
        for begin in range(0, view.nbytes, PIECE_BYTES):
            yield view[begin : begin + PIECE_BYTES]


def reckon(first: bytes, views: Iterable[memoryview], gate: Gate) -> bytes | None:
    """The checksum of ``first`` and ``views``; None when ``gate`` was shut before the end."""
    checksum = Checksum(first)
    for piece in pieces(views):
        if not gate.enter():
            return None
        try:
            checksum.update(piece)
        finally:
            gate.leave()
    return checksum.digest()
