"""A ZeroMQ socket that the running event loop waits for, at little cost.

pyzmq's own for asyncio makes a future, and asks libzmq for its events several times, for each frame and each way, which
costs more than all that is done with the frame. Life cycle: made, :meth:`~LoopSocket.take` and, where nothing is there,
:meth:`~LoopSocket.came`, :meth:`~LoopSocket.give` at will, :meth:`~LoopSocket.close` once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import zmq
import zmq.asyncio

_EVENTS, _READABLE, _NOW = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT)
"""As plain numbers: pyzmq's own are of Enum, whose arithmetic takes as long as the question to libzmq."""


class LoopSocket:
    """See the module. One task at a time waits.

    Args:
        context: whose socket it is.
        kind: such as ``zmq.ROUTER``.

    Attributes:
        raw: the socket itself, for its options; nothing is sent or received by that.
    """

    def __init__(self, context: zmq.asyncio.Context, kind: int) -> None:
        made = context.socket(kind, socket_class=zmq.Socket)  # type: ignore[arg-type]
        self.raw = cast("zmq.Socket[bytes]", made)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | None = None

    def take(self) -> list[bytes] | None:
        """The parts of the next message, if one is there."""
        # Asked first: to be told by an exception takes three times as long.
        return self.raw.recv_multipart(_NOW) if self._readable() else None

    def take_frames(self) -> list[zmq.Frame] | None:
        """The same, as frames: they know their connection, and cost some microseconds more each."""
        return self.raw.recv_multipart(_NOW, copy=False) if self._readable() else None

    async def came(self) -> None:
        """Return once something may have come, after nothing was there."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.raw.FD, self._look)
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def give(self, parts: Sequence[bytes]) -> bool:
        """Queue a message; False when its peer is gone or too far behind. Never blocks."""
        try:
            self.raw.send_multipart(parts, _NOW)
        except zmq.ZMQError:
            return False
        finally:
            # Sending takes note of what has come, too, and then the descriptor does not tell of that any more.
            if self._waiting is not None:
                self._look()
        return True

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        if self._loop is not None and not self.raw.closed and not self._loop.is_closed():
            self._loop.remove_reader(self.raw.FD)
        self.raw.close(linger=0)

    def _look(self) -> None:
        # Even where nobody waits: asked for its events, libzmq lets its descriptor be quiet until there is more.
        if self._readable() and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _readable(self) -> bool:
        return bool(cast("int", self.raw.getsockopt(_EVENTS)) & _READABLE)
