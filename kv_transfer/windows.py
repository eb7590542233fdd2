"""Which blocks may be written, by whom, and what has landed: the receiver's book, shared by every transport.

Life cycle of a window: open (admits parts of ships) -> shut (admits nothing, reports nothing) -> forgotten. Life cycle
of a part: admitted -> completed | abandoned. A ship travels as one or several parts and lands with the last of them.
A block that ships write band by band lands with the last of these. I/O threads admit and complete; the event loop opens
and shuts, and is where landed bands are added up: what is reported there comes in one order.

Between two parts of a ship nobody reads for it, so its sender's death shows in no part: a ship is given up when every
connection that brought a part of it has ended, and no other part comes for a moment on a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

from kv_transfer.gate import Gate, hand_back
from kv_transfer.transport import Landed, OnBroken, OnLanded, Window
from protocol.errors import (
    ChannelLost,
    ConfigError,
    IntegrityMismatch,
    InvariantViolation,
    TicketRejected,
    TransferError,
)

Target = tuple[int, int]
"""``(offset, nbytes)`` in the receiver's memory."""
GRACE = 0.5
"""Seconds that a ship without a connection has to go on: its sender may have lost one for the sake of another ship."""
Bounds = tuple[int, int]
"""``(begin, end)`` of a band, or of a whole block, within its block."""
MAX_BANDS = 1 << 10
"""Different bands of one window: more than the layers of any model, and few enough to compare each with each."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a ship, as its sender announces it.

    Attributes:
        ship: number that all parts of the ship carry, unique in its window.
        index, count: which part, of how many.
        targets: byte runs that will be written, in the order the bytes come: whole blocks, or one band of each block.
        generations: ``(block, generation)`` of exactly the blocks that the targets cover, wholly or by that band.
    """

    ship: int
    index: int
    count: int
    targets: Sequence[Target]
    generations: Sequence[tuple[int, int]]


class _Progress:
    __slots__ = ("blocks", "bounds", "broken", "carriers", "count", "landed", "seen", "started")

    def __init__(self, count: int, bounds: Bounds, started: float) -> None:
        self.count = count
        self.bounds = bounds
        self.started = started
        self.seen: set[int] = set()
        self.landed = 0
        self.broken: TransferError | None = None
        self.blocks: list[int] = []
        self.carriers: set[object] = set()


