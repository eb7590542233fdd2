"""Bytes of the TCP connection beside two carriers, big-endian, every length bounded. The KV bytes do not pass here.

After the hello of :mod:`kv_transfer.hello` both ways messages, each with magic "KC", kind and length of what follows::

    PART          to the receiver    ticket, ship, part, parts, spans, blocks, 1 if its chunks are summed, else 0,
                                     then the span table (target, nbytes), the block table (block, generation)
    CHUNK         to the receiver    slot, nbytes, checksum; zeros if not summed
    WITHDRAW      to the receiver    nothing: the part that was announced last is given up
    INTRODUCTION  both ways, once    length of the release, then that, then what the carrier must know
    READY         to the sender      nothing, once: the receiver's carrier takes chunks
    WAIT          to the sender      nothing: a sign of life until READY
    TAKEN         to the sender      slot
    verdict       to the sender      ship, part, then the reason (UTF-8); LANDED, REFUSED, BROKEN or DAMAGED

A part has one verdict. The sender may have sent chunks by the time it hears one; each of them is taken all the same,
and the next part follows the last TAKEN.

History: 1 -- first version.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.carried.orders import MAX_INTRODUCTION
from kv_transfer.carried.staging import SLOT_BYTES, SLOTS
from kv_transfer.hello import Party
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import Part
from protocol.errors import MalformedFrame, VersionMismatch

LOWEST_VERSION = 1
HIGHEST_VERSION = 1
MAX_SPANS = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_PARTS = 1 << 12
MAX_REASON = 255
MAX_RELEASE = 255

MAGIC = b"KC"
HEAD = struct.Struct("!2sBI")
PART = struct.Struct("!16sQHHIIB")
SPAN = struct.Struct("!QQ")
BLOCK = struct.Struct("!IQ")
CHUNK = struct.Struct("!BI8s")
SLOT = struct.Struct("!B")
VERDICT = struct.Struct("!QH")
SKIP_BYTES = 64 << 10


def party(scheme: str, config: TransportConfig) -> Party:
    """This end, as it introduces itself in the hello."""
    return Party(scheme, (LOWEST_VERSION, HIGHEST_VERSION), config)


class Kind(IntEnum):
    """Of a message; see the module."""

    PART = 1
    CHUNK = 2
    WITHDRAW = 3
    INTRODUCTION = 4
    READY = 5
    WAIT = 6
    TAKEN = 7
    LANDED = 8
    REFUSED = 9
    BROKEN = 10
    DAMAGED = 11


VERDICTS = frozenset({Kind.LANDED, Kind.REFUSED, Kind.BROKEN, Kind.DAMAGED})
_BOUNDS = {
    Kind.PART: (PART.size + SPAN.size + BLOCK.size, PART.size + MAX_SPANS * SPAN.size + MAX_BLOCKS * BLOCK.size),
    Kind.CHUNK: (CHUNK.size, CHUNK.size),
    Kind.WITHDRAW: (0, 0),
    Kind.INTRODUCTION: (1, 1 + MAX_RELEASE + MAX_INTRODUCTION),
    Kind.READY: (0, 0),
    Kind.WAIT: (0, 0),
    Kind.TAKEN: (SLOT.size, SLOT.size),
    **dict.fromkeys(VERDICTS, (VERDICT.size, VERDICT.size + MAX_REASON)),
}


@dataclass(frozen=True, slots=True)
class PartHead:
    """The fixed part of an announcement.

    Attributes:
        ticket: of the window.
        ship, index, count: which part of which ship.
        spans, blocks: entries of the two tables.
        summed: whether its chunks come with checksums.
        raw: its bytes.
    """

    ticket: bytes
    ship: int
    index: int
    count: int
    spans: int
    blocks: int
    summed: bool
    raw: bytes

    @property
    def table_bytes(self) -> int:
        """Length of the two tables."""
        return self.spans * SPAN.size + self.blocks * BLOCK.size


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that lie in a slot of the sender's staging.

    Attributes:
        slot: which; at the receiver the same one.
        nbytes: of them.
        total: checksum of the part's announcement, the chunk's number and its bytes; zeros where the part has none.
    """

    slot: int
    nbytes: int
    total: bytes


def pack(kind: Kind, body: bytes = b"") -> bytes:
    """A message."""
    return HEAD.pack(MAGIC, kind, len(body)) + body


async def read_head(reader: asyncio.StreamReader, expected: frozenset[Kind]) -> tuple[Kind, int]:
    """Kind and length of the next message.

    Raises:
        MalformedFrame: it is none, not one of ``expected``, or of a length that it cannot have.
    """
    magic, kind, length = HEAD.unpack(await reader.readexactly(HEAD.size))
    if magic != MAGIC or kind not in expected:
        raise MalformedFrame(f"not a message of a carried transport: {magic!r}, kind {kind}")
    low, high = _BOUNDS[Kind(kind)]
    if not low <= length <= high:
        raise MalformedFrame(f"length is out of bounds: {length}", field="length")
    return Kind(kind), length


