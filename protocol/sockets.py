"""ZeroMQ sockets of the request plane, with the options that every process sets alike.

Every router binds one ROUTER socket and every worker connects a DEALER to it, so a worker that comes back, on whatever
address, is known at its first heartbeat. Every prefill worker binds one more ROUTER socket, and decode workers connect
to that.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import MAX_FRAME_BYTES, OLDEST, SPOKEN, VERSION, decode, encode
from protocol.connections import RECONNECT_AFTER, Connections
from protocol.curve import CurveKeys
from protocol.errors import AuthenticationFailed, ConfigError, MalformedFrame, StartFailed, VersionMismatch
from protocol.ids import Peer
from protocol.loop_socket import LoopSocket
from protocol.messages import Envelope, Message

HIGH_WATER_MARK = 100_000
"""Frames queued for one peer before a send is refused; a peer that is that far behind is dead to us."""
MAX_BEHIND = 4096
"""Peers of an older version that a hub remembers; to one that it has forgotten it speaks its own."""
COMES, GOES = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
"""What a hub is told of its connections."""
REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


def _options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, round(RECONNECT_AFTER * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, 0)


def _news(context: zmq.asyncio.Context, socket: zmq.Socket[bytes], events: int) -> zmq.asyncio.Socket:
    """Where libzmq tells of a socket's connections."""
    endpoint = f"inproc://connections-of-{int(socket.FD)}"
    news: zmq.asyncio.Socket = context.socket(zmq.PAIR)
    # Without a bound: libzmq's own thread would wait for us where one is reached.
    news.setsockopt(zmq.RCVHWM, 0)
    socket.monitor(endpoint, events)
    news.connect(endpoint)
    return news


def _close(socket: LoopSocket, news: zmq.asyncio.Socket | None) -> None:
    if news is not None and not socket.raw.closed:
        socket.raw.monitor(None, 0)
        news.close(linger=0)
    socket.close()


def _common(envelope: Envelope) -> int:
    """What its sender is to be answered in."""
    common = SPOKEN.common(envelope.speaks)
    if common is None:
        raise MalformedFrame(f"a frame of {envelope.sender}, which says that it speaks wire version {envelope.speaks}")
    return common


class Hub:
    """A bound ROUTER socket: many peers, each known by the identity it connected with.

    Life cycle: made bound, :meth:`receive` (and :meth:`left`) in a loop, :meth:`send` at will, :meth:`close` once.

    Args:
        keys: that every peer must have; None hears everybody.
        watched: for :meth:`left`, which must then be called in a loop.

    Attributes:
        renewed: whether the frame that was received last is the first over a connection that took the place of another
            one of the same peer; what was on its way over that one may be lost. Of a watched hub.

    Raises:
        StartFailed: the address cannot be bound; names it.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        me: Peer,
        bind: str,
        *,
        keys: CurveKeys | None = None,
        watched: bool = False,
    ) -> None:
        self.me = me
        self.renewed = False
        self._socket = LoopSocket(context, zmq.ROUTER)
        raw = self._socket.raw
        _options(raw)
        if keys is not None:
            keys.guard(raw)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects under its old identity takes it over from the dead connection.
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._behind: dict[bytes, int] = {}
        self._connections = Connections()
        self._news = _news(context, raw, COMES | GOES) if watched else None
        try:
            raw.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise StartFailed(f"{me.name} cannot bind {bind}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound address, with the port that was really taken."""
        return self._socket.raw.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, Envelope]:
        """The next ``(identity, envelope)``.

        Raises:
            ProtocolError: a frame that does not decode; the next call goes on with the next frame.
        """
        self.renewed = False
        while True:
            if not self._connections.nameless:
                parts = self._socket.take()
                if parts is not None:
                    return parts[0], self._heard(parts[0], parts[-1])
            else:
                frames = self._socket.take_frames()
                if frames is not None:
                    identity, last = frames[0].bytes, frames[-1]
                    self.renewed = self._connections.named(int(last.get(zmq.SRCFD)), identity)
                    return identity, self._heard(identity, last.bytes)
            await self._socket.came()

    def _heard(self, identity: bytes, frame: bytes) -> Envelope:
        try:
            envelope = decode(frame)
        except VersionMismatch as error:
            raise VersionMismatch(f"{identity.decode(errors='replace')}: {error.message}") from error
        version = _common(envelope)
        if self._behind.get(identity, VERSION) != version:
            if len(self._behind) >= MAX_BEHIND:
                del self._behind[next(iter(self._behind))]
            self._behind[identity] = version
        return envelope

    async def left(self) -> bytes:
        """The identity of the next peer whose connection has ended, as its process's death ends it.

        It may come back by a new one. A peer that was never heard, or that stopped without a word, does not show here.
        """
        assert self._news is not None, "made to be watched"
        while True:
            told = parse_monitor_message(await self._news.recv_multipart())
            if told["event"] & COMES:
                self._connections.accepted(told["value"])
            else:
                identity = self._connections.ended(told["value"])
                if identity is not None:
                    return identity

    def send(self, identity: bytes, body: Message) -> bool:
        """Queue ``body`` for a peer; False when it is gone, too far behind or of too old a version. Never blocks."""
        try:
            frame = encode(self.me, body, self._behind.get(identity, VERSION))
        except VersionMismatch:
            return False
        return self._socket.give((identity, frame))

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        _close(self._socket, self._news)


