"""Bytes of a channel's TCP connection, big-endian, every length bounded. The KV bytes do not pass here.

::

    hello     both ways, once    magic "KVUH", lowest version, highest version, UCX major, UCX minor, length of the UCX
                                 worker's address, then that
    part      to the receiver    magic "KVUP", ticket, ship, part, parts, spans, blocks,
                                 then the span table (target, nbytes), the block table (block, generation)
    answer    to the sender      magic "KVUA", ship, part, verdict, length of the reason, then the reason (UTF-8)

A part is answered "go" when the receiver is ready for its bytes, then any number of "progress", then "landed" or
"broken"; or "refused" at any point. A sender that gives a part up closes the connection. Both ends must run the same
release of UCX, for its packed addresses are not promised to be read by another.

History: 1 -- first version. 2 -- the spans may be one and the same band of each block, in place of whole blocks.
"""

from __future__ import annotations

import asyncio
import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.ucx.library import MAX_ADDRESS
from kv_transfer.windows import Part
from protocol.errors import MalformedFrame, VersionMismatch

LOWEST_VERSION = 2
HIGHEST_VERSION = 2
MAX_SPANS = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_PARTS = 1 << 12
MAX_REASON = 255

HELLO = struct.Struct("!4sBBBBH")
PART = struct.Struct("!4s16sQHHII")
ANSWER = struct.Struct("!4sQHBB")
SPAN = struct.Struct("!QQ")
BLOCK = struct.Struct("!IQ")

HELLO_MAGIC = b"KVUH"
PART_MAGIC = b"KVUP"
ANSWER_MAGIC = b"KVUA"


class Verdict(IntEnum):
    """What became of a part."""

    LANDED = 0
    REFUSED = 1
    BROKEN = 2
    GO = 3
    PROGRESS = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """One end of a channel.

    Attributes:
        ucx: release, as ``(major, minor)``.
        worker: UCX's address of the worker.
    """

    ucx: tuple[int, int]
    worker: bytes


def ucx_release(version: str) -> tuple[int, int]:
    """Major and minor number of UCX's version string."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, "UCX says its version as numbers"
    return int(found[1]), int(found[2])


def pack_hello(hello: Hello) -> bytes:
    """The bytes of a hello."""
    return HELLO.pack(HELLO_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, *hello.ucx, len(hello.worker)) + hello.worker


async def read_hello(reader: asyncio.StreamReader) -> Hello:
    """The peer's hello, whatever versions it names up to :func:`check_versions`.

    Raises:
        MalformedFrame: it is none, or breaks a bound.
        VersionMismatch: there is no common version; names both ranges.
    """
    magic, lowest, highest, major, minor, worker = HELLO.unpack(await reader.readexactly(HELLO.size))
    if magic != HELLO_MAGIC or lowest > highest:
        raise MalformedFrame(f"not a hello of the UCX transport: it begins with {magic!r}")
    if min(highest, HIGHEST_VERSION) < max(lowest, LOWEST_VERSION):
        ranges = f"peer speaks {lowest} to {highest}, this process {LOWEST_VERSION} to {HIGHEST_VERSION}"
        raise VersionMismatch(f"no common version of the UCX transport: {ranges}")
    if not 1 <= worker <= MAX_ADDRESS:
        raise MalformedFrame(f"worker is out of bounds: {worker}", field="worker")
    return Hello((major, minor), await reader.readexactly(worker))


def check_release(ours: Hello, theirs: Hello) -> None:
    """Raise VersionMismatch where the two ends run different releases of UCX."""
    if ours.ucx != theirs.ucx:
        here, there = (".".join(map(str, hello.ucx)) for hello in (ours, theirs))
        raise VersionMismatch(f"the peer runs UCX {there}, this process UCX {here}; both need the same release")


def pack_part(ticket: bytes, part: Part) -> bytes:
    """A part: what will come and where it belongs."""
    head = PART.pack(PART_MAGIC, ticket, part.ship, part.index, part.count, len(part.targets), len(part.generations))
    spans = [SPAN.pack(*target) for target in part.targets]
    return b"".join([head, *spans, *[BLOCK.pack(*named) for named in part.generations]])


async def read_part(reader: asyncio.StreamReader) -> tuple[bytes, Part]:
    """A ticket, and the part that is announced under it.

    Raises:
        MalformedFrame: it is none, or breaks a bound; names the field and the value.
    """
    magic, ticket, ship, index, count, spans, blocks = PART.unpack(await reader.readexactly(PART.size))
    if magic != PART_MAGIC:
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
    targets = list(SPAN.iter_unpack(await reader.readexactly(spans * SPAN.size)))
    named = list(BLOCK.iter_unpack(await reader.readexactly(blocks * BLOCK.size)))
    if not all(nbytes for _, nbytes in targets):
        raise MalformedFrame("a span has no bytes", field="nbytes")
    return ticket, Part(ship, index, count, targets, named)


def pack_answer(part: Part, verdict: Verdict, reason: str = "") -> bytes:
    """What became of ``part``."""
    text = reason.encode()[:MAX_REASON]
    return ANSWER.pack(ANSWER_MAGIC, part.ship, part.index, verdict, len(text)) + text


async def read_answer(reader: asyncio.StreamReader, part: Part) -> tuple[Verdict, str]:
    """The verdict on ``part``, and why.

    Raises:
        MalformedFrame: it does not answer ``part``.
    """
    magic, ship, index, verdict, length = ANSWER.unpack(await reader.readexactly(ANSWER.size))
    if magic != ANSWER_MAGIC or (ship, index) != (part.ship, part.index) or verdict > max(Verdict):
        raise MalformedFrame(f"not an answer to part {part.index} of ship {part.ship:x}")
    return Verdict(verdict), (await reader.readexactly(length)).decode(errors="replace")
