"""The endless loops of one process, as one thing that is started, waited for and stopped.

Life cycle: made empty, :meth:`Loops.start` for each loop, :meth:`Loops.wait` by whoever supervises the process,
:meth:`Loops.stop` once. A loop that ends by itself is a fault of ours, and :meth:`Loops.wait` raises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Loops:
    """Named tasks on the running event loop that shall never end by themselves."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._watched: list[asyncio.Future[None]] = []
        self._stopped = asyncio.Event()

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The loops themselves, for whoever watches them."""
        return tuple(self._tasks)

    def start(self, name: str, loop: Coroutine[None, None, None]) -> None:
        """Run ``loop`` as a task called ``name``."""
        self._tasks.append(asyncio.create_task(loop, name=name))

    def watch(self, *others: asyncio.Future[None]) -> None:
        """Have :meth:`wait` look at tasks, or futures, that somebody else ends."""
        self._watched.extend(others)

    async def wait(self) -> None:
        """Return once stopped; raise what ended a loop before that."""
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            loops: list[asyncio.Future[None]] = [*self._tasks, *self._watched]
            waited: list[asyncio.Future[Any]] = [stopped, *loops]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return
            for ended in loops:
                if ended.done():
                    await ended
        finally:
            stopped.cancel()

    async def stop(self) -> None:
        """Cancel every loop and return when all have ended; may be called more than once."""
        self._stopped.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