def pack_part(ticket: bytes, part: Part, *, summed: bool = False) -> bytes:
    """The body of a PART: what will come and where it belongs."""
    head = PART.pack(ticket, part.ship, part.index, part.count, len(part.targets), len(part.generations), summed)
    spans = [SPAN.pack(*target) for target in part.targets]
    return b"".join([head, *spans, *[BLOCK.pack(*named) for named in part.generations]])


async def read_part_head(reader: asyncio.StreamReader, length: int) -> PartHead:
    """The head of an announcement of ``length`` bytes; its tables follow.

    Raises:
        MalformedFrame: it breaks a bound; names the field and the value.
    """
    raw = await reader.readexactly(PART.size)
    ticket, ship, index, count, spans, blocks, summed = PART.unpack(raw)
    head = PartHead(ticket, ship, index, count, spans, blocks, bool(summed), raw)
    checks = (
        ("parts", head.count, 1 <= head.count <= MAX_PARTS),
        ("part", head.index, head.index < head.count),
        ("spans", head.spans, 1 <= head.spans <= MAX_SPANS),
        ("blocks", head.blocks, 1 <= head.blocks <= MAX_BLOCKS),
        ("summed", summed, summed <= 1),
        ("length", length, length == PART.size + head.table_bytes),
    )
    for name, value, valid in checks:
        if not valid:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    return head


def parse_tables(head: PartHead, tables: bytes) -> Part:
    """The part that an announcement tells of.

    Raises:
        MalformedFrame: a span has no bytes.
    """
    split = head.spans * SPAN.size
    targets = list(SPAN.iter_unpack(tables[:split]))
    named = list(BLOCK.iter_unpack(tables[split:]))
    if not all(nbytes for _, nbytes in targets):
        raise MalformedFrame("a span has no bytes", field="nbytes")
    return Part(head.ship, head.index, head.count, targets, named)


async def skip(reader: asyncio.StreamReader, nbytes: int) -> None:
    """Read and forget."""
    left = nbytes
    while left:
        left -= len(await reader.readexactly(min(left, SKIP_BYTES)))


def pack_chunk(chunk: Chunk) -> bytes:
    """A chunk lies ready."""
    return pack(Kind.CHUNK, CHUNK.pack(chunk.slot, chunk.nbytes, chunk.total))


def parse_chunk(body: bytes) -> Chunk:
    """Which chunk lies ready.

    Raises:
        MalformedFrame: it breaks a bound; names the field and the value.
    """
    slot, nbytes, total = CHUNK.unpack(body)
    checks = (
        ("slot", slot, slot < SLOTS),
        ("nbytes", nbytes, 1 <= nbytes <= SLOT_BYTES),
    )
    for name, value, valid in checks:
        if not valid:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    return Chunk(slot, nbytes, total)


def pack_taken(slot: int) -> bytes:
    """The slot may be filled anew."""
    return pack(Kind.TAKEN, SLOT.pack(slot))


def parse_taken(body: bytes) -> int:
    """Which slot may be filled anew.

    Raises:
        MalformedFrame: there is no such slot.
    """
    (slot,) = SLOT.unpack(body)
    if slot >= SLOTS:
        raise MalformedFrame(f"slot is out of bounds: {slot}", field="slot")
    return int(slot)


def pack_verdict(kind: Kind, ship: int, index: int, reason: str = "") -> bytes:
    """What became of a part."""
    return pack(kind, VERDICT.pack(ship, index) + reason.encode()[:MAX_REASON])


def parse_verdict(body: bytes) -> tuple[tuple[int, int], str]:
    """``(ship, part)`` and why."""
    ship, index = VERDICT.unpack(body[: VERDICT.size])
    return (ship, index), body[VERDICT.size :].decode(errors="replace")


def pack_introduction(release: str, introduction: bytes) -> bytes:
    """What the peer's carrier must know of ours."""
    name = release.encode()[:MAX_RELEASE]
    return pack(Kind.INTRODUCTION, bytes([len(name)]) + name + introduction)


def parse_introduction(body: bytes, release: str) -> bytes:
    """What our carrier must know of the peer's.

    Raises:
        MalformedFrame: the release is longer than the whole, or what is left is too long.
        VersionMismatch: the peer's carrier is of another release; names both.
    """
    end = 1 + body[0]
    if end > len(body) or len(body) - end > MAX_INTRODUCTION:
        raise MalformedFrame(f"release is out of bounds: {body[0]}", field="release")
    theirs = body[1:end].decode(errors="replace")
    if theirs != release:
        raise VersionMismatch(f"the peer's carrier is {theirs!r}, this one is {release!r}; both need the same release")
    return body[end:]
