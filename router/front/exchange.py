"""One HTTP request and its answer, over ASGI.

Life cycle of an :class:`Exchange`: :meth:`~Exchange.read_body` at most once; then either :meth:`~Exchange.respond`
once, or :meth:`~Exchange.start_events`, :meth:`~Exchange.write` at will and :meth:`~Exchange.end`. A client that goes
away shows as :class:`RequestCancelled` from whatever is under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

from protocol.errors import PayloadTooLarge, RequestCancelled, UnsupportedMediaType
from protocol.ids import new_request_id
from router.front.keys import Holder
from router.front.within import Within

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
MAX_CLIENT_ID = 128
"""Characters of the client's own request id that are sent back."""
DISCARD_FACTOR = 16
"""A body this many times over its bound is not even read to its end."""

_UNPRINTABLE = re.compile(rb"[^\x21-\x7e]")


class Exchange:
    """One request and its answer.

    Attributes:
        request_id: ours; on every answer as ``x-request-id``.
        address: of whoever has connected, without the port; a proxy's where one stands between; empty if unknown.
        started: whether the status line is out.
        ended: whether the last byte is, or will be with what is being sent.
        holder: of the key that the client has shown; None until it has, and where none is needed.
        notes: gives further headers in the moment that the answer begins.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, send_timeout: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.address: str = (scope.get("client") or ("",))[0]
        self.request_id = new_request_id()
        self.started = False
        self.ended = False
        self.holder: Holder | None = None
        self.notes: Callable[[], Iterable[Header]] = tuple
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._send_timeout = send_timeout

    def header(self, name: bytes) -> bytes:
        """A request header by its lower-case name; empty where there is none."""
        return self._headers.get(name, b"")

    async def read_body(self, bound: int) -> bytes:
        """The request's body; memory stays within ``bound`` whatever is sent.

        Raises:
            PayloadTooLarge: the body is longer than ``bound`` bytes.
            RequestCancelled: the client went away.
        """
        declared = self.header(b"content-length")
        size = int(declared) if declared.isdigit() else 0
        if size > bound * DISCARD_FACTOR:
            raise PayloadTooLarge(f"the body has {size} bytes, over the bound of {bound}")
        parts: list[bytes] = []
        received = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("the client went away")
            part: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            received += len(part)
            if received <= bound:
                parts.append(part)
                continue
            # Most clients look for an answer only when all is sent, so the rest is read and dropped.
            parts.clear()
            if received > bound * DISCARD_FACTOR:
                break
        if received > bound:
            raise PayloadTooLarge(f"the body has {max(received, size)} bytes or more, over the bound of {bound}")
        return b"".join(parts)

    async def read_json(self, bound: int) -> bytes:
        """The body of a request that must be JSON; nobody has looked yet whether it is. Raises as :meth:`read_body`.

        What is said to be something else is refused: a page in a browser may send that to any address unasked, a form
        for one, and JSON only where that address has agreed.

        Raises:
            UnsupportedMediaType: it is said to be something else.
        """
        body = await self.read_body(bound)
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind and kind != JSON:
            told = kind.decode("latin-1")[:MAX_CLIENT_ID]
            raise UnsupportedMediaType(f"the body must be {JSON.decode()}, got {told!r}", field="content-type")
        return body

    async def until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, and cancel it as soon as the client goes away. The body must have been read.

        Raises:
            RequestCancelled: the client went away first.
        """
        task = asyncio.current_task()
        assert task is not None, "it is awaited"
        cancelled, gone = task.cancelling(), False

        def leave(_: object) -> None:
            nonlocal gone
            # An answer that is out shows as a disconnect too.
            if not self.ended:
                gone = True
                task.cancel()

        # The work is done here, not in a task of its own: that would cost each request some turns of the loop.
        watch = asyncio.ensure_future(self._disconnected())
        watch.add_done_callback(leave)
        try:
            await work
        except asyncio.CancelledError as error:
            if gone and task.uncancel() <= cancelled:
                raise RequestCancelled("the client went away") from error
            raise
        finally:
            watch.remove_done_callback(leave)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def respond(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole answer."""
        await self._start(status, content_type, (*headers, (b"content-length", str(len(body)).encode())))
        await self.end(body)

    async def start_events(self) -> None:
        """Begin an answer of server-sent events."""
        await self._start(200, EVENTS, ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")))

    async def write(self, data: bytes) -> None:
        """Send part of an answer that was begun."""
        await self._emit({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part."""
        self.ended = True
        await self._emit({"type": "http.response.body", "body": data})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, content_type: bytes, headers: Iterable[Header]) -> None:
        sent = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode()), *headers, *self.notes()]
        theirs = _UNPRINTABLE.sub(b"", self.header(b"x-request-id")[:MAX_CLIENT_ID])
        if theirs:
            sent.append((b"x-client-request-id", theirs))
        self.started = True
        await self._emit({"type": "http.response.start", "status": status, "headers": sent})

    async def _emit(self, message: AsgiMessage) -> None:
        try:
            await Within(self._send(message), self._send_timeout)
        except (OSError, TimeoutError) as error:
            raise RequestCancelled("the client takes no more of the answer") from error
