"""Signals of the command: a polite end runs the clean-up, and the clean-up is not interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object] | int | None


@contextmanager
def exit_on_terminate() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP of a closing terminal, raise SystemExit, so that ``finally`` blocks run.

    In the main thread only, elsewhere nothing.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave}):
        yield


def run_until_terminated(
    main: Coroutine[object, object, T], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """``asyncio.run`` in which SIGTERM and SIGHUP cancel ``main``, as SIGINT does, and raise once all is cleaned up.

    An exception raised by a signal handler would strike wherever the loop is, in a callback of a transport as likely
    as not, and leave the task that it belongs to unfinished.

    Raises:
        SystemExit: terminated; the status is 128 and the number of the signal.
    """
    received: list[int] = []

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def leave(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        with _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave}):
            return await main

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP; in the main thread only, elsewhere nothing."""
    with _handlers(dict.fromkeys(HANDLED, signal.SIG_IGN)):
        yield


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Undo what a library does to the handlers of these signals; a SIGTERM or SIGHUP meanwhile waits until then.

    Python's own record may say that nothing has changed when a library went past it, so they are set again in any case.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        with _handlers({}):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _handlers(wanted: dict[signal.Signals, Handler]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED}
    for number, handler in wanted.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
