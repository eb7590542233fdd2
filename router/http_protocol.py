"""uvicorn's HTTP/1.1 protocol, within bounds that it does not have.

uvicorn bounds neither a request's head nor what a client sends ahead of an answer, nor the time that a client takes to
send a request, and stops reading where a second request waits behind the first, so that it does not see the client
leave. Life cycle: as uvicorn's, one per connection.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_LOOSE_BYTES = 256 << 10
"""Bytes of a request in a row that are none of its body: its head, its trailers, the extensions of one chunk."""

HEAD_SECONDS = 30.0
"""In which a client must have sent the head of a request that it has begun, or of its first."""
BODY_SECONDS = 120.0
"""In which the body must have followed."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Awaited(Enum):
    """What of a request is still to come."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class _RequestAheadError(Exception):
    """A request began while the one before it had no answer yet."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    A request with more than ``MAX_LOOSE_BYTES`` outside its body is answered 431, one that takes too long to come 408.
    A request that is sent before the answer to the last one is not taken: that answer is the connection's last, and the
    client asks again on a new one, as RFC 9112 (9.3.2) has it.
    """

    _loose_bytes = 0
    _got_on = False
    _answering_last = False
    _awaited = _Awaited.HEAD
    _timed = _Awaited.NOTHING
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._look_at_the_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._awaited = _Awaited.NOTHING
        self._look_at_the_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self._answering_last or self.transport.is_closing():
            return
        self._got_on = False
        super().data_received(data)
        self._loose_bytes = 0 if self._got_on else self._loose_bytes + len(data)
        if self._loose_bytes > MAX_LOOSE_BYTES and not self._answering_last and not self.transport.is_closing():
            self._hang_up(_TOO_LARGE)
        self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """Have a timer while something of a request is awaited; most requests come in one piece, and need none."""
        if self._timed is self._awaited:
            return
        self._timed = self._awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._awaited is not _Awaited.NOTHING:
            seconds = HEAD_SECONDS if self._awaited is _Awaited.HEAD else BODY_SECONDS
            self._timer = self.loop.call_later(seconds, self._hang_up, _TOO_SLOW)

    def _hang_up(self, answer: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(answer)
        self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._answering_last = True
            self.cycle.keep_alive = False
            raise _RequestAheadError
        self._awaited = _Awaited.HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._awaited = _Awaited.BODY
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Bytes of the body."""
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._got_on = True
        self._awaited = _Awaited.NOTHING
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; one that came ahead is none, and the answer under way goes on."""
        if not self._answering_last:
            super().send_400_response(msg)
