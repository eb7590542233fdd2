"""Bytes of the shared-memory transport after its hello, native order (both ends are on one host), every length bounded.

::

    offer     to the receiver    magic "KVSO", bytes of the pool; with it, two descriptors: the pool and the ledger
    welcome   to the sender      magic "KVSW", 1 if turned away, length of the reason, then the reason (UTF-8)
    frame     to the receiver    magic "KVSF", ticket, ship, ledger slot, spans, blocks,
                                 then the span table (source, target, nbytes), the block table (block, generation);
                                 with magic "KVSS" then the checksum of all that and of the bytes in the pool
    answer    to the sender      magic "KVSA", verdict, length of the reason, ship, then the reason (UTF-8)

Each frame has one answer, in any order.

History: 1 -- first version. 2 -- the hello of all transports, before any descriptor; checksums; the spans may be one
and the same band of each block, in place of whole blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.checksum import SUM_BYTES
from kv_transfer.shm.ledger import SLOTS
from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch, MalformedFrame

LOWEST_VERSION = 2
HIGHEST_VERSION = 2
MAX_SPANS = 1 << 20
MAX_BLOCKS = 1 << 20
MAX_REASON = 255
MAX_POOL = 1 << 48

OFFER = struct.Struct("=4sQ")
WELCOME = struct.Struct("=4sBB")
FRAME = struct.Struct("=4s16sQIII")
ANSWER = struct.Struct("=4sBBQ")
SPAN = struct.Struct("=QQQ")
BLOCK = struct.Struct("=IQ")

OFFER_MAGIC = b"KVSO"
WELCOME_MAGIC = b"KVSW"
FRAME_MAGIC = b"KVSF"
SUMMED_MAGIC = b"KVSS"
ANSWER_MAGIC = b"KVSA"


class Verdict(IntEnum):
    """What a receiver answers to a frame."""

    LANDED = 0
    REFUSED = 1
    DAMAGED = 2


def pack_offer(pool_bytes: int) -> bytes:
    """What comes with the descriptors."""
    return OFFER.pack(OFFER_MAGIC, pool_bytes)


def parse_offer(data: bytes | bytearray) -> int:
    """Bytes of the peer's pool.

    Raises:
        MalformedFrame: it is no offer.
    """
    magic, nbytes = OFFER.unpack(data)
    if magic != OFFER_MAGIC or not 0 < nbytes < MAX_POOL:
        raise MalformedFrame(f"not an offer of the shm transport: {bytes(data)!r}")
    return int(nbytes)


def pack_welcome(reason: str | None) -> bytes:
    """The answer to an offer: welcome, or turned away for ``reason``."""
    text = (reason or "").encode()[:MAX_REASON]
    return WELCOME.pack(WELCOME_MAGIC, reason is not None, len(text)) + text


def parse_welcome(data: bytes | bytearray) -> tuple[bool, int]:
    """``(turned away, bytes of reason that follow)``.

    Raises:
        MalformedFrame: it is no welcome.
    """
    magic, refused, length = WELCOME.unpack(data)
    if magic != WELCOME_MAGIC or refused > 1:
        raise MalformedFrame(f"not a welcome of the shm transport: {bytes(data)!r}")
    return bool(refused), length


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The fixed part of a frame.

    Attributes:
        ticket: of the window.
        ship: its number.
        slot: of its ledger entry.
        spans, blocks: entries of the two tables.
        summed: whether a checksum follows them.
    """

    ticket: bytes
    ship: int
    slot: int
    spans: int
    blocks: int
    summed: bool = False

    @property
    def table_bytes(self) -> int:
        """Length of the two tables."""
        return self.spans * SPAN.size + self.blocks * BLOCK.size

    @property
    def tail_bytes(self) -> int:
        """Length of what follows the two tables."""
        return SUM_BYTES if self.summed else 0


def pack_frame(
    ticket: bytes,
    ship: int,
    slot: int,
    spans: Sequence[Span],
    generations: Sequence[tuple[int, int]],
    *,
    summed: bool = False,
) -> bytes:
    """One ship; where it is ``summed`` the checksum follows.

    Raises:
        IntegrityMismatch: it is too much for one frame.
    """
    if len(spans) > MAX_SPANS or len(generations) > MAX_BLOCKS:
        counts = f"{len(spans)} spans and {len(generations)} blocks"
        raise IntegrityMismatch(f"{counts} are too much for one ship", field="spans")
    magic = SUMMED_MAGIC if summed else FRAME_MAGIC
    head = FRAME.pack(magic, ticket, ship, slot, len(spans), len(generations))
    table = b"".join([SPAN.pack(span.source, span.target, span.nbytes) for span in spans])
    return head + table + b"".join([BLOCK.pack(*named) for named in generations])


def parse_head(data: bytes | bytearray) -> FrameHead:
    """The head of a frame.

    Raises:
        MalformedFrame: it is none, or breaks a bound; names the field and the value.
    """
    magic, ticket, ship, slot, spans, blocks = FRAME.unpack(data)
    if magic not in (FRAME_MAGIC, SUMMED_MAGIC):
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
    return FrameHead(ticket, ship, slot, spans, blocks, magic == SUMMED_MAGIC)


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


def pack_answer(ship: int, verdict: Verdict, reason: str = "") -> bytes:
    """The answer to a frame; ``reason`` for what has not landed."""
    text = reason.encode()[:MAX_REASON]
    return ANSWER.pack(ANSWER_MAGIC, verdict, len(text), ship) + text


def parse_answer(data: bytes | bytearray) -> tuple[int, Verdict, int]:
    """``(ship, verdict, bytes of reason that follow)``.

    Raises:
        MalformedFrame: it is no answer.
    """
    magic, verdict, length, ship = ANSWER.unpack(data)
    if magic != ANSWER_MAGIC or verdict > max(Verdict):
        raise MalformedFrame(f"not an answer of the shm transport: {bytes(data)!r}")
    return ship, Verdict(verdict), length
