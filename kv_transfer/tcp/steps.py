"""What a conversation over one connection may ask for: read, skip, write, await the connection.

A conversation is a generator that yields steps and is sent True (done) or False (cut short) for each. It holds all
knowledge of the protocol and does no I/O itself; a step makes one system call at a time and never waits.
"""

from __future__ import annotations

import math
import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from enum import Enum, auto

from kv_transfer.checksum import Checksum
from kv_transfer.gate import Gate
from protocol.errors import ChannelLost, KVFerryError

MAX_IOV = 512
"""Buffers of one vectored call; the kernel's own bound is 1024."""
MAX_CALL_BYTES = 4 << 20
"""Bytes of one vectored call: bounds how long a gate is held."""
SKIP_BYTES = 256 << 10


class Outcome(Enum):
    """What one system call of a step came to."""

    DONE = auto()
    CUT = auto()
    AGAIN = auto()
    BLOCKED = auto()


class Cursor:
    """How far a vectored read or write has come in a list of buffers.

    Args:
        views: the buffers.
        checksum: takes in what is through; None reads nothing.

    Attributes:
        left: bytes still to go.
        checksum: as given.
    """

    __slots__ = ("_index", "_offset", "_views", "checksum", "left")

    def __init__(self, views: Sequence[memoryview], checksum: Checksum | None = None) -> None:
        self._views = views
        self.checksum = checksum
        self._index = 0
        self._offset = 0
        self.left = sum(view.nbytes for view in views)

    def batch(self) -> list[memoryview]:
        """The next buffers: at most MAX_IOV of them, at most MAX_CALL_BYTES in all."""
        room = MAX_CALL_BYTES
        found: list[memoryview] = []
        offset = self._offset
        for index in range(self._index, min(len(self._views), self._index + MAX_IOV)):
            view = self._views[index]
            size = view.nbytes - offset
            if size > room:
                if room:
                    found.append(view[offset : offset + room])
                break
            found.append(view[offset:] if offset else view)
            room -= size
            offset = 0
        return found

    def advance(self, count: int) -> None:
        """``count`` bytes of the last batch are through; reads them where there is a checksum."""
        if self.checksum is not None:
            self._take_in(count, self.checksum)
        self.left -= count
        count += self._offset
        while self._index < len(self._views) and count >= self._views[self._index].nbytes:
            count -= self._views[self._index].nbytes
            self._index += 1
        self._offset = count

    def _take_in(self, count: int, checksum: Checksum) -> None:
        index, offset = self._index, self._offset
        while count:
            piece = self._views[index][offset : offset + count]
            checksum.update(piece)
            count -= piece.nbytes
            index, offset = index + 1, 0

    def put(self, data: memoryview) -> None:
        """Write ``data``, at most ``left`` bytes, into the buffers."""
        while data:
            view = self._views[self._index][self._offset :][: data.nbytes]
            view[:] = data[: view.nbytes]
            data = data[view.nbytes :]
            self.advance(view.nbytes)


class Step(ABC):
    """One request of a conversation.

    Attributes:
        interest: selector events to wait for.
        timeout: seconds without progress before the conversation gets ChannelLost; None waits for ever.
        until: when it gets that whatever the progress, where there is a timeout.
    """

    interest: int = selectors.EVENT_READ
    timeout: float | None = None
    until: float = math.inf

    @abstractmethod
    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """Make at most one system call.

        Args:
            connection: non-blocking.
            ready: selector events that are known to hold; 0 when nothing is known.

        Raises:
            ChannelLost: the peer closed the connection.
            OSError: the connection broke.
        """


class Read(Step):
    """Fill the cursor's buffers; False once ``gate`` is shut."""

    def __init__(self, cursor: Cursor, *, gate: Gate | None = None, timeout: float | None = None) -> None:
        self.cursor = cursor
        self.gate = gate
        self.timeout = timeout

    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """See :meth:`Step.perform`."""
        if self.gate is not None and not self.gate.enter():
            return Outcome.CUT
        try:
            count = connection.recvmsg_into(self.cursor.batch())[0]
            self.cursor.advance(count)
        except BlockingIOError:
            return Outcome.BLOCKED
        finally:
            if self.gate is not None:
                self.gate.leave()
        if not count:
            raise ChannelLost("the peer closed the connection")
        return Outcome.AGAIN if self.cursor.left else Outcome.DONE


