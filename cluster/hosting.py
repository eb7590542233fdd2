"""Runs one service (a router or a worker) on an event loop of its own, in a thread of its own.

Life cycle: made, :meth:`Host.begin` starts the thread, and the service comes up with nobody calling; :meth:`Host.stop`
ends it, and :meth:`Host.drain` lets it end once it has finished what it has. With :meth:`Host.switch` another service
comes up in its place then. One that has drained is reported to ``on_left``, one that fails after it was ready to
``on_fatal``::

    STARTING -came_up-> READY -stop or drained-> STOPPING -ended-> STOPPED
    STARTING -failed-> FAILED        READY -failed-> FAILED
    READY -changed-> STARTING        drained, and another is to follow
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol, TypeVar

from cluster.event_loop import new_loop
from cluster.phases import Phase, PhaseClock
from protocol.errors import KVFerryError, StartFailed
from protocol.transitions import TransitionTable

T = TypeVar("T")

StartProgress = Callable[[str, float], None]


class Service(Protocol):
    """What a host runs; all of it is called on the host's loop."""

    async def start(self, progress: StartProgress | None = None) -> None:
        """Come up; return when ready."""

    async def stop(self) -> None:
        """End, giving everything back; harmless when it never came up."""

    async def wait(self) -> None:
        """Return when stopped, or drained; raise what ended it before that."""

    def drain(self, timeout: float) -> None:
        """Take no new work, and end :meth:`wait` once all that there is has been finished or given back."""


