"""The hello of :mod:`kv_transfer.hello` on one of asyncio's connections."""

from __future__ import annotations

import asyncio

from kv_transfer.carried import wire
from kv_transfer.hello import Party, Talk
from kv_transfer.transport import TransportConfig


def party(scheme: str, config: TransportConfig) -> Party:
    """This end, as it introduces itself."""
    return Party(scheme, wire.VERSIONS, config)


async def hold(talk: Talk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """One side of a hello; returns the peer's name.

    Raises:
        KVFerryError: what the hello ends with.
        OSError, asyncio.IncompleteReadError: the connection is lost.
    """
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
