"""Bytes of a channel's TCP connection, big-endian, every length bounded. The KV bytes do not pass here.

::

    hello     both ways, once    magic "KVUH", lowest version, highest version, UCX major, UCX minor,
                                 address and length of the sender's pool, lengths of its memory key and of the UCX
                                 worker's address, then these two; a receiver has no pool to show
    part      to the receiver    magic "KVUP", ticket, ship, part, parts, spans, blocks,
                                 then the span table (source, target, nbytes), the block table (block, generation)
    stop      to the receiver    magic "KVUS", ship, part: read no more of it, and say so
    answer    to the sender      magic "KVUA", ship, part, verdict, length of the reason, then the reason (UTF-8)

A part has any number of "progress" answers and then one other; a stop has none of its own. Both ends must run the same
release of UCX up to its patch level, for its packed addresses and keys are not promised to be read by another.

History: 1 -- first version.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.ucx.library import MAX_ADDRESS, MAX_KEY
from kv_transfer.windows import Part
from protocol.errors import MalformedFrame, VersionMismatch

LOWEST_VERSION = 1
HIGHEST_VERSION = 1
MAX_SPANS = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_PARTS = 1 << 12
MAX_REASON = 255

HELLO = struct.Struct("!4sBBBBQQHH")
PART = struct.Struct("!16sQHHII")
STOP = struct.Struct("!QH")
ANSWER = struct.Struct("!4sQHBB")
SPAN = struct.Struct("!QQQ")
BLOCK = struct.Struct("!IQ")

MAGIC_BYTES = 4
HELLO_MAGIC = b"KVUH"
PART_MAGIC = b"KVUP"
STOP_MAGIC = b"KVUS"
ANSWER_MAGIC = b"KVUA"


class Verdict(IntEnum):
    """What became of a part."""

    LANDED = 0
    REFUSED = 1
    STOPPED = 2
    BROKEN = 3
    PROGRESS = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """One end of a channel.

    Attributes:
        ucx: release, as ``(major, minor)``.
        base, nbytes: where the sender's pool lies in its own address space; zero from a receiver.
        key: what UCX needs to read it; empty from a receiver.
        worker: UCX's address of the worker.
    """

    ucx: tuple[int, int]
    base: int
    nbytes: int
    key: bytes
    worker: bytes


@dataclass(frozen=True, slots=True)
class Described:
    """A part, with where its bytes lie.

    Attributes:
        ticket: of the window.
        part: as the window's book wants it.
        sources: offset in the sender's pool of each target.
    """

    ticket: bytes
    part: Part
    sources: Sequence[int]


def ucx_release(version: str) -> tuple[int, int]:
    """Major and minor number of UCX's version string."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, "UCX says its version as numbers"
    return int(found[1]), int(found[2])


def pack_hello(hello: Hello) -> bytes:
    """The bytes of a hello."""
    head = HELLO.pack(
        HELLO_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, *hello.ucx, hello.base, hello.nbytes, len(hello.key),
        len(hello.worker),
    )  # fmt: skip
    return head + hello.key + hello.worker


async def read_hello(reader: asyncio.StreamReader) -> Hello:
    """The peer's hello, whatever versions it names up to :func:`check_versions`.

    Raises:
        MalformedFrame: it is none, or breaks a bound.
        VersionMismatch: there is no common version; names both ranges.
    """
    magic, lowest, highest, major, minor, base, nbytes, key, worker = HELLO.unpack(await reader.readexactly(HELLO.size))
    if magic != HELLO_MAGIC or lowest > highest:
        raise MalformedFrame(f"not a hello of the UCX transport: it begins with {magic!r}")
    if min(highest, HIGHEST_VERSION) < max(lowest, LOWEST_VERSION):
        ranges = f"peer speaks {lowest} to {highest}, this process {LOWEST_VERSION} to {HIGHEST_VERSION}"
        raise VersionMismatch(f"no common version of the UCX transport: {ranges}")
    if key > MAX_KEY or not 1 <= worker <= MAX_ADDRESS or base + nbytes >= 1 << 64:
        raise MalformedFrame(f"a hello is out of bounds: key {key}, worker {worker}, pool {base}+{nbytes}")
    return Hello((major, minor), base, nbytes, await reader.readexactly(key), await reader.readexactly(worker))


def check_release(ours: Hello, theirs: Hello) -> None:
    """Raise VersionMismatch where the two ends run different releases of UCX."""
    if ours.ucx != theirs.ucx:
        here, there = (".".join(map(str, hello.ucx)) for hello in (ours, theirs))
        raise VersionMismatch(f"the peer runs UCX {there}, this process UCX {here}; both need the same release")


def pack_part(ticket: bytes, part: Part, sources: Sequence[int]) -> bytes:
    """A part: what to read and where it belongs."""
    head = PART.pack(ticket, part.ship, part.index, part.count, len(part.targets), len(part.generations))
    spans = [SPAN.pack(source, target, nbytes) for source, (target, nbytes) in zip(sources, part.targets, strict=True)]
    return b"".join([PART_MAGIC, head, *spans, *[BLOCK.pack(*named) for named in part.generations]])


def pack_stop(part: Part) -> bytes:
    """The end of a part before its time."""
    return STOP_MAGIC + STOP.pack(part.ship, part.index)


async def read_request(reader: asyncio.StreamReader) -> Described | tuple[int, int]:
    """A part, or the ``(ship, part)`` that is to be stopped.

    Raises:
        MalformedFrame: it is neither, or breaks a bound; names the field and the value.
    """
    magic = await reader.readexactly(MAGIC_BYTES)
    if magic == STOP_MAGIC:
        ship, index = STOP.unpack(await reader.readexactly(STOP.size))
        return ship, index
    if magic != PART_MAGIC:
        raise MalformedFrame(f"not a request of the UCX transport: it begins with {magic!r}")
    ticket, ship, index, count, spans, blocks = PART.unpack(await reader.readexactly(PART.size))
    checks = (
        ("parts", count, 1 <= count <= MAX_PARTS),
        ("part", index, index < count),
        ("spans", spans, 1 <= spans <= MAX_SPANS),
        ("blocks", blocks, 1 <= blocks <= MAX_BLOCKS),
    )
    for name, value, valid in checks:
        if not valid:
            raise MalformedFrame(f"{name} is out of bounds: {value}", field=name)
    table = list(SPAN.iter_unpack(await reader.readexactly(spans * SPAN.size)))
    named = list(BLOCK.iter_unpack(await reader.readexactly(blocks * BLOCK.size)))
    if any(not nbytes for _, _, nbytes in table):
        raise MalformedFrame("a span has no bytes", field="nbytes")
    part = Part(ship, index, count, [(target, nbytes) for _, target, nbytes in table], named)
    return Described(ticket, part, [source for source, _, _ in table])


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