class HostState(Enum):
    """Where a hosted service stands."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class HostEvent(Enum):
    """What happens to a hosted service."""

    CAME_UP = "came up"
    FAILED = "failed"
    CHANGED = "changed"
    STOP = "stop"
    ENDED = "ended"


HOST_TABLE: TransitionTable[HostState, HostEvent] = TransitionTable(
    "host",
    HostState.STARTING,
    {
        (HostState.STARTING, HostEvent.CAME_UP): HostState.READY,
        (HostState.STARTING, HostEvent.FAILED): HostState.FAILED,
        (HostState.STARTING, HostEvent.STOP): HostState.STOPPING,
        (HostState.READY, HostEvent.FAILED): HostState.FAILED,
        (HostState.READY, HostEvent.CHANGED): HostState.STARTING,
        (HostState.READY, HostEvent.STOP): HostState.STOPPING,
        (HostState.STOPPING, HostEvent.ENDED): HostState.STOPPED,
        (HostState.FAILED, HostEvent.STOP): HostState.STOPPING,
    },
)


class Host:
    """One service after the other, and their loop.

    Args:
        name: of the thread, and in messages.
        make: makes the service; called in the thread, and may block.
        on_up: called, in the thread, when a service has come up.
        on_fatal: called, in the thread, when a service that was ready fails.
        on_left: called, in the thread, when a service that was to drain has ended.

    Attributes:
        service: the present one, once made.
        stage, fraction: how far it has come up.
        error: why it failed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Service],
        *,
        on_up: Callable[[], None] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.service: Service | None = None
        self.stage, self.fraction, self.error = "placed", 0.0, ""
        self._make, self._on_up, self._on_fatal, self._on_left = make, on_up, on_fatal, on_left
        self._drained = False
        self._successor: tuple[Callable[[], Service], float] | None = None
        self._tracker = HOST_TABLE.start(name)
        self._clock = PhaseClock("thread", time.monotonic())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_to_stop = asyncio.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def state(self) -> HostState:
        """Where the service stands."""
        return self._tracker.state

    @property
    def phases(self) -> tuple[Phase, ...]:
        """How long each phase of the service's coming up took; those that are over."""
        return self._clock.phases

    def begin(self) -> None:
        """Start the thread."""
        self._loop = new_loop()
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ask the service to end and wait for the thread; callable from any other thread, more than once.

        Raises:
            StartFailed: it did not end within ``timeout`` seconds.
        """
        self.ask_to_stop()
        if self._thread.ident is not None and not self._ended.wait(timeout):
            raise StartFailed(f"{self.name} did not stop within {timeout:g} s")

    def ask_to_stop(self) -> None:
        """Ask the service to end, without waiting."""
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._asked_to_stop.set)

    def drain(self, timeout: float) -> None:
        """Let the service finish what it has and leave; one that is not ready leaves at once.

        Args:
            timeout: seconds after which the service gives back what it has not finished.
        """
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._drain, timeout)

    def switch(self, make: Callable[[], Service], timeout: float) -> None:
        """Let the service finish what it has, and another come up in its place; not if it is asked to leave meanwhile.

        Args:
            make: makes the other; called in the thread, once the first has given everything back.
            timeout: seconds after which the first gives back what it has not finished.
        """
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._switch, make, timeout)

    async def call(self, work: Callable[[Any], T]) -> T:
        """``work(service)``, run on the service's loop; awaited from another loop.

        Raises:
            KVFerryError: the service is not ready.
        """
        if self._loop is None or self.state is not HostState.READY:
            raise KVFerryError(f"{self.name} is {self.state.value}")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work(self.service))
            except BaseException as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return await asyncio.wrap_future(answer)

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._ended.set()

    async def _main(self) -> None:
        stop = asyncio.create_task(self._asked_to_stop.wait())
        try:
            while await self._come_up(stop) and await self._serve(stop) and await self._change():
                pass
            if not self._drained:
                await stop
            self._tracker.move(HostEvent.STOP)
            if self.service is not None:
                await self.service.stop()
            self._tracker.move(HostEvent.ENDED)
        finally:
            stop.cancel()
        if self._drained and self._on_left is not None:
            self._on_left()

    def _switch(self, make: Callable[[], Service], timeout: float) -> None:
        self._successor = make, timeout
        if self.state is HostState.READY:
            assert self.service is not None
            self.service.drain(timeout)

    async def _change(self) -> bool:
        """End the service, so that its successor can be made; whether that was possible."""
        assert self.service is not None
        assert self._successor is not None
        # From here on who is to leave is a successor that has not come up. Of the first one nothing is kept: its
        # successor needs the room.
        service, self.service = self.service, None
        (self._make, _), self._successor = self._successor, None
        self._clock = PhaseClock("change", time.monotonic())
        self.stage, self.fraction = "change", 0.0
        self._tracker.move(HostEvent.CHANGED)
        try:
            await service.stop()
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _drain(self, timeout: float) -> None:
        self._successor = None
        if self.state is HostState.READY:
            assert self.service is not None
            self.service.drain(timeout)
        else:
            self._drained = True
            self._asked_to_stop.set()

    async def _come_up(self, stop: asyncio.Task[bool]) -> bool:
        error = await self._try(stop)
        if error is not None:
            self.error = describe(error)
            self._tracker.move(HostEvent.FAILED)
            return False
        if stop.done():
            return False
        if self._on_up is not None:
            self._on_up()
        self._clock.end(time.monotonic())
        self.stage, self.fraction = "ready", 1.0
        self._tracker.move(HostEvent.CAME_UP)
        if self._successor is not None:  # asked for while this one came up
            self._switch(*self._successor)
        return True

    async def _try(self, stop: asyncio.Task[bool]) -> BaseException | None:
        """Why the service did not come up; None when it did, or when it shall stop."""
        assert self._loop is not None
        try:
            self._progress("imports", 0.0)
            self.service = await self._loop.run_in_executor(None, self._make)
            start = asyncio.create_task(self.service.start(self._progress))
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                await asyncio.wait([start])
                return None
            await start
        except Exception as error:
            return error
        return None

    async def _serve(self, stop: asyncio.Task[bool]) -> bool:
        """Until the service has ended; whether another follows."""
        assert self.service is not None
        running = asyncio.create_task(self.service.wait())
        await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
            return False
        error = running.exception()
        if error is not None:
            self._fail(error)
            return False
        self._drained = self._successor is None
        return not self._drained

    def _fail(self, error: BaseException) -> None:
        """A service that was ready has failed."""
        self.error = describe(error)
        self._tracker.move(HostEvent.FAILED)
        if self._on_fatal is not None:
            self._on_fatal(error)

    def _progress(self, stage: str, fraction: float) -> None:
        # From one thread at a time: what is loading, or the loop that waits for it.
        self._clock.enter(stage, time.monotonic())
        self.stage, self.fraction = stage, fraction


def describe(error: BaseException) -> str:
    """One line about an error; an error of the tree speaks for itself, another one is named."""
    if isinstance(error, KVFerryError):
        return f"{error.code}: {error.message}"
    return f"{type(error).__name__}: {error}"
