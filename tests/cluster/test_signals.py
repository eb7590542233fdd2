"""A signal ends a running event loop in order: tasks are cancelled, none is struck in the middle of a callback."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from cluster.signals import run_until_terminated


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_what_runs_and_its_status_is_kept(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    story: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def in_a_callback() -> None:
            os.kill(os.getpid(), number)
            story.append("the callback went on to its end")

        loop.call_soon(in_a_callback)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            story.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            story.append("cleaned up")

    with pytest.raises(SystemExit) as ended:
        run_until_terminated(work())
    assert ended.value.code == 128 + number
    assert story == ["the callback went on to its end", "cancelled", "cleaned up"]
    assert signal.getsignal(number) == before


def test_what_is_not_terminated_gives_its_result_or_its_error() -> None:
    async def result() -> int:
        return 7

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert run_until_terminated(result()) == 7
    with pytest.raises(asyncio.CancelledError):
        run_until_terminated(cancelled())
