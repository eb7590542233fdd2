"""The hello of :mod:`kv_transfer.hello` on a channel's TCP connection, and the exchange of UCX addresses after it."""

from __future__ import annotations

import asyncio

from kv_transfer import hello
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import wire
from kv_transfer.ucx.channel import Channel
from kv_transfer.ucx.library import Context


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: TransportConfig) -> hello.Met:
    """The sender's side. Errors as :func:`kv_transfer.hello.greet`."""
    return await held(hello.greet(_party(config)), reader, writer)


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: TransportConfig) -> hello.Met:
    """The receiver's side. Errors as :func:`kv_transfer.hello.admit`."""
    return await held(hello.admit(_party(config)), reader, writer)


def opened(context: Context, met: hello.Met) -> Channel:
    """A channel to whom we have met.

    UCX takes tagged messages from anybody who reaches the worker, so the first tag is one that a stranger cannot guess.

    Raises:
        ChannelLost: UCX has no room for one more.
    """
    return Channel(context, int.from_bytes(met.key[:8]))


def own_worker(channel: Channel, version: str) -> wire.Worker:
    """How this end introduces its worker, given UCX's version string."""
    return wire.Worker(wire.ucx_release(version), channel.address())


async def held(talk: hello.Talk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> hello.Met:
    """One side of a hello on one of asyncio's connections. Errors as those of the side."""
    heard: bytes | None = None
    while True:
        try:
            asked = next(talk) if heard is None else talk.send(heard)
        except StopIteration as end:
            met: hello.Met = end.value
            return met
        if isinstance(asked, int):
            heard = await reader.readexactly(asked)
        else:
            writer.write(asked)
            heard = b""


def _party(config: TransportConfig) -> hello.Party:
    return hello.Party("ucx", (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), config)
