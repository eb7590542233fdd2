"""The door through which every read or write of pool memory passes; shutting it is what makes quiescence provable.

Life cycle: open; ``enter`` before and ``leave`` after each access, from any thread; shut once, for good. After
:meth:`Gate.shut` has returned nobody is inside and nobody gets in. Accesses between ``enter`` and ``leave`` never wait
for a peer, so shutting takes no longer than one copy of a few MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Lock


def hand_back(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Run ``callback`` on ``loop`` from any thread; a loop that has closed has nobody left to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Gate:
    """Counts who is inside; once shut, lets nobody in."""

    __slots__ = ("_inside", "_is_open", "_lock", "_waiters")

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_open = True
        self._inside = 0
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_open(self) -> bool:
        """Whether :meth:`enter` would succeed."""
        return self._is_open

    def enter(self) -> bool:
        """Go in, to touch the memory; False when the gate is shut. Each True is paid back with one :meth:`leave`."""
        with self._lock:
            if self._is_open:
                self._inside += 1
            return self._is_open

    def leave(self) -> None:
        """Done touching the memory."""
        with self._lock:
            self._inside -= 1
            assert self._inside >= 0, "left a gate more often than entered"
            waiters, self._waiters = ([], self._waiters) if self._inside or self._is_open else (self._waiters, [])
        for loop, waiter in waiters:
            hand_back(loop, _wake, waiter)

    def shut_now(self) -> None:
        """Let nobody in from now on; somebody may still be inside."""
        with self._lock:
            self._is_open = False

    async def shut(self) -> None:
        """Let nobody in from now on, and return once nobody is inside."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._is_open = False
            if not self._inside:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
        await waiter
