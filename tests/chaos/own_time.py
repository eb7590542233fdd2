"""How long something took this process, however busy the machine is with others' work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PAUSE = 0.001


class OwnTime:
    """Time in which this process could get on: what its threads waited for a core, as the kernel counts it, is off.

    A load average is of the last minute, and says nothing of the second that is judged.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited = _waited()

    @property
    def seconds(self) -> float:
        """Since this was made."""
        whole = time.monotonic() - self._began
        waited = sum(wait - self._waited.get(thread, 0) for thread, wait in _waited().items())
        return whole - min(whole, waited * 1e-9)


def _waited() -> dict[str, int]:
    """Nanoseconds that each thread has been ready to run and had no core."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    return found


async def in_own_time(condition: Callable[[], object], seconds: float, since: OwnTime | None = None) -> bool:
    """Wait for a condition, but no longer than so many seconds of our own time; whether it came."""
    clock = since or OwnTime()
    while not condition():
        if clock.seconds > seconds:
            return bool(condition())
        await asyncio.sleep(_PAUSE)
    return True
