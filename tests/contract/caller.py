"""A raw connection to a receiver of any transport, as strangers and liars make them."""

import asyncio
import os
import socket
from types import ModuleType

from engine.shared_memory import allocate
from kv_transfer import hello
from kv_transfer.carried import wire as carried_wire
from kv_transfer.hello import Party
from kv_transfer.shm import endpoint, sealed
from kv_transfer.shm import wire as shm_wire
from kv_transfer.shm.ledger import SenderLedger
from kv_transfer.tcp import wire as tcp_wire
from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig, scheme_of
from kv_transfer.ucx import wire as ucx_wire
from kv_transfer.ucx.library import library

WIRE: dict[str, ModuleType] = {
    "shm": shm_wire,
    "tcp": tcp_wire,
    "ucx": ucx_wire,
    "ucxx": carried_wire,
    "nixl": carried_wire,
}
NETWORKED = tuple(WIRE)
"""Schemes whose connections begin with the hello."""
PATIENCE = 10
POOL_BYTES = 4 << 12


def party(scheme: str, config: TransportConfig | None = None) -> Party:
    wire = WIRE[scheme]
    return Party(scheme, (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), config or TransportConfig())


def hello_of(scheme: str, config: TransportConfig | None = None) -> bytes:
    return party(scheme, config).hello()


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str) -> "Caller":
        if scheme_of(address) == "shm":
            return cls(*await asyncio.open_unix_connection(sock=endpoint.connect(address)))
        return cls(*await asyncio.open_connection(*parse("tcp" + address.removeprefix(scheme_of(address)))))

    def say(self, words: bytes) -> None:
        self.writer.write(words)

    async def hear(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), PATIENCE)

    async def hold(self, talk: hello.Talk) -> hello.Met:
        """One side of the hello, to its end."""
        heard: bytes | None = None
        while True:
            try:
                asked = next(talk) if heard is None else talk.send(heard)
            except StopIteration as end:
                met: hello.Met = end.value
                return met
            heard = b""
            if isinstance(asked, int):
                heard = await self.hear(asked)
            else:
                self.say(asked)

    async def rest(self) -> bytes:
        """All that comes until the other end hangs up."""
        heard = b""
        try:
            while piece := await asyncio.wait_for(self.reader.read(4096), PATIENCE):
                heard += piece
        except (ConnectionResetError, BrokenPipeError):
            pass  # the second where we spoke as it hung up
        self.hang_up()
        return heard

    def hang_up(self) -> None:
        self.writer.transport.abort()


async def called(address: str, config: TransportConfig | None = None) -> Caller:
    """A caller that has passed the hello."""
    caller = await Caller.dial(address)
    await caller.hold(hello.greet(party(scheme_of(address), config)))
    return caller


async def announcing(address: str) -> Caller:
    """A caller that may announce parts now, to a receiver without a secret."""
    match scheme_of(address):
        case "tcp":
            return await called(address)
        case "ucx":
            caller = await called(address)
            caller.say(
                ucx_wire.pack_worker(ucx_wire.Worker(ucx_wire.ucx_release(library().version), b"not an address"))
            )
            await ucx_wire.read_worker(caller.reader)
            return caller
    connection = endpoint.connect(address)
    connection.settimeout(PATIENCE)
    connection.sendall(hello_of("shm"))
    assert connection.recv(99) == hello_of("shm")
    memory, pool = allocate(POOL_BYTES)
    ledger = SenderLedger()
    own = sealed.reopen(ledger.descriptor, writable=True)
    socket.send_fds(connection, [shm_wire.pack_offer(POOL_BYTES)], [pool, own])
    for descriptor in (own, pool):
        os.close(descriptor)
    ledger.close()
    memory.release()
    assert connection.recv(99) == shm_wire.pack_welcome(None)
    connection.setblocking(False)
    return Caller(*await asyncio.open_unix_connection(sock=connection))
