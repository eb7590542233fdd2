"""Bytes of the shared-memory transport, native order (both ends are on one host), every length bounded.

::

    hello     to the receiver    magic "KVSH", lowest version, highest version, zero, bytes of the pool;
                                 with it, two descriptors: the pool and the ledger
    welcome   to the sender      magic "KVSW", lowest version, highest version, verdict, length of the reason,
                                 then the reason (UTF-8)
    frame     to the receiver    magic "KVSF", ticket, ship, ledger slot, spans, blocks,
                                 then the span table (source, target, nbytes), the block table (block, generation)
    answer    to the sender      magic "KVSA", verdict, length of the reason, ship, then the reason (UTF-8)

Each frame has one answer, in any order.

History: 1 -- first version. 2 -- the spans may be one and the same band of each block, in place of whole blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.shm.ledger import SLOTS
from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch, MalformedFrame, VersionMismatch

LOWEST_VERSION = 2
HIGHEST_VERSION = 2
MAX_SPANS = 1 << 20
MAX_BLOCKS = 1 << 20
MAX_REASON = 255
MAX_POOL = 1 << 48

HELLO = struct.Struct("=4sBBHQ")
WELCOME = struct.Struct("=4sBBBB")
FRAME = struct.Struct("=4s16sQIII")
ANSWER = struct.Struct("=4sBBQ")
SPAN = struct.Struct("=QQQ")
BLOCK = struct.Struct("=IQ")

HELLO_MAGIC = b"KVSH"
WELCOME_MAGIC = b"KVSW"
FRAME_MAGIC = b"KVSF"
ANSWER_MAGIC = b"KVSA"


def pack_hello(pool_bytes: int) -> bytes:
    """This release's hello."""
    return HELLO.pack(HELLO_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, 0, pool_bytes)


def parse_hello(data: bytes | bytearray) -> int:
    """Bytes of the peer's pool.

    Raises:
        MalformedFrame: it is no hello.
        VersionMismatch: there is no common version; names both ranges.
    """
    magic, lowest, highest, zero, nbytes = HELLO.unpack(data)
    if magic != HELLO_MAGIC or zero or not 0 < nbytes < MAX_POOL:
        raise MalformedFrame(f"not a hello of the shm transport: {bytes(data)!r}")
    _check_versions(lowest, highest)
    return int(nbytes)


def pack_welcome(reason: str | None) -> bytes:
    """The answer to a hello: welcome, or turned away for ``reason``."""
    text = (reason or "").encode()[:MAX_REASON]
    return WELCOME.pack(WELCOME_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, reason is not None, len(text)) + text


def parse_welcome(data: bytes | bytearray) -> tuple[bool, int]:
    """``(turned away, bytes of reason that follow)``.

    Raises:
        MalformedFrame: it is no welcome.
        VersionMismatch: there is no common version; names both ranges.
    """
    magic, lowest, highest, refused, length = WELCOME.unpack(data)
    if magic != WELCOME_MAGIC or refused > 1:
        raise MalformedFrame(f"not a welcome of the shm transport: {bytes(data)!r}")
    _check_versions(lowest, highest)
    return bool(refused), length


def _check_versions(lowest: int, highest: int) -> None:
    if min(highest, HIGHEST_VERSION) < max(lowest, LOWEST_VERSION) or lowest > highest:
        ranges = f"peer speaks {lowest} to {highest}, this process {LOWEST_VERSION} to {HIGHEST_VERSION}"
        raise VersionMismatch(f"no common version of the shm transport: {ranges}")


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The fixed part of a frame.

    Attributes:
        ticket: of the window.
        ship: its number.
        slot: of its ledger entry.
        spans, blocks: entries of the two tables.
    """

    ticket: bytes
    ship: int
    slot: int
    spans: int
    blocks: int

    @property
    def table_bytes(self) -> int:
        """Length of the two tables."""
        return self.spans * SPAN.size + self.blocks * BLOCK.size


def pack_frame(
    ticket: bytes, ship: int, slot: int, spans: Sequence[Span], generations: Sequence[tuple[int, int]]
) -> bytes:
    """One ship.

    Raises:
        IntegrityMismatch: it is too much for one frame.
    """
    if len(spans) > MAX_SPANS or len(generations) > MAX_BLOCKS:
        counts = f"{len(spans)} spans and {len(generations)} blocks"
        raise IntegrityMismatch(f"{counts} are too much for one ship", field="spans")
    head = FRAME.pack(FRAME_MAGIC, ticket, ship, slot, len(spans), len(generations))
    table = b"".join([SPAN.pack(span.source, span.target, span.nbytes) for span in spans])
    return head + table + b"".join([BLOCK.pack(*named) for named in generations])


def parse_head(data: bytes | bytearray) -> FrameHead:
    """The head of a frame.

    Raises:
        MalformedFrame: it is none, or breaks a bound; names the field and the value.
    """
    magic, ticket, ship, slot, spans, blocks = FRAME.unpack(data)
    if magic != FRAME_MAGIC:
        raise MalformedFrame(f"not a frame of the shm transport: it begins with {magic!r}")
    checks = (
        ("ship", ship, ship > 0),
        ("slot", slot, slot < SLOTS),
        ("spans", spans, 1 <= spans <= MAX_SPANS),
        ("blocks", blocks, 1 <= blocks <= MAX_BLOCKS),
    )
    for name, value, valid in checks:
        if not valid:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    return FrameHead(ticket, ship, slot, spans, blocks)


def parse_tables(
    head: FrameHead, data: bytearray, pool_bytes: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """``(source, target, nbytes)`` of every span, ``(block, generation)`` of every block.

    Raises:
        MalformedFrame: a span reads outside the sender's pool.
    """
    split = head.spans * SPAN.size
    with memoryview(data) as view:
        spans: list[tuple[int, int, int]] = list(SPAN.iter_unpack(view[:split]))
        generations: list[tuple[int, int]] = list(BLOCK.iter_unpack(view[split:]))
    for source, _, nbytes in spans:
        if not nbytes or source + nbytes > pool_bytes:
            raise MalformedFrame(f"span {source}+{nbytes} is not in the pool of {pool_bytes} bytes", field="spans")
    return spans, generations


def pack_answer(ship: int, reason: str | None) -> bytes:
    """The answer to a frame: landed, or refused for ``reason``."""
    text = (reason or "").encode()[:MAX_REASON]
    return ANSWER.pack(ANSWER_MAGIC, reason is not None, len(text), ship) + text


def parse_answer(data: bytes | bytearray) -> tuple[int, bool, int]:
    """``(ship, refused, bytes of reason that follow)``.

    Raises:
        MalformedFrame: it is no answer.
    """
    magic, refused, length, ship = ANSWER.unpack(data)
    if magic != ANSWER_MAGIC or refused > 1:
        raise MalformedFrame(f"not an answer of the shm transport: {bytes(data)!r}")
    return ship, bool(refused), length
