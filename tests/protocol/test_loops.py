from __future__ import annotations

import asyncio

import pytest

from protocol.errors import InvariantViolation
from protocol.loops import Loops


async def forever() -> None:
    await asyncio.Event().wait()


async def test_wait_returns_when_stopped_and_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    loops = Loops()
    loops.start("a", forever())
    loops.start("b", forever())
    waiting = asyncio.create_task(loops.wait())
    await loops.stop()
    await waiting
    await loops.stop()
    assert asyncio.all_tasks() <= before


async def test_wait_raises_what_ended_a_loop() -> None:
    async def broken() -> None:
        raise InvariantViolation("it does not add up")

    loops = Loops()
    loops.start("a", forever())
    loops.start("b", broken())
    with pytest.raises(InvariantViolation, match="does not add up"):
        await loops.wait()
    await loops.stop()