class Inbox:
    """Room for the first bytes of what comes, so that a head and its tables take one call.

    What is read beyond them is the beginning of the payload, or of the next head; it waits here to be taken.
    """

    __slots__ = ("_begin", "_end", "_room", "_view")

    def __init__(self, room: int) -> None:
        self._view = memoryview(bytearray(room))
        self._room = room
        self._begin = self._end = 0

    @property
    def held(self) -> int:
        """Bytes that wait."""
        return self._end - self._begin

    def vacant(self) -> memoryview:
        """Where the next bytes go; at least one if not all of the room is held."""
        if self._end == self._room and self._begin:
            held = self.held
            self._view[:held] = self._view[self._begin : self._end].tobytes()
            self._begin, self._end = 0, held
        return self._view[self._end :]

    def filled(self, count: int) -> None:
        """``count`` bytes of the vacant room have come."""
        self._end += count

    def take(self, limit: int) -> memoryview:
        """The next bytes, at most ``limit``; good until the inbox is filled again."""
        begin = self._begin
        end = self._begin = min(self._end, begin + limit)
        if end == self._end:
            self._begin = self._end = 0
        return self._view[begin:end]


class Fill(Step):
    """Have at least ``need`` bytes in the inbox; waits for the socket before it tries it."""

    def __init__(self, inbox: Inbox, need: int, *, timeout: float | None = None) -> None:
        self.inbox = inbox
        self.need = need
        self.timeout = timeout

    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """See :meth:`Step.perform`."""
        if self.inbox.held < self.need:
            if not ready:
                return Outcome.BLOCKED
            try:
                count = connection.recv_into(self.inbox.vacant())
            except BlockingIOError:
                return Outcome.BLOCKED
            if not count:
                raise ChannelLost("the peer closed the connection")
            self.inbox.filled(count)
        return Outcome.DONE if self.inbox.held >= self.need else Outcome.AGAIN


class Skip(Step):
    """Read ``left`` bytes into nowhere."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._scratch = memoryview(bytearray(min(left, SKIP_BYTES)))

    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """See :meth:`Step.perform`."""
        if not self.left:
            return Outcome.DONE
        try:
            count = connection.recv_into(self._scratch[: self.left])
        except BlockingIOError:
            return Outcome.BLOCKED
        if not count:
            raise ChannelLost("the peer closed the connection")
        self.left -= count
        return Outcome.AGAIN if self.left else Outcome.DONE


class Write(Step):
    """Send the cursor's buffers; False once ``gate`` is shut or, if it heeds, when the peer answers before the end."""

    interest = selectors.EVENT_WRITE

    def __init__(
        self, cursor: Cursor, *, gate: Gate | None = None, timeout: float | None = None, heed: bool = False
    ) -> None:
        self.cursor = cursor
        self.gate = gate
        self.timeout = timeout
        self.heed = heed
        if heed:
            self.interest = selectors.EVENT_WRITE | selectors.EVENT_READ

    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """See :meth:`Step.perform`."""
        if self.heed and ready & selectors.EVENT_READ:
            return Outcome.CUT
        if self.gate is not None and not self.gate.enter():
            return Outcome.CUT
        try:
            self.cursor.advance(connection.sendmsg(self.cursor.batch()))
        except BlockingIOError:
            return Outcome.BLOCKED
        finally:
            if self.gate is not None:
                self.gate.leave()
        return Outcome.AGAIN if self.cursor.left else Outcome.DONE


class Connected(Step):
    """Wait until a connection that was begun is made."""

    interest = selectors.EVENT_WRITE

    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout

    def perform(self, connection: socket.socket, ready: int) -> Outcome:
        """See :meth:`Step.perform`."""
        if not ready:
            return Outcome.BLOCKED
        failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, "could not connect")
        return Outcome.DONE


Conversation = Generator[Step, bool, KVFerryError | None]
"""Yields steps; returns None when all went well, or an error that leaves the connection usable."""
