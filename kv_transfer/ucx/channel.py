"""One UCX worker and its endpoint, driven from an event loop; only from within the loop's thread.

Life cycle: made -> connected -> [pull -> quiet]* -> closed (endpoint closed by force, worker destroyed). A pull that is
told to stop lets what is under way end for a short while, and then has the endpoint closed, for a stopped peer may
never answer. Either way it is quiet only when UCX has said so of every get.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence

import numpy as np

from kv_transfer.ucx.library import IN_PROGRESS, MAX_ADDRESS, Context

TURN = 0.001
"""Seconds of one turn before the loop's other business gets its own."""
GRACE = 0.05
"""Seconds that gets under way have to end by themselves. What follows is harsher, not less certain."""


class Stop:
    """A flag that the shim reads before each get; any thread may set it.

    Attributes:
        address: of the flag.
    """

    __slots__ = ("_flag", "address")

    def __init__(self) -> None:
        self._flag = ctypes.c_int(0)
        self.address = ctypes.addressof(self._flag)

    def set(self) -> None:
        """Let no further get begin."""
        self._flag.value = 1

    @property
    def is_set(self) -> bool:
        """Whether it has been set."""
        return bool(self._flag.value)


class Channel:
    """See the module.

    Raises:
        ChannelLost: UCX has no room for one more.
    """

    def __init__(self, context: Context) -> None:
        self._library = context.library
        self._calls = context.library.calls
        self._context = context
        self._loop = asyncio.get_running_loop()
        handle, event_fd = ctypes.c_void_p(), ctypes.c_int()
        status = self._calls.kvf_channel_new(context.handle, ctypes.byref(handle), ctypes.byref(event_fd))
        self._library.check(status, "opening a worker")
        self._handle: ctypes.c_void_p | None = handle
        self._event_fd = event_fd.value
        self._queued = False
        self._spans: np.ndarray[tuple[int, int], np.dtype[np.uint64]] | None = None
        self._stop = Stop()
        self._quiet: asyncio.Future[int] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._loop.add_reader(self._event_fd, self._turn)

    def address(self) -> bytes:
        """The worker's address, for the peer's :meth:`connect`."""
        buffer, room = ctypes.create_string_buffer(MAX_ADDRESS), ctypes.c_size_t(MAX_ADDRESS)
        status = self._calls.kvf_channel_address(self._handle, buffer, ctypes.byref(room))
        self._library.check(status, "packing a worker's address")
        return buffer.raw[: room.value]

    def connect(self, address: bytes, key: bytes) -> None:
        """Make the endpoint to the peer's worker; with ``key`` its memory can be read.

        Raises:
            ChannelLost: UCX cannot reach it.
        """
        self._library.check(self._calls.kvf_connect(self._handle, address), "connecting")
        if key:
            self._library.check(self._calls.kvf_unpack(self._handle, key), "taking the peer's memory key")
        self.kick()

    def describe(self) -> str:
        """What UCX prints about the endpoint."""
        buffer = ctypes.create_string_buffer(MAX_ADDRESS)
        self._calls.kvf_describe(self._context.handle, self._handle, buffer, MAX_ADDRESS)
        return buffer.value.decode(errors="replace")

    def pull(self, spans: Sequence[tuple[int, int, int]], stop: Stop) -> asyncio.Future[int]:
        """Read ``(local address, remote address, bytes)`` one after the other, until done, lost or stopped.

        Set ``stop`` and call :meth:`kick` to end it early; do not cancel what this returns.

        Returns:
            Of the status, 0 when every byte is here. Once it is there nothing is written any more.
        """
        assert self._is_quiet(), "one pull at a time"
        self._spans = np.array(spans, np.uint64)
        self._stop = stop
        self._quiet = self._loop.create_future()
        self._calls.kvf_pull(self._handle, self._spans.ctypes.data, len(spans), self._context.memory, stop.address)
        self._turn()
        return self._quiet

    @property
    def alive(self) -> bool:
        """Whether it may carry another pull."""
        return self._handle is not None and not self._closing and not self._calls.kvf_broken(self._handle)

    def reason(self, status: int) -> str:
        """What a pull's status means."""
        return self._library.reason(status)

    @property
    def landed(self) -> int:
        """Bytes of the pull that are here."""
        return int(self._calls.kvf_landed(self._handle)) if self._handle is not None else 0

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

    def _turn(self) -> None:
        if self._handle is None:
            return
        status = self._calls.kvf_turn(self._handle, TURN)
        if self._quiet is not None and not self._quiet.done():
            self._look(self._quiet)
        if self._closing and self._calls.kvf_closed(self._handle) and self._is_quiet():
            self._free()
        elif status:
            self.kick()

    def _is_quiet(self) -> bool:
        return self._quiet is None or self._quiet.done()

    def _look(self, quiet: asyncio.Future[int]) -> None:
        result = self._calls.kvf_pulled(self._handle)
        if result != IN_PROGRESS:
            if self._grace is not None:
                self._grace.cancel()
                self._grace = None
            quiet.set_result(result)
        elif self._stop.is_set and self._grace is None and not self._closing:
            self._grace = self._loop.call_later(GRACE, self._cut)

    def _free(self) -> None:
        self._loop.remove_reader(self._event_fd)
        self._calls.kvf_channel_free(self._handle)
        self._handle = None
        if not self._closed.done():
            self._closed.set_result(None)
