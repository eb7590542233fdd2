"""The hello of :mod:`kv_transfer.hello` on a connection of the TCP transport, as steps of a conversation."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from kv_transfer import hello
from kv_transfer.tcp import wire
from kv_transfer.tcp.steps import Connected, Conversation, Cursor, Fill, Inbox, Read, Step, Write
from kv_transfer.transport import TransportConfig


def greet(config: TransportConfig) -> Conversation:
    """The sender's side, from the connect on; errors as :func:`kv_transfer.hello.greet`.

    Raises:
        ChannelLost: there is no connection, or it took longer than the time limit.
    """
    yield Connected(timeout=config.timeout)

    def read(size: int, until: float) -> Generator[Step, bool, bytes]:
        buffer = bytearray(size)
        yield _by(until, Read(Cursor([memoryview(buffer)]), timeout=config.timeout))
        return bytes(buffer)

    yield from _held(hello.greet(_party(config)), read, config)
    return None


def admit(inbox: Inbox, config: TransportConfig) -> Generator[Step, bool, str]:
    """The receiver's side; returns the peer's name. Errors as :func:`kv_transfer.hello.admit`.

    Raises:
        ChannelLost: the peer went away, or the whole of it took longer than the time limit.
    """

    def read(size: int, until: float) -> Generator[Step, bool, bytes]:
        if inbox.held < size:
            yield _by(until, Fill(inbox, size, timeout=config.timeout))
        return bytes(inbox.take(size))

    met = yield from _held(hello.admit(_party(config)), read, config)
    return met.name


def _party(config: TransportConfig) -> hello.Party:
    return hello.Party("tcp", (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), config)


def _held(
    talk: hello.Talk, read: Callable[[int, float], Generator[Step, bool, bytes]], config: TransportConfig
) -> Generator[Step, bool, hello.Met]:
    until = time.monotonic() + config.timeout
    heard: bytes | None = None
    while True:
        try:
            asked = next(talk) if heard is None else talk.send(heard)
        except StopIteration as end:
            met: hello.Met = end.value
            return met
        if isinstance(asked, int):
            heard = yield from read(asked, until)
        else:
            yield _by(until, Write(Cursor([memoryview(asked)]), timeout=config.timeout))
            heard = b""


def _by(until: float, step: Step) -> Step:
    step.until = until
    return step
