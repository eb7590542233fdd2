"""One connection, served by one thread: an I/O thread, or the event loop's.

Life cycle: attached (idle) -> begin(conversation) -> idle again when it returned -> ... -> closed, by ``close``, by an
error, or because the peer closed an idle connection. Everything here runs in the thread that the link belongs to.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

from kv_transfer.tcp.steps import Conversation, Outcome, Step
from protocol.errors import ChannelLost, KVFerryError

CALLS_PER_TURN = 8
"""System calls before the other connections of the thread get their turn."""

OnDone = Callable[[KVFerryError | None, bool], None]
"""Called with the conversation's error, if any, and whether the link lives on. No error on a dead link: the link had
been closed before the conversation began, and nothing was sent."""

log = logging.getLogger(__name__)


class Watch(Protocol):
    """What a link needs of its thread: to have ``Link.ready`` called. Every selector is one."""

    def register(self, fileobj: socket.socket, events: int, data: Link, /) -> object:
        """Begin to watch for ``events``."""

    def modify(self, fileobj: socket.socket, events: int, data: Link, /) -> object:
        """Watch for ``events`` from now on."""

    def unregister(self, fileobj: socket.socket, /) -> object:
        """Watch no more."""


class Link:
    """A socket and the conversation on it.

    Args:
        connection: non-blocking; the link closes it.
        selector: of the link's thread.
        on_closed: called once, when the socket has been closed.
    """

    def __init__(self, connection: socket.socket, selector: Watch, on_closed: Callable[[Link], None]) -> None:
        self._connection = connection
        self._selector = selector
        self._on_closed = on_closed
        self._conversation: Conversation | None = None
        self._on_done: OnDone | None = None
        self._step: Step | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._interest = selectors.EVENT_READ
        self._greeted = False
        self.deadline: float | None = None
        self.closed = False
        selector.register(connection, self._interest, self)

    def begin(self, conversation: Conversation, on_done: OnDone) -> None:
        """Hold a conversation on the idle link; ``on_done`` is called exactly once."""
        if self._greeted and not self.closed and self._hung_up():
            self.close(ChannelLost("the peer closed the connection"))
        if self.closed:
            conversation.close()
            on_done(None, False)
            return
        assert self._conversation is None, "one conversation at a time"
        self._conversation, self._on_done = conversation, on_done
        self._resume(None)
        if self._step is not None:
            self._go_on(0)

    def ready(self, events: int) -> None:
        """Go on as far as the socket allows; ``events`` are known to hold."""
        if self._step is not None:
            self._go_on(events)
        elif not self.closed:
            # Nobody speaks on an idle link: this is the end of it, or a peer that lost count.
            self.close(ChannelLost("the peer closed the connection"))

    def _go_on(self, events: int) -> None:
        for _ in range(CALLS_PER_TURN):
            step = self._step
            if step is None:
                break
            try:
                outcome = step.perform(self._connection, events)
            except (OSError, ChannelLost) as error:
                self.close(_lost(error))
                return
            if outcome is Outcome.BLOCKED:
                break
            self._refresh(step)
            if outcome is not Outcome.AGAIN:
                events = 0
                self._resume(outcome is Outcome.DONE)
        self._watch()

    def _hung_up(self) -> bool:
        # The peer may have closed an idle connection a moment ago, and the selector not told yet.
        # Nothing but its end can have come on an idle one.
        return bool(self._poll.poll(0))

    def expire(self, now: float) -> None:
        """Close if the step's time without progress is over."""
        if self.deadline is not None and now > self.deadline and self._step is not None:
            self.close(ChannelLost(f"no progress for {self._step.timeout} seconds"))

    def close(self, error: KVFerryError) -> None:
        """End the conversation with ``error`` and close the socket; may be called more than once."""
        if self.closed:
            return
        self.closed = True
        self.deadline = None
        self._selector.unregister(self._connection)
        conversation, self._conversation, self._step = self._conversation, None, None
        if conversation is not None:
            try:
                conversation.throw(error)
            except KVFerryError as raised:
                error = _bare(raised)
            except StopIteration:
                pass
            finally:
                conversation.close()
        self._connection.close()
        self._done(error)
        self._on_closed(self)

    def _resume(self, result: bool | None) -> None:
        assert self._conversation is not None
        try:
            self._step = next(self._conversation) if result is None else self._conversation.send(result)
        except StopIteration as stop:
            self._conversation = self._step = self.deadline = None
            self._greeted = True
            self._done(stop.value)
        except KVFerryError as error:
            self._conversation = self._step = None
            self.close(_bare(error))
        except Exception as error:
            # A fault of ours must cost this connection alone, not the thread and every other transfer with it.
            log.exception("conversation failed")
            self._conversation = self._step = None
            self.close(ChannelLost(f"internal fault: {error}"))
        else:
            self._refresh(self._step)

    def _done(self, error: KVFerryError | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(error, not self.closed)

    def _refresh(self, step: Step) -> None:
        self.deadline = None if step.timeout is None else min(time.monotonic() + step.timeout, step.until)

    def _watch(self) -> None:
        interest = selectors.EVENT_READ if self._step is None else self._step.interest
        if not self.closed and interest != self._interest:
            self._interest = interest
            self._selector.modify(self._connection, interest, self)


def _bare(error: KVFerryError) -> KVFerryError:
    # The frames in a traceback hold views of pool memory, and would outlive the connection with it.
    return error.with_traceback(None)


def _lost(error: OSError | ChannelLost) -> KVFerryError:
    if isinstance(error, ChannelLost):
        return _bare(error)
    reason = os.strerror(error.errno) if error.errno else str(error)
    lost = ChannelLost(f"connection lost: {reason}")
    lost.__cause__ = error.with_traceback(None)
    return lost
