"""Signals of the command: a polite end runs the clean-up, and the clean-up is not interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED_STATUS = 128 + signal.SIGTERM

Handler = Callable[[int, FrameType | None], object] | int | None


@contextmanager
def exit_on_terminate() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that ``finally`` blocks run; in the main thread only, elsewhere nothing."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED_STATUS)

    with _handlers({signal.SIGTERM: leave}):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM; in the main thread only, elsewhere nothing."""
    with _handlers({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Undo what a library does to the handlers of SIGINT and SIGTERM; a SIGTERM meanwhile waits until they are back.

    Python's own record may say that nothing has changed when a library went past it, so they are set again in any case.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
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
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in wanted.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
