"""ZeroMQ sockets of the request plane, with the options that every process sets alike.

Every router binds one ROUTER socket and every worker connects a DEALER to it, so a worker that comes back, on whatever
address, is known at its first heartbeat. Every prefill worker binds one more ROUTER socket, and decode workers connect
to that.
"""

from __future__ import annotations

import asyncio
from typing import cast

import zmq
import zmq.asyncio

from protocol.codec import MAX_FRAME_BYTES, decode, encode
from protocol.errors import ConfigError, StartFailed
from protocol.ids import Peer
from protocol.messages import Envelope, Message

HIGH_WATER_MARK = 100_000
"""Frames queued for one peer before a send is refused; a peer that is that far behind is dead to us."""


def _options(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, 0)


def _queued(sent: object) -> None:
    # With DONTWAIT pyzmq completes the future before it returns it, so its result, or its error, is there now.
    cast("asyncio.Future[object]", sent).result()


class Hub:
    """A bound ROUTER socket: many peers, each known by the identity it connected with.

    Life cycle: made bound, :meth:`receive` in a loop, :meth:`send` at will, :meth:`close` once.

    Raises:
        StartFailed: the address cannot be bound; names it.
    """

    def __init__(self, context: zmq.asyncio.Context, me: Peer, bind: str) -> None:
        self.me = me
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        _options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects under its old identity takes it over from the dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise StartFailed(f"{me.name} cannot bind {bind}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound address, with the port that was really taken."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, Envelope]:
        """The next ``(identity, envelope)``.

        Raises:
            ProtocolError: a frame that does not decode; the next call goes on with the next frame.
        """
        parts = await self._socket.recv_multipart()
        return parts[0], decode(parts[-1])

    def send(self, identity: bytes, body: Message) -> bool:
        """Queue ``body`` for a peer; False when it is gone or too far behind. Never blocks."""
        try:
            _queued(self._socket.send_multipart((identity, encode(self.me, body)), flags=zmq.DONTWAIT))
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        self._socket.close(linger=0)


class Spoke:
    """A connected DEALER socket: one peer, whoever answers at that address.

    Life cycle: as :class:`Hub`, connected in place of bound.

    Raises:
        ConfigError: ``endpoint`` is no address; names it.
    """

    def __init__(self, context: zmq.asyncio.Context, me: Peer, endpoint: str) -> None:
        self.me = me
        self.endpoint = endpoint
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        _options(self._socket)
        # A half-open connection must be noticed, or a re-started peer on the same address stays unreachable. Only this
        # side asks; the hub closes a connection that has not asked for so long. A hub that asked too would end its
        # process: libzmq asserts when the time comes to ask a peer that left while its queue here was full.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, 5000)
        self._socket.setsockopt(zmq.IDENTITY, str(me).encode())
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(f"endpoint must be an address, got {endpoint!r}: {error}", field="endpoint") from error

    async def receive(self) -> Envelope:
        """The next envelope.

        Raises:
            ProtocolError: a frame that does not decode.
        """
        return decode(await self._socket.recv())

    def send(self, body: Message) -> bool:
        """Queue ``body``; False when the peer is too far behind. Never blocks."""
        try:
            _queued(self._socket.send(encode(self.me, body), flags=zmq.DONTWAIT))
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        self._socket.close(linger=0)
