"""A worker's end of the request plane: one connection per router, heartbeats, and who asked for what.

Life cycle: made, :meth:`WorkerLink.start` once, messages come to the callback and go out by :meth:`WorkerLink.send`,
:meth:`WorkerLink.close` once. A router that starts again at the same address is seen by its new incarnation; what its
former life had asked for is reported through ``on_router_lost``. What a worker tells of its prefix cache goes from here
by itself, to the routers that follow it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq.asyncio

from protocol.connections import RECONNECT_AFTER
from protocol.curve import CurveKeys
from protocol.errors import ProtocolError
from protocol.ids import Peer
from protocol.kv_events import KVFollow
from protocol.kv_publisher import KVPublisher
from protocol.loops import Loops
from protocol.messages import Heartbeat, Message
from protocol.sockets import Spoke
from protocol.worker_watch import WorkerWatch

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats of a worker."""
PUBLISH_INTERVAL = 0.1
"""Seconds between two looks at what has changed in the prefix cache."""

logger = logging.getLogger(__name__)


class WorkerLink:
    """The routers that a worker serves, and those that may come.

    Args:
        context: of the process's ZeroMQ sockets.
        me: this worker's name and incarnation.
        routers: hub endpoints of every router; there need not be one at each.
        heartbeat: gives the current heartbeat.
        on_message: called with ``(router, message)`` for each message.
        on_router_lost: called with the former incarnation of a router that started again.
        publisher: of the worker's prefix cache.
        keys: that every router must have; None serves any.
        watch: sees what goes by; nobody does by default.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        me: Peer,
        routers: Iterable[str],
        *,
        heartbeat: Callable[[], Heartbeat],
        on_message: Callable[[Peer, Message], None],
        on_router_lost: Callable[[Peer], None],
        publisher: KVPublisher,
        keys: CurveKeys | None = None,
        watch: WorkerWatch | None = None,
    ) -> None:
        self._spokes = [Spoke(context, me, endpoint, keys=keys, watched=True) for endpoint in routers]
        self._heartbeat = heartbeat
        self._on_message = on_message
        self._on_router_lost = on_router_lost
        self._publisher = publisher
        self._watch = watch or WorkerWatch()
        self._peers: dict[Peer, Spoke] = {}
        self._loops = Loops()
        self.malformed_frames = 0

    def start(self) -> None:
        """Begin to receive and to send heartbeats."""
        for spoke in self._spokes:
            self._loops.start(f"router-link {spoke.endpoint}", self._receive(spoke))
            self._loops.start(f"router-return {spoke.endpoint}", self._greet(spoke))
        self._loops.start("heartbeat", self._beat())
        self._loops.start("kv-events", self._publish())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The loops that must run for as long as the worker serves."""
        return self._loops.tasks

    def send(self, router: Peer, message: Message) -> bool:
        """Send to the router that asked; False when that life of it is over or it is too far behind."""
        spoke = self._peers.get(router)
        self._watch.sent(router, message)
        return spoke is not None and spoke.send(message)

    def announce(self) -> None:
        """Send a heartbeat to every router that is there now; one that comes is sent one at once."""
        message = self._sign_of_life()
        for spoke in self._spokes:
            if spoke.up:  # else they would pile up, and a router that comes back after a night read all of them
                spoke.send(message)

    def _sign_of_life(self) -> Heartbeat:
        # What has changed goes first, so that the number in the heartbeat is that of the last events sent.
        self._tell_changes()
        beat = self._heartbeat()
        return msgspec.structs.replace(beat, load=self._watch.told(beat.load), kv_sequence=self._publisher.sequence)

    def _tell_changes(self) -> None:
        followers = self._publisher.followers(time.monotonic())
        for events in self._publisher.flush():
            for spoke in self._spokes:
                if spoke.endpoint in followers:
                    spoke.send(events)

    async def _publish(self) -> None:
        while True:
            self._tell_changes()
            await asyncio.sleep(PUBLISH_INTERVAL)

    async def close(self) -> None:
        """Stop and close every connection."""
        await self._loops.stop()
        for spoke in self._spokes:
            spoke.close()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    async def _greet(self, spoke: Spoke) -> None:
        while True:
            await spoke.reached(lambda error: logger.warning("%s", error))
            # The router has seen the end of the former connection, and waits but shortly for a sign of life.
            spoke.send(self._sign_of_life())
            # Where the router reads of the end and of this sign in one go, it takes it for one of before the end.
            await asyncio.sleep(2 * RECONNECT_AFTER)
            spoke.send(self._sign_of_life())

    async def _receive(self, spoke: Spoke) -> None:
        while True:
            try:
                envelope = await spoke.receive()
            except ProtocolError as error:
                self.malformed_frames += 1
                logger.warning("refused a frame from router at %s: %s", spoke.endpoint, error)
                continue
            self._learn(envelope.sender, spoke)
            if isinstance(envelope.body, KVFollow):
                self._tell_changes()
                for page in self._publisher.follow(spoke.endpoint, envelope.body, time.monotonic()):
                    spoke.send(page)
                continue
            self._watch.received(envelope.sender, envelope.body)
            self._on_message(envelope.sender, envelope.body)

    def _learn(self, router: Peer, spoke: Spoke) -> None:
        if self._peers.get(router) is spoke:
            return
        former = [peer for peer, known in self._peers.items() if known is spoke]
        self._peers[router] = spoke
        if former:
            self._publisher.forget(spoke.endpoint)
        for peer in former:
            del self._peers[peer]
            logger.warning("router %s started again as %s", peer, router)
            self._on_router_lost(peer)