class OpenWindow:
    """One window while ships may come; see the module for its life."""

    def __init__(self, window: Window, on_landed: OnLanded, on_broken: OnBroken, transport: str = "") -> None:
        self.window = window
        self._transport = transport
        self.gate = Gate()
        self._loop = asyncio.get_running_loop()
        self._on_landed = on_landed
        self._on_broken = on_broken
        self._granted = dict(zip(window.blocks, window.generations, strict=True))
        self._lock = Lock()
        self._taken: dict[Bounds, set[int]] = {}
        self._missing: dict[int, int] = {}
        """Bytes still to land of each block of which a band has."""
        self._ships: dict[int, _Progress] = {}

    def admit(self, part: Part, now: float, carrier: object = None) -> None:
        """Take note of a part whose bytes are about to be written.

        Args:
            part: as announced.
            now: monotonic seconds.
            carrier: stands for the connection that it comes by; :meth:`lost` ends it.

        Raises:
            TicketRejected: a block is not the window's, is of another generation, or has been written in that place;
                or the targets are not exactly the named blocks, or one band of each. Nothing is noted then.
            IntegrityMismatch: another part of the ship is known to be damaged: nothing is noted either.
        """
        bounds, blocks = self._checked_blocks(part)
        with self._lock:
            if not self.gate.is_open:
                raise TicketRejected("the window is closed")
            self._check_untaken(bounds, blocks)
            progress = self._ships.get(part.ship) or _Progress(part.count, bounds, now)
            fits = progress.count == part.count and progress.bounds == bounds and part.index not in progress.seen
            self._check_unbroken(progress)
            if not fits:
                raise TicketRejected(f"part {part.index} of {part.count} does not fit the ship it names")
            progress.seen.add(part.index)
            progress.carriers.add(carrier)
            self._ships[part.ship] = progress
            self._taken.setdefault(bounds, set()).update(blocks)

    def complete(self, part: Part, now: float) -> Landed | None:
        """Every byte of an admitted part is in memory; with the ship's last part, what it wrote, to be reported.

        Raises:
            TicketRejected: the window was shut, or another part of the ship cut off, meanwhile.
            IntegrityMismatch: another part of the ship came damaged: whichever of them is answered first, its sender
                learns that.
        """
        with self._lock:
            if not self.gate.is_open:
                raise TicketRejected("the window is closed")
            progress = self._ships[part.ship]
            self._check_unbroken(progress)
            progress.landed += 1
            progress.blocks.extend(block for block, _ in part.generations)
            if progress.landed < progress.count:
                return None
            del self._ships[part.ship]
        nbytes = len(progress.blocks) * (progress.bounds[1] - progress.bounds[0])
        blocks, seconds = tuple(progress.blocks), now - progress.started
        return Landed(self.window.ticket, blocks, nbytes, seconds, self._transport)

    def lost(self, carrier: object) -> None:
        """A connection has ended; a ship that none is left of is given up if it does not go on."""
        with self._lock:
            for number, progress in self._ships.items():
                if carrier in progress.carriers:
                    progress.carriers.discard(carrier)
                    if not progress.carriers and not progress.broken:
                        hand_back(self._loop, self._loop.call_later, GRACE, self._give_up, number)

    def _give_up(self, number: int) -> None:
        with self._lock:
            progress = self._ships.get(number)
            if progress is None or progress.carriers or progress.broken:
                return
            progress.broken = ChannelLost("the sender's connections have ended between two parts of a ship")
        self._report_broken(progress.broken)

    def report(self, landed: Landed) -> None:
        """Have ``on_landed`` called on the window's loop, unless the window is shut by then."""
        hand_back(self._loop, self._report_landed, landed)

    def abandon(self, part: Part, error: TransferError) -> None:
        """An admitted part was cut off; its ship never lands, and ``on_broken`` follows."""
        with self._lock:
            progress = self._ships[part.ship]
            progress.broken = progress.broken or error
        hand_back(self._loop, self._report_broken, error)

    def _report_landed(self, landed: Landed) -> None:
        if self.gate.is_open:
            self._on_landed(self._whole_with(landed))

    def _whole_with(self, written: Landed) -> Landed:
        size, count = self.window.block_bytes, len(written.blocks)
        if written.nbytes == count * size:
            return written
        for block in written.blocks:
            self._missing[block] = self._missing.get(block, size) - written.nbytes // count
        whole = tuple(block for block in written.blocks if not self._missing[block])
        return replace(written, blocks=whole)

    def _report_broken(self, error: TransferError) -> None:
        if self.gate.is_open:
            self._on_broken(self.window.ticket, error)

    @staticmethod
    def _check_unbroken(progress: _Progress) -> None:
        if isinstance(progress.broken, IntegrityMismatch):
            raise IntegrityMismatch(progress.broken.message)
        if progress.broken is not None:
            raise TicketRejected("another part of the ship was cut off")

    def _check_untaken(self, bounds: Bounds, blocks: set[int]) -> None:
        for (begin, end), taken in self._taken.items():
            if begin < bounds[1] and bounds[0] < end and not taken.isdisjoint(blocks):
                again = min(taken.intersection(blocks))
                raise TicketRejected(f"block {again} has been written, or is being written, under this ticket")
        if bounds not in self._taken and len(self._taken) >= MAX_BANDS:
            raise TicketRejected(f"the window has been written in {MAX_BANDS} different bands")

    def _checked_blocks(self, part: Part) -> tuple[Bounds, set[int]]:
        size = self.window.block_bytes
        named = dict(part.generations)
        if not named.items() <= self._granted.items():
            raise self._not_granted(part)
        if len(named) != len(part.generations):
            raise TicketRejected("the ship names a block twice")
        total = sum([nbytes for _, nbytes in part.targets])
        if total < len(named) * size:
            bounds, covered = self._band_of(part)
        elif total == len(named) * size:
            # The sum bounds what this walks over.
            bounds, covered = (0, size), self._covered_whole(part)
        else:
            raise TicketRejected(f"the ship's bytes are not the {len(named)} blocks of {size} bytes that it names")
        # Equal totals and equal sets leave no room for an overlap.
        if covered != named.keys():
            raise TicketRejected("the ship's targets are not the blocks that it names")
        return bounds, covered

    def _covered_whole(self, part: Part) -> set[int]:
        size, covered = self.window.block_bytes, set[int]()
        for offset, nbytes in part.targets:
            if offset % size or nbytes % size:
                raise TicketRejected(f"target {offset}+{nbytes} is not whole blocks of {size} bytes")
            covered.update(range(offset // size, (offset + nbytes) // size))
        return covered

    def _band_of(self, part: Part) -> tuple[Bounds, set[int]]:
        size, (first, nbytes) = self.window.block_bytes, part.targets[0]
        begin, end = first % size, first % size + nbytes
        if not begin < end <= size or len(part.targets) != len(part.generations):
            raise TicketRejected(f"the ship's bytes are neither whole blocks of {size} bytes nor one band of each")
        for offset, length in part.targets:
            if offset % size != begin or length != nbytes:
                raise TicketRejected(f"target {offset}+{length} is not bytes {begin} to {end} of a block")
        return (begin, end), {offset // size for offset, _ in part.targets}

    def _not_granted(self, part: Part) -> TicketRejected:
        for block, generation in part.generations:
            granted = self._granted.get(block)
            if granted is None:
                return TicketRejected(f"block {block} is not in the window")
            if granted != generation:
                return TicketRejected(f"block {block} is of generation {granted}, the ship says {generation}")
        raise AssertionError("every block is granted")


class WindowBook:
    """Every open window of one receiver.

    Args:
        memory_bytes: length of the memory that windows lie in.
        transport: URI scheme that is told with what has landed.
    """

    def __init__(self, memory_bytes: int, transport: str = "") -> None:
        self._memory_bytes = memory_bytes
        self._transport = transport
        self._windows: dict[bytes, OpenWindow] = {}
        self._blocks: set[int] = set()

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """Add a window; errors as :meth:`~kv_transfer.transport.Receiver.open`."""
        end = (max(window.blocks, default=-1) + 1) * window.block_bytes
        if end > self._memory_bytes:
            raise ConfigError(
                f"blocks: block {max(window.blocks)} of {window.block_bytes} bytes ends at {end}, "
                f"outside the memory of {self._memory_bytes} bytes",
                field="blocks",
            )
        if window.ticket in self._windows:
            raise InvariantViolation("the ticket's window is open already", field="ticket")
        shared = self._blocks.intersection(window.blocks)
        if shared:
            raise InvariantViolation(f"block {min(shared)} is in a window that is still open", field="blocks")
        self._blocks.update(window.blocks)
        self._windows[window.ticket] = OpenWindow(window, on_landed, on_broken, self._transport)

    def claim(self, ticket: bytes, sender: str, spans: int, blocks: int) -> OpenWindow:
        """The open window that ``sender`` may write a part of so many spans and blocks through.

        A transport asks this as soon as it knows the numbers, before it makes room for anything that they count.

        Raises:
            TicketRejected: there is none, it is another sender's, or it has fewer blocks.
        """
        found = self.find(ticket, sender)
        if not spans <= blocks <= len(found.window.blocks):
            counts = f"{spans} spans and {blocks} blocks"
            raise TicketRejected(f"{counts} are more than the window's {len(found.window.blocks)} blocks")
        return found

    def find(self, ticket: bytes, sender: str = "") -> OpenWindow:
        """The open window of ``ticket``, which ``sender`` shows.

        Raises:
            TicketRejected: there is none, or it is another sender's.
        """
        found = self._windows.get(ticket)
        if found is None or not found.gate.is_open:
            raise TicketRejected("unknown or closed ticket")
        owner = found.window.sender
        if owner and owner != sender:
            raise TicketRejected(f"the ticket is {owner}'s, it is shown by {sender or 'somebody without a name'}")
        return found

    def shut_now(self, ticket: bytes) -> bool:
        """Let nobody more write through the ticket's window; somebody may still. False when it is not open."""
        found = self._windows.get(ticket)
        if found is None or not found.gate.is_open:
            return False
        found.gate.shut_now()
        return True

    def tickets(self) -> tuple[bytes, ...]:
        """Tickets of every window that is not yet forgotten."""
        return tuple(self._windows)

    def lost(self, carrier: object) -> None:
        """A connection has ended; see :meth:`OpenWindow.lost`. From any thread."""
        for window in tuple(self._windows.values()):
            window.lost(carrier)

    async def close(self, ticket: bytes) -> None:
        """Shut the ticket's window and forget it once nobody writes in it; an unknown ticket is fine."""
        found = self._windows.get(ticket)
        if found is None:
            return
        await found.gate.shut()
        # Two closers may have waited for the same window.
        if self._windows.pop(ticket, None) is found:
            self._blocks.difference_update(found.window.blocks)
