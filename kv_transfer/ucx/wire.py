"""Bytes of a channel's TCP connection after its hello, big-endian, every length bounded. The KV bytes do not pass here.

::

    worker    both ways, once    magic "KVUW", UCX major, UCX minor, length of the UCX worker's address, then that
    part      to the receiver    magic "KVUP", ticket, ship, part, parts, spans, blocks,
                                 then the span table (target, nbytes), the block table (block, generation);
                                 with magic "KVUS" then the checksum of all that and of the bytes that will come
    answer    to the sender      magic "KVUA", ship, part, verdict, length of the reason, then the reason (UTF-8)

A part is answered "go" when the receiver is ready for its bytes, then any number of "progress", then "landed" or
"broken", or "damaged" where the checksum says so; or "refused" at any point. A sender that gives a part up closes the
connection. Both ends must run the same release of UCX, for its packed addresses are not promised to be read by another.

History: 1 -- first version. 2 -- the hello of all transports, before any address of a worker; checksums; the spans
may be one and the same band of each block, in place of whole blocks.
"""

from __future__ import annotations

import asyncio
import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.checksum import SUM_BYTES
from kv_transfer.ucx.library import MAX_ADDRESS
from kv_transfer.windows import Part
from protocol.errors import MalformedFrame, VersionMismatch

LOWEST_VERSION = 2
HIGHEST_VERSION = 2
MAX_SPANS = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_PARTS = 1 << 12
MAX_REASON = 255

WORKER = struct.Struct("!4sBBH")
PART = struct.Struct("!4s16sQHHII")
ANSWER = struct.Struct("!4sQHBB")
SPAN = struct.Struct("!QQ")
BLOCK = struct.Struct("!IQ")

WORKER_MAGIC = b"KVUW"
PART_MAGIC = b"KVUP"
SUMMED_MAGIC = b"KVUS"
ANSWER_MAGIC = b"KVUA"


class Verdict(IntEnum):
    """What became of a part."""

    LANDED = 0
    REFUSED = 1
    BROKEN = 2
    GO = 3
    PROGRESS = 4
    DAMAGED = 5


@dataclass(frozen=True, slots=True)
class Worker:
    """One end of a channel.

    Attributes:
        ucx: release, as ``(major, minor)``.
        address: UCX's address of the worker.
    """

    ucx: tuple[int, int]
    address: bytes


def ucx_release(version: str) -> tuple[int, int]:
    """Major and minor number of UCX's version string."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, "UCX says its version as numbers"
    return int(found[1]), int(found[2])


def pack_worker(worker: Worker) -> bytes:
    """The bytes that introduce a worker."""
    return WORKER.pack(WORKER_MAGIC, *worker.ucx, len(worker.address)) + worker.address


async def read_worker(reader: asyncio.StreamReader) -> Worker:
    """The peer's worker, whatever release it is of up to :func:`check_release`.

    Raises:
        MalformedFrame: it is none, or breaks a bound.
    """
    magic, major, minor, length = WORKER.unpack(await reader.readexactly(WORKER.size))
    if magic != WORKER_MAGIC:
        raise MalformedFrame(f"not a worker on the UCX transport: it begins with {magic!r}")
    if not 1 <= length <= MAX_ADDRESS:
        raise MalformedFrame(f"worker is out of bounds: {length}", field="worker")
    return Worker((major, minor), await reader.readexactly(length))


def check_release(ours: Worker, theirs: Worker) -> None:
    """Raise VersionMismatch where the two ends run different releases of UCX."""
    if ours.ucx != theirs.ucx:
        here, there = (".".join(map(str, worker.ucx)) for worker in (ours, theirs))
        raise VersionMismatch(f"the peer runs UCX {there}, this process UCX {here}; both need the same release")


@dataclass(frozen=True, slots=True)
class PartHead:
    """The fixed part of an announcement.

    Attributes:
        raw: its bytes.
        ticket: of the window.
        ship, index, count: which part of which ship.
        spans, blocks: entries of the two tables.
        summed: whether a checksum follows them.
    """

    raw: bytes
    ticket: bytes
    ship: int
    index: int
    count: int
    spans: int
    blocks: int
    summed: bool

    @property
    def table_bytes(self) -> int:
        """Length of the two tables."""
        return self.spans * SPAN.size + self.blocks * BLOCK.size

    @property
    def tail_bytes(self) -> int:
        """Length of what follows the two tables."""
        return SUM_BYTES if self.summed else 0


def pack_part(ticket: bytes, part: Part, *, summed: bool = False) -> bytes:
    """A part: what will come and where it belongs; where it is ``summed`` the checksum follows."""
    magic = SUMMED_MAGIC if summed else PART_MAGIC
    head = PART.pack(magic, ticket, part.ship, part.index, part.count, len(part.targets), len(part.generations))
    spans = [SPAN.pack(*target) for target in part.targets]
    return b"".join([head, *spans, *[BLOCK.pack(*named) for named in part.generations]])


async def read_head(reader: asyncio.StreamReader) -> PartHead:
    """The head of the next announcement.

    Raises:
        MalformedFrame: it is none, or breaks a bound; names the field and the value.
    """
    raw = await reader.readexactly(PART.size)
    magic, ticket, ship, index, count, spans, blocks = PART.unpack(raw)
    if magic not in (PART_MAGIC, SUMMED_MAGIC):
        raise MalformedFrame(f"not a part on the UCX transport: it begins with {magic!r}")
    checks = (
        ("parts", count, 1 <= count <= MAX_PARTS),
        ("part", index, index < count),
        ("spans", spans, 1 <= spans <= MAX_SPANS),
        ("blocks", blocks, 1 <= blocks <= MAX_BLOCKS),
    )
    for name, value, valid in checks:
        if not valid:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    return PartHead(raw, ticket, ship, index, count, spans, blocks, magic == SUMMED_MAGIC)


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict on a part.

    Attributes:
        ship, index: of the part.
        verdict: on it.
        reason: for people; may be empty.
    """

    ship: int
    index: int
    verdict: Verdict
    reason: str


def parse_tables(head: PartHead, data: bytes) -> Part:
    """The part that an announcement is of.

    Raises:
        MalformedFrame: a span has no bytes.
    """
    split = head.spans * SPAN.size
    targets = list(SPAN.iter_unpack(data[:split]))
    if not all(nbytes for _, nbytes in targets):
        raise MalformedFrame("a span has no bytes", field="nbytes")
    return Part(head.ship, head.index, head.count, targets, list(BLOCK.iter_unpack(data[split:])))


def pack_answer(head: Part | PartHead, verdict: Verdict, reason: str = "") -> bytes:
    """What became of the part that ``head`` announces."""
    text = reason.encode()[:MAX_REASON]
    return ANSWER.pack(ANSWER_MAGIC, head.ship, head.index, verdict, len(text)) + text


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next verdict.

    Raises:
        MalformedFrame: it is none.
        asyncio.IncompleteReadError: the peer said no more.
    """
    magic, ship, index, verdict, length = ANSWER.unpack(await reader.readexactly(ANSWER.size))
    if magic != ANSWER_MAGIC or verdict > max(Verdict):
        raise MalformedFrame("not an answer to a part")
    return Answer(ship, index, Verdict(verdict), (await reader.readexactly(length)).decode(errors="replace"))
