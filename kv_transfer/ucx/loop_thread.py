"""A thread with an event loop of its own, in which UCX is driven and the descriptors' connections are served.

Life cycle: made (running) -> stop() (tasks ended, loop closed) -> joined.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from kv_transfer.gate import hand_back

T = TypeVar("T")


class LoopThread:
    """See the module."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = Thread(target=self._run, name=name)
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Run ``command`` in the thread; after :meth:`stop` it is dropped."""
        hand_back(self._loop, command)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``coroutine`` in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last``, which ends whatever runs in the loop, and end the thread. Once only."""
        ended = self.submit(last)
        try:
            await asyncio.wrap_future(ended)
        finally:
            hand_back(self._loop, self._loop.stop)
            # The thread has nothing left to wait for, so this returns at once.
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            asyncio.set_event_loop(None)


async def settled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all ``tasks`` are done, whatever they end with, and however often this wait is cancelled."""
    cancelled = False
    while left := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.exception()
    if cancelled:
        raise asyncio.CancelledError


async def streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Both of asyncio's ends of a connection, which a cancel leaves either made or closed."""
    opening = asyncio.ensure_future(asyncio.open_connection(sock=connection))
    try:
        await settled({opening})
    except asyncio.CancelledError:
        if opening.exception() is None:
            opening.result()[1].transport.abort()
        raise
    return opening.result()
