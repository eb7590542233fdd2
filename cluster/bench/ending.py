"""Ends that are not left half-way.

A transport whose ``close`` is cut short keeps threads, and a process with threads does not end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def to_the_end(work: Coroutine[object, object, None]) -> None:
    """Await ``work`` wholly; a cancellation that comes meanwhile is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    await task
    if cancelled:
        raise asyncio.CancelledError
