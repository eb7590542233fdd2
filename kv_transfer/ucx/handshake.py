"""The hello of :mod:`kv_transfer.hello` on a channel's TCP connection, and the exchange of UCX addresses after it."""

from __future__ import annotations

import asyncio

from kv_transfer import hello
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import wire
from kv_transfer.ucx.channel import Channel


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: TransportConfig) -> str:
    """The sender's side; returns the peer's name. Errors as :func:`kv_transfer.hello.greet`."""
    return await _held(hello.greet(_party(config)), reader, writer)


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: TransportConfig) -> str:
    """The receiver's side; returns the peer's name. Errors as :func:`kv_transfer.hello.admit`."""
    return await _held(hello.admit(_party(config)), reader, writer)


def own_worker(channel: Channel, version: str) -> wire.Worker:
    """How this end introduces its worker, given UCX's version string."""
    return wire.Worker(wire.ucx_release(version), channel.address())


def _party(config: TransportConfig) -> hello.Party:
    return hello.Party("ucx", (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), config)


async def _held(talk: hello.Talk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    heard: bytes | None = None
    while True:
        try:
            asked = next(talk) if heard is None else talk.send(heard)
        except StopIteration as end:
            return str(end.value)
        if isinstance(asked, int):
            heard = await reader.readexactly(asked)
        else:
            writer.write(asked)
            heard = b""
