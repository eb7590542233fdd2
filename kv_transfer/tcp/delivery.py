"""The sender's side of a connection: the delivery of one part of a ship."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.checksum import Checksum
from kv_transfer.gate import Gate
from kv_transfer.span import Span
from kv_transfer.tcp import wire
from kv_transfer.tcp.steps import Conversation, Cursor, Read, Write
from kv_transfer.tcp.wire import Verdict
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, IntegrityMismatch, TicketRejected

STREAM_BYTES = 4 << 20
"""A ship is split between streams only where each gets at least this much: two threads at either end cost time too."""
FRAME_BYTES = 256 << 20
"""Longest payload of one frame, unless one block is longer."""


def deliver(
    ticket: bytes, part: Part, payload: Sequence[memoryview], gate: Gate, timeout: float, *, checksum: bool = False
) -> Conversation:
    """Send one part and await its answer.

    Args:
        ticket: of the window.
        part: what is sent.
        payload: its bytes, in the order of the part's targets.
        gate: of the ship; shutting it stops the reading of the payload.
        timeout: seconds without progress.
        checksum: send one after the payload.

    Returns:
        None, or a TicketRejected or IntegrityMismatch that leaves the connection in step.

    Raises:
        TicketRejected: refused before all was sent.
        ChannelLost: the ship was stopped.
        MalformedFrame: the answer is none.
    """
    frame = memoryview(wire.pack_frame(ticket, part, summed=checksum))
    body = Cursor([frame, *payload], Checksum() if checksum else None)
    sent = yield Write(body, gate=gate, timeout=timeout, heed=True)
    if sent and body.checksum is not None:
        tail = Cursor([memoryview(body.checksum.digest())])
        sent = yield Write(tail, timeout=timeout, heed=True)
    if not gate.is_open:
        raise ChannelLost("the ship was stopped")
    answer = bytearray(wire.ANSWER.size)
    yield Read(Cursor([memoryview(answer)]), timeout=timeout)
    verdict, length = wire.parse_answer(answer, part)
    reason = bytearray(length)
    if length:
        yield Read(Cursor([memoryview(reason)]), timeout=timeout)
    if verdict is not Verdict.LANDED:
        refused = TicketRejected if verdict is Verdict.REFUSED else IntegrityMismatch
        refusal = refused(f"the receiver refused: {reason.decode(errors='replace')}")
        if sent:
            return refusal
        raise refusal
    if not sent:
        raise ChannelLost("the receiver acknowledged a frame before its end")
    return None


def split(
    ship: int, spans: Sequence[Span], generations: Sequence[tuple[int, int]], block_bytes: int, streams: int
) -> list[tuple[Part, list[tuple[int, int]]]]:
    """Cut a ship into parts that share no block, one per stream where it is large enough.

    Args:
        ship: its number.
        spans: whole blocks of ``block_bytes``, or the same band of each block.
        generations: ``(block, generation)`` of the blocks the spans write.
        block_bytes: bytes of one block.
        streams: parts that may travel at the same time.

    Returns:
        Each part, with the ``(offset, nbytes)`` of its payload in the sender's memory.

    Raises:
        IntegrityMismatch: a span writes a block that is not named, or a block or the ship is too large.
    """
    nbytes, blocks = sum([span.nbytes for span in spans]), len(generations)
    share = nbytes // blocks
    parts = min(streams, blocks, max(1, nbytes // STREAM_BYTES))
    longest = min(-(-blocks // parts), max(1, FRAME_BYTES // share), wire.MAX_BLOCKS)
    count = -(-blocks // longest)
    if count > wire.MAX_PARTS or share > wire.MAX_PAYLOAD:
        raise IntegrityMismatch(f"{blocks} blocks of {block_bytes} bytes are too much for one ship", field="spans")
    pieces = [spans] if count == 1 else _pieces(spans, longest * share)
    generation_of = dict(generations)
    made: list[tuple[Part, list[tuple[int, int]]]] = []
    for index, piece in enumerate(pieces):
        written: list[int] = []
        for span in piece:
            written.extend(range(span.target // block_bytes, -(-(span.target + span.nbytes) // block_bytes)))
        try:
            named = list(zip(written, map(generation_of.__getitem__, written), strict=True))
        except KeyError as unnamed:
            raise IntegrityMismatch(f"block {unnamed} is written and not named", field="generations") from None
        part = Part(ship, index, len(pieces), [(span.target, span.nbytes) for span in piece], named)
        made.append((part, [(span.source, span.nbytes) for span in piece]))
    return made


def _pieces(spans: Sequence[Span], longest: int) -> list[list[Span]]:
    """The spans in pieces of ``longest`` bytes, the last perhaps shorter; those that no cut falls into as they are."""
    piece: list[Span] = []
    pieces, room = [piece], longest
    for whole in spans:
        span = whole
        while span.nbytes > room:
            if room:
                piece.append(Span(span.source, span.target, room))
                span = Span(span.source + room, span.target + room, span.nbytes - room)
            piece = []
            pieces.append(piece)
            room = longest
        piece.append(span)
        room -= span.nbytes
    return pieces
