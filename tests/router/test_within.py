"""A time limit without a timer where nothing is waited for."""

from __future__ import annotations

import asyncio

import pytest

from router.front.within import Within


async def test_what_comes_at_once_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    async def at_once() -> None:
        done.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "timeout", lambda _: pytest.fail("a timer"))
        await Within(at_once(), 1.0)
    assert done == [1]


async def test_what_waits_goes_on_to_its_end() -> None:
    events = [asyncio.Event() for _ in range(3)]
    seen = []

    async def in_turns() -> None:
        for event in events:
            await event.wait()
            seen.append(event)

    task = asyncio.create_task(_await(in_turns(), 10.0))
    for count, event in enumerate(events):
        await asyncio.sleep(0)
        assert len(seen) == count
        event.set()
    await task
    assert seen == events


async def test_what_does_not_come_in_time_is_cancelled_and_so_is_what_nobody_waits_for() -> None:
    ends = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        await Within(endless(), 0.01)
    task = asyncio.create_task(_await(endless(), 10.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends == ["cancelled"] * 2


async def test_errors_come_through_early_and_late() -> None:
    async def fails(*, late: bool) -> None:
        if late:
            await asyncio.sleep(0)
        raise ConnectionResetError

    for late in (False, True):
        with pytest.raises(ConnectionResetError):
            await Within(fails(late=late), 1.0)


async def _await(awaited: object, seconds: float) -> None:
    await Within(awaited, seconds)  # type: ignore[arg-type]
