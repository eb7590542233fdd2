"""Connections to prefill workers.

Life cycle: made on the first message to a worker, kept while it is used, closed when idle. A worker that starts again
has another endpoint, so its former connection just falls idle. A connection that is lost is made again by itself; what
was on its way is lost with it, and who waits for an answer is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq.asyncio

from protocol.curve import CurveKeys
from protocol.errors import ConfigError, KVFerryError, ProtocolError
from protocol.ids import Peer
from protocol.messages import Message, PrefillAddress
from protocol.sockets import Spoke

SPOKE_IDLE = 60.0
"""Seconds after which an unused connection to a prefill worker is closed."""


class PrefillPeers:
    """Connections to prefill workers, made on first use and closed when idle.

    Args:
        context: of the process's ZeroMQ sockets.
        me: this worker.
        receive: called with ``(sender, message)``.
        refused: called with an error for each frame that does not decode, for an endpoint that is none, and for a
            worker that has other keys.
        renewed: called with an endpoint to which a connection was lost and is there again.
        keys: that every prefill worker must have; None speaks to any.

    Attributes:
        broken: done, with the error, once ``receive`` has raised: that connection hears nothing more.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        me: Peer,
        *,
        receive: Callable[[Peer, Message], None],
        refused: Callable[[KVFerryError], None],
        renewed: Callable[[str], None],
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = context
        self._me = me
        self._receive = receive
        self._refused = refused
        self._renewed = renewed
        self._keys = keys
        self._spokes: dict[str, tuple[Spoke, tuple[asyncio.Task[None], ...]]] = {}
        self._used: dict[str, float] = {}
        self._closed = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, address: PrefillAddress, message: Message) -> bool:
        """Queue ``message`` for the worker at ``address``; False if that cannot be done: the import will expire."""
        if self._closed:
            return False
        if address.endpoint not in self._spokes:
            try:
                spoke = Spoke(self._context, self._me, address.endpoint, keys=self._keys, watched=True)
            except ConfigError as error:
                self._refused(error)
                return False
            tasks = (asyncio.create_task(self._listen(spoke)), asyncio.create_task(self._look_after(spoke)))
            for task in tasks:
                task.add_done_callback(self._ended)
            self._spokes[address.endpoint] = (spoke, tasks)
        self._used[address.endpoint] = time.monotonic()
        return self._spokes[address.endpoint][0].send(message)

    def tick(self, in_use: frozenset[str]) -> None:
        """Close what has been idle; ``in_use`` names endpoints that an open import still needs."""
        limit = time.monotonic() - SPOKE_IDLE
        for endpoint, used in list(self._used.items()):
            if used < limit and endpoint not in in_use:
                self._end(endpoint)

    async def close(self) -> None:
        """Close every connection; what is sent from now on is dropped."""
        self._closed = True
        tasks = [task for _, each in self._spokes.values() for task in each]
        for endpoint in list(self._spokes):
            self._end(endpoint)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, endpoint: str) -> None:
        spoke, tasks = self._spokes.pop(endpoint)
        del self._used[endpoint]
        for task in tasks:
            task.cancel()
        spoke.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _listen(self, spoke: Spoke) -> None:
        while True:
            try:
                envelope = await spoke.receive()
            except ProtocolError as error:
                self._refused(error)
                continue
            self._receive(envelope.sender, envelope.body)

    async def _look_after(self, spoke: Spoke) -> None:
        await spoke.reached(self._refused)
        while True:
            await spoke.reached(self._refused)
            self._renewed(spoke.endpoint)
