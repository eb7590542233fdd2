"""Who uses which bytes of a bounded memory, and who waits for some. First come, first served.

Life cycle of a request for room: waits -> has it, until it is given back | refused, when it was stopped before that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from protocol.errors import ChannelLost, LayoutMismatch

ALIGNMENT = 64
"""Every room begins at a multiple of this."""


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    ticket: bytes
    place: asyncio.Future[int]


class Room:
    """Hands out runs of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: dict[int, int] = {}
        self._waiters: deque[_Waiter] = deque()

    @property
    def used(self) -> int:
        """Bytes that are handed out."""
        return sum(self._taken.values())

    async def take(self, nbytes: int, ticket: bytes) -> int:
        """Where ``nbytes`` bytes are free; waits until they are.

        Raises:
            LayoutMismatch: there will never be so many; names both numbers.
            ChannelLost: :meth:`refuse` was called with ``ticket`` meanwhile.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.nbytes:
            raise LayoutMismatch(
                f"a block of {nbytes} bytes does not fit the staging memory of {self.nbytes}", field="staging_bytes"
            )
        waiter = _Waiter(size, ticket, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve()
            elif not waiter.place.cancelled() and waiter.place.exception() is None:
                self.give_back(waiter.place.result())
            raise

    def give_back(self, offset: int) -> None:
        """What :meth:`take` returned is free again."""
        del self._taken[offset]
        self._serve()

    def refuse(self, ticket: bytes) -> None:
        """Let nobody with this ticket wait any longer."""
        refused = [waiter for waiter in self._waiters if waiter.ticket == ticket]
        for waiter in refused:
            self._waiters.remove(waiter)
            if not waiter.place.done():
                waiter.place.set_exception(ChannelLost("the ship was aborted"))
        self._serve()

    def _serve(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            offset = self._gap(waiter.nbytes)
            if offset is None:
                return
            self._waiters.popleft()
            if not waiter.place.done():
                self._taken[offset] = waiter.nbytes
                waiter.place.set_result(offset)

    def _gap(self, nbytes: int) -> int | None:
        end = 0
        for offset in sorted(self._taken):
            if offset - end >= nbytes:
                return end
            end = offset + self._taken[offset]
        return end if self.nbytes - end >= nbytes else None
