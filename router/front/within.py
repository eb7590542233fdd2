"""A time limit that costs nothing where nothing is waited for, as when a piece of an answer goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any


class Within:
    """Awaits something for so many seconds at most; a timer is set only where it does not come at once.

    Args:
        awaited: what.
        seconds: how long.

    Raises:
        TimeoutError: when awaited, and it has not come by then.
    """

    def __init__(self, awaited: Awaitable[None], seconds: float) -> None:
        self._awaited = awaited
        self._seconds = seconds

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._awaited.__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        yield from self._patiently(_Begun(waits_for, steps)).__await__()

    async def _patiently(self, begun: _Begun) -> None:
        async with asyncio.timeout(self._seconds):
            await begun


class _Begun:
    """Goes on with what has begun, and waits for something.

    Args:
        waits_for: as the event loop has to be told.
        steps: what follows.
    """

    def __init__(self, waits_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waits_for = waits_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except BaseException as error:
                    waits_for = self._steps.throw(error)
                else:
                    waits_for = self._steps.send(answer)
        except StopIteration:
            return
