"""Bytes of the TCP transport after its hello, big-endian, every length bounded.

::

    frame     to the receiver    magic "KVFR", ticket, ship, part, parts, spans, blocks, payload bytes,
                                 then the span table (target, nbytes), the block table (block, generation), the payload;
                                 with magic "KVFS" then the checksum of the frame from its magic to the payload's end
    answer    to the sender      magic "KVFA", ship, part, verdict, length of the reason, then the reason (UTF-8)

Each frame has one answer. A refusal may come before the payload has gone out; the sender then drops the connection
or, if it has sent all, goes on with it.

History: 1 -- first version. 2 -- frames with a CRC, and the verdict on it; challenge, proof and welcome. 3 -- the hello
of all transports; xxh3 in place of the CRC; the spans may be one and the same band of each block, in place of whole
blocks.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import starmap
from typing import NamedTuple

from kv_transfer.checksum import SUM_BYTES
from kv_transfer.windows import Part, Target
from protocol.errors import MalformedFrame

LOWEST_VERSION = 3
HIGHEST_VERSION = 3
MAX_SPANS = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_PARTS = 1 << 12
MAX_PAYLOAD = 1 << 32
"""Bounds on one frame; a longer ship goes as several."""
MAX_REASON = 255

FRAME = struct.Struct("!4s16sQHHIIQ")
ANSWER = struct.Struct("!4sQHBB")
SPAN = struct.Struct("!QQ")
BLOCK = struct.Struct("!IQ")

FRAME_MAGIC = b"KVFR"
SUMMED_MAGIC = b"KVFS"
ANSWER_MAGIC = b"KVFA"


class Verdict(IntEnum):
    """What a receiver answers to a frame."""

    LANDED = 0
    REFUSED = 1
    DAMAGED = 2


class FrameHead(NamedTuple):
    """The fixed part of a frame.

    Attributes:
        ticket: of the window.
        ship, part, parts: which part of which ship.
        spans, blocks: entries of the two tables.
        payload: bytes after the tables.
        summed: whether a checksum follows the payload.
    """

    ticket: bytes
    ship: int
    part: int
    parts: int
    spans: int
    blocks: int
    payload: int
    summed: bool = False

    @property
    def tail_bytes(self) -> int:
        """Length of what follows the payload."""
        return SUM_BYTES if self.summed else 0

    @property
    def table_bytes(self) -> int:
        """Length of the two tables."""
        return self.spans * SPAN.size + self.blocks * BLOCK.size


def pack_frame(ticket: bytes, part: Part, *, summed: bool = False) -> bytes:
    """Head and tables of a frame; the payload follows as it lies in memory, then, if it is ``summed``, the checksum."""
    payload = sum([nbytes for _, nbytes in part.targets])
    magic = SUMMED_MAGIC if summed else FRAME_MAGIC
    head = FRAME.pack(
        magic, ticket, part.ship, part.index, part.count, len(part.targets), len(part.generations), payload
    )
    return b"".join([head, *starmap(SPAN.pack, part.targets), *starmap(BLOCK.pack, part.generations)])


def parse_head(data: bytes | bytearray | memoryview) -> FrameHead:
    """The head of a frame.

    Raises:
        MalformedFrame: it is none, or breaks a bound; names the field and the value.
    """
    magic, ticket, ship, part, parts, spans, blocks, payload = FRAME.unpack(data)
    if magic not in (FRAME_MAGIC, SUMMED_MAGIC):
        raise MalformedFrame(f"not a frame of the KV transport: it begins with {magic!r}")
    for name, value, low, high in (
        ("parts", parts, 1, MAX_PARTS),
        ("part", part, 0, parts - 1),
        ("spans", spans, 1, MAX_SPANS),
        ("blocks", blocks, 1, MAX_BLOCKS),
        ("payload", payload, 1, MAX_PAYLOAD),
    ):
        if not low <= value <= high:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    return FrameHead(ticket, ship, part, parts, spans, blocks, payload, magic == SUMMED_MAGIC)


def parse_tables(head: FrameHead, data: bytearray) -> Part:
    """The part that a frame announces.

    Raises:
        MalformedFrame: the spans do not add up to the payload.
    """
    split = head.spans * SPAN.size
    with memoryview(data) as view:
        targets: list[Target] = list(SPAN.iter_unpack(view[:split]))
        generations: list[tuple[int, int]] = list(BLOCK.iter_unpack(view[split:]))
    if sum([nbytes for _, nbytes in targets]) != head.payload:
        raise MalformedFrame(f"payload is {head.payload} bytes, its spans are not", field="payload")
    return Part(head.ship, head.part, head.parts, targets, generations)


def pack_answer(head: FrameHead, verdict: Verdict, reason: str = "") -> bytes:
    """The answer to a frame; ``reason`` for what has not landed."""
    text = reason.encode()[:MAX_REASON]
    return ANSWER.pack(ANSWER_MAGIC, head.ship, head.part, verdict, len(text)) + text


def parse_answer(data: bytes | bytearray, part: Part) -> tuple[Verdict, int]:
    """``(verdict, bytes of reason that follow)``.

    Raises:
        MalformedFrame: it does not answer ``part``.
    """
    magic, ship, index, verdict, length = ANSWER.unpack(data)
    if magic != ANSWER_MAGIC or (ship, index) != (part.ship, part.index) or verdict > max(Verdict):
        raise MalformedFrame(f"not an answer to part {part.index} of ship {part.ship:x}: {bytes(data)!r}")
    return Verdict(verdict), length
