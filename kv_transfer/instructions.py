"""What the handoff's two state machines ask their shells to do.

The lease book of a prefill worker and the import book of a decode worker decide and touch nothing; each of their events
returns a list of these, to be carried out in order and without waiting for one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import ErrorInfo, Handover, Message
from protocol.wire_layout import WireDtype, WireLayout


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message.

    Attributes:
        peer: the incarnation it is meant for; where the connection tells them apart, no other may get it.
        message: what to send.
        endpoint: where to connect; "" where the peer is known by its connection.
    """

    peer: Peer
    message: Message
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Tell the router that this attempt cannot go on here.

    Attributes:
        key: of the attempt.
        error: why.
        router: as it was given to the book.
        handed_over: whether the reader answers for the request already, and may have everything all the same.
    """

    key: RequestKey
    error: ErrorInfo
    router: bytes | None = None
    handed_over: bool = False


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Move every block that the key's lease, or import, holds to quarantine: a transport may still touch them."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Hold:
    """Prefill: take one counted reference on each of these source blocks for the key's lease."""

    key: RequestKey
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ship:
    """Prefill: write source blocks into target blocks, then report ``shipped`` or ``ship_failed``, exactly one.

    The report promises that no byte of the source is read for this ship any more.

    Attributes:
        key: of the lease.
        ship_id: to report with.
        addresses, ticket, layout, wire_dtype: of the receiver, out of its grant.
        source_blocks: that hold ``tokens``, in logical order.
        target_blocks, generations: of equal length; likewise.
        tokens: positions in the sequence: whole target blocks, or to the sequence's end.
        layers: of each block that are shipped; None for all of them.
    """

    key: RequestKey
    ship_id: int
    addresses: tuple[str, ...]
    ticket: bytes
    layout: KVLayout
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    tokens: range
    wire_dtype: WireDtype | None = None
    layers: range | None = None

    @property
    def wire(self) -> WireLayout:
        """The form in which the target blocks cross."""
        return WireLayout(self.layout, self.wire_dtype)

    @property
    def finishes(self) -> int:
        """Blocks of which this ship carries the last layers: those that are to be reported with it."""
        ends = self.layers is None or self.layers.stop == self.layout.num_layers
        return len(self.target_blocks) if ends else 0


@dataclass(frozen=True, slots=True)
class StopShips:
    """Prefill: abort every ship under this ticket; each of them still reports."""

    key: RequestKey
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Prefill: drop every hold of the key's lease, quarantined ones too. The last instruction of a lease."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Decode: let ``sender`` alone write these blocks of these generations under this ticket, and nothing else."""

    key: RequestKey
    ticket: bytes
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    sender: Peer


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Decode: close the window, then report ``quiesced``: from then on no byte changes under this ticket."""

    key: RequestKey
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Decode: the imported blocks are whole and nobody writes them; the sequence joins the next step.

    Attributes:
        key: of the import.
        handover: where to go on.
        seconds: spent by the transport on what landed.
        transport: URI scheme that it came by; "" when nothing had to come.
    """

    key: RequestKey
    handover: Handover
    seconds: float = 0.0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Decode: drop the import's hold, quarantined or not; nothing can touch the blocks any more."""

    key: RequestKey


Instruction = (
    Send | Failed | Quarantine | Hold | Ship | StopShips | Release | OpenWindow | CloseWindow | Commit | FreeBlocks
)
"""Anything that a book may ask for."""
