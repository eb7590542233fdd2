"""One UCX worker and its endpoint, driven from an event loop; only from within the loop's thread.

Life cycle: made -> connected -> [move -> through]* -> closed (endpoint closed by force, worker destroyed). A move that
is not through when it ends takes the channel with it: UCX lets no receive be taken back that has begun to fill, so what
proves that the memory is quiet is that its worker is no more. Closing waits for nobody: it is one turn more, and then
the worker goes, whatever the peer does or does not.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence

import numpy as np

from kv_transfer.ucx.library import IN_PROGRESS, MAX_ADDRESS, Context

CLOSED = -16
"""The status of a move whose channel was closed under it: UCX's UCS_ERR_CANCELED."""
TURN = 0.001
"""Seconds of one turn before the loop's other business gets its own."""
UNASKED = 0.05
"""Seconds between turns that no event asks for, while something is awaited: not every event is told. UCX 1.13, for one,
tells of a peer's answer to a connection request before it has put the answer to that in its queue."""


class Stop:
    """A flag that the shim reads before each piece; any thread may set it.

    Attributes:
        address: of the flag.
    """

    __slots__ = ("_flag", "address")

    def __init__(self) -> None:
        self._flag = ctypes.c_int(0)
        self.address = ctypes.addressof(self._flag)

    def set(self) -> None:
        """Let no further piece begin."""
        self._flag.value = 1

    @property
    def is_set(self) -> bool:
        """Whether it has been set."""
        return bool(self._flag.value)


class Channel:
    """See the module.

    Args:
        context: of the memory.
        first_tag: both ends must begin with the same one.

    Raises:
        ChannelLost: UCX has no room for one more.
    """

    def __init__(self, context: Context, first_tag: int = 0) -> None:
        self._library = context.library
        self._calls = context.library.calls
        self._context = context
        self._loop = asyncio.get_running_loop()
        handle, event_fd = ctypes.c_void_p(), ctypes.c_int()
        status = self._calls.kvf_channel_new(context.handle, first_tag, ctypes.byref(handle), ctypes.byref(event_fd))
        self._library.check(status, "opening a worker")
        self._handle: ctypes.c_void_p | None = handle
        self._event_fd = event_fd.value
        self._queued = False
        self._unasked: asyncio.TimerHandle | None = None
        self._spans: np.ndarray[tuple[int, int], np.dtype[np.uint64]] | None = None
        self._stop = Stop()
        self._quiet: asyncio.Future[int] | None = None
        self._outcome = 0
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._loop.add_reader(self._event_fd, self._turn)

    def address(self) -> bytes:
        """The worker's address, for the peer's :meth:`connect`."""
        buffer, room = ctypes.create_string_buffer(MAX_ADDRESS), ctypes.c_size_t(MAX_ADDRESS)
        status = self._calls.kvf_channel_address(self._handle, buffer, ctypes.byref(room))
        self._library.check(status, "packing a worker's address")
        return buffer.raw[: room.value]

    def connect(self, address: bytes) -> None:
        """Make the endpoint to the peer's worker.

        Raises:
            ChannelLost: UCX cannot reach it.
        """
        self._library.check(self._calls.kvf_connect(self._handle, address), "connecting")
        self.kick()

    def describe(self) -> str:
        """What UCX prints about the endpoint."""
        buffer = ctypes.create_string_buffer(MAX_ADDRESS)
        self._calls.kvf_describe(self._context.handle, self._handle, buffer, MAX_ADDRESS)
        return buffer.value.decode(errors="replace")

    def move(self, spans: Sequence[tuple[int, int]], stop: Stop, *, receives: bool) -> asyncio.Future[int]:
        """Send or receive ``(address, bytes)`` one after the other, until through, lost or stopped.

        Set ``stop`` and call :meth:`kick`, or :meth:`close`, to end it early; do not cancel what this returns.

        Returns:
            Of the status: 0 when every byte is through; else the channel is closed. Once it is there the memory is
            touched no more.
        """
        assert self._is_quiet(), "one move at a time"
        self._spans = np.array(spans, np.uint64)
        self._stop = stop
        self._quiet = self._loop.create_future()
        memory = (self._context.memory, self._context.kind)
        self._calls.kvf_move(self._handle, self._spans.ctypes.data, len(spans), int(receives), *memory, stop.address)
        self._turn()
        return self._quiet

    @property
    def alive(self) -> bool:
        """Whether it may carry another move."""
        return self._handle is not None and not self._closing and not self._calls.kvf_broken(self._handle)

    def reason(self, status: int) -> str:
        """What a move's status means."""
        return self._library.reason(status)

    @property
    def moved(self) -> int:
        """Bytes of the move that are through."""
        return int(self._calls.kvf_moved_bytes(self._handle)) if self._handle is not None else 0

    def kick(self) -> None:
        """Take a turn soon: something was changed from outside UCX."""
        if not self._queued and self._handle is not None:
            self._queued = True
            self._loop.call_soon(self._queued_turn)

    def close(self) -> asyncio.Future[None]:
        """Close the endpoint by force and destroy the worker.

        Returns:
            Done when nothing is read or written by it any more; not to be cancelled.
        """
        self._cut()
        return self._closed

    def _cut(self) -> None:
        if not self._closing:
            self._closing = True
            self._calls.kvf_close(self._handle)
        self.kick()

    def _queued_turn(self) -> None:
        self._queued = False
        self._turn()

    def _unasked_turn(self) -> None:
        self._unasked = None
        self._turn()

    def _turn(self) -> None:
        if self._handle is None:
            return
        status = self._calls.kvf_turn(self._handle, TURN)
        if not self._is_quiet():
            self._look()
        if self._closing:
            self._free()
        elif status:
            self.kick()
        elif self._unasked is None and not self._is_quiet():
            self._unasked = self._loop.call_later(UNASKED, self._unasked_turn)

    def _is_quiet(self) -> bool:
        return self._quiet is None or self._quiet.done()

    def _look(self) -> None:
        assert self._quiet is not None, "a move is on"
        result = self._calls.kvf_moved(self._handle)
        if not result:
            self._quiet.set_result(0)
        elif result != IN_PROGRESS and not self._closing:
            self._outcome = result
            self._cut()

    def _free(self) -> None:
        self._loop.remove_reader(self._event_fd)
        if self._unasked is not None:
            self._unasked.cancel()
        self._calls.kvf_channel_free(self._handle)
        self._handle = None
        if self._quiet is not None and not self._quiet.done():
            self._context.drain()
            self._quiet.set_result(self._outcome or CLOSED)
        self._closed.set_result(None)