class Spoke:
    """A connected DEALER socket: one peer, whoever answers at that address.

    Life cycle: as :class:`Hub`, connected in place of bound.

    Args:
        keys: that the peer must have; None speaks to everybody.
        watched: for :meth:`connected`, which must then be called in a loop.

    Attributes:
        up: whether there is a connection, as far as :meth:`connected` has been told. What is sent while there is none
            waits for the next one.

    Raises:
        ConfigError: ``endpoint`` is no address; names it.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        me: Peer,
        endpoint: str,
        *,
        keys: CurveKeys | None = None,
        watched: bool = False,
    ) -> None:
        self.me = me
        self.endpoint = endpoint
        self.up = False
        self._version = OLDEST
        self._socket = LoopSocket(context, zmq.DEALER)
        raw = self._socket.raw
        _options(raw)
        # A half-open connection must be noticed, or a re-started peer on the same address stays unreachable. Only this
        # side asks; the hub closes a connection that has not asked for so long. A hub that asked too would end its
        # process: libzmq asserts when the time comes to ask a peer that left while its queue here was full.
        raw.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        raw.setsockopt(zmq.HEARTBEAT_TTL, 5000)
        raw.setsockopt(zmq.IDENTITY, str(me).encode())
        if keys is not None:
            keys.present(raw)
        self._news = _news(context, raw, zmq.Event.HANDSHAKE_SUCCEEDED | GOES | REFUSED) if watched else None
        try:
            raw.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint must be an address, got {endpoint!r}: {error}", field="endpoint") from error

    async def receive(self) -> Envelope:
        """The next envelope.

        Raises:
            ProtocolError: a frame that does not decode.
        """
        while (parts := self._socket.take()) is None:
            await self._socket.came()
        envelope = decode(parts[-1])
        self._version = _common(envelope)
        return envelope

    async def connected(self) -> None:
        """Return when a connection has been made: the first, or one after the other was lost.

        Raises:
            AuthenticationFailed: whoever answers is none of this cluster; the next call goes on.
        """
        assert self._news is not None, "made to be watched"
        while True:
            told = parse_monitor_message(await self._news.recv_multipart())
            self.up = bool(told["event"] & zmq.Event.HANDSHAKE_SUCCEEDED)
            if told["event"] & REFUSED:
                raise AuthenticationFailed(f"{self.endpoint} does not speak with us: it has another secret, or none")
            if self.up:
                break
        # It may be another process now, of the release before.
        self._version = OLDEST

    async def reached(self, refused: Callable[[AuthenticationFailed], None]) -> None:
        """As :meth:`connected`, however often it is refused before: it is tried for ever, and told of once."""
        told = False
        while True:
            try:
                await self.connected()
            except AuthenticationFailed as error:
                if not told:
                    refused(error)
                told = True
            else:
                return

    def send(self, body: Message) -> bool:
        """Queue ``body``; False when the peer is too far behind, or of too old a version. Never blocks."""
        try:
            frame = encode(self.me, body, self._version)
        except VersionMismatch:
            return False
        return self._socket.give((frame,))

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        _close(self._socket, self._news)
