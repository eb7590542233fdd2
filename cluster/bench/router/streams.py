"""Clients that cost next to nothing: streamed answers over plain sockets, of which only times and counts are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import msgspec

from protocol.errors import ConnectionFailed

EVENT = b'data: {"id"'
DONE = b"data: [DONE]\n\n"
END = b"\r\n0\r\n\r\n"
PATIENCE = 120.0
"""Seconds that a whole answer may take."""


@dataclass(slots=True)
class Seen:
    """What came of one answer.

    Attributes:
        first: seconds to the first event.
        last: seconds to the end.
        events: how many came, the end mark left out.
    """

    first: float = 0.0
    last: float = 0.0
    events: int = 0


class Connection(asyncio.Protocol):
    """A connection that asks for one streamed answer after the other.

    Args:
        url: of the router.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._transport: asyncio.Transport | None = None
        self._asked = 0.0
        self._seen = Seen()
        self._tail = b""
        self._begun: asyncio.Future[None] | None = None
        self._answered: asyncio.Future[Seen] | None = None

    async def open(self) -> Connection:
        """Connect."""
        await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port)
        return self

    def leave(self) -> float:
        """Go away without a word; returns when."""
        assert self._transport is not None, "open"
        self._transport.abort()
        return time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the transport."""
        # uvloop's is none by its class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        for waiting in (self._begun, self._answered):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionFailed(f"the router ended a connection: {exc}"))
                waiting.exception()

    def ask(self, body: bytes) -> None:
        """Send a request."""
        assert self._transport is not None, "open"
        loop = asyncio.get_running_loop()
        self._seen, self._tail = Seen(), b""
        self._begun, self._answered = loop.create_future(), loop.create_future()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._asked = time.perf_counter()
        self._transport.write(head.encode() + body)

    async def begun(self) -> None:
        """Return with the first event."""
        assert self._begun is not None, "asked"
        await asyncio.wait_for(asyncio.shield(self._begun), PATIENCE)

    async def answered(self) -> Seen:
        """Return with the end.

        Raises:
            ConnectionFailed: the answer is not whole.
        """
        assert self._answered is not None, "asked"
        return await asyncio.wait_for(asyncio.shield(self._answered), PATIENCE)

    def data_received(self, data: bytes) -> None:
        """Count what is there."""
        seen, answered, begun = self._seen, self._answered, self._begun
        if answered is None or begun is None or answered.done():
            return
        # A mark may be cut in two by the pieces that the bytes come in.
        text = self._tail + data
        seen.events += text.count(EVENT) - self._tail.count(EVENT)
        self._tail = text[-len(DONE) - len(END) :]
        if seen.events and not begun.done():
            seen.first = time.perf_counter() - self._asked
            begun.set_result(None)
        if text.endswith(END):
            seen.last = time.perf_counter() - self._asked
            if DONE in text and seen.events:
                answered.set_result(seen)
            else:
                answered.set_exception(ConnectionFailed(f"the router answered {text[-300:]!r}"))


def request(model: str, prompt: Sequence[int], tokens: int) -> bytes:
    """The body of one request."""
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    return msgspec.json.encode({**fields, "ignore_eos": True})
