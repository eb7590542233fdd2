"""The sending process's side of one transport under measurement.

Life cycle, of an :func:`opened` session: connected -> prepared on both sides, tried with one block -> rounds -> closed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cluster.bench import memory, plain_socket
from cluster.bench.block_table import Transfer
from cluster.bench.ending import to_the_end
from cluster.bench.endpoint import host_identity, ready_sender
from cluster.bench.far_end import GENERATION, checksum
from cluster.bench.message import (
    VERSION,
    Channel,
    Checksum,
    Close,
    Closed,
    Done,
    Failed,
    Open,
    Plain,
    Port,
    Prepare,
    Prepared,
    Request,
    Sum,
)
from cluster.bench.perftest import Perftest, find
from kv_transfer.span import Span
from kv_transfer.transport import TICKET_BYTES, Sender, TransportConfig
from protocol.errors import ConnectionFailed, IntegrityMismatch, KVFerryError, ProtocolError, error_from_code
from protocol.layout import KVLayout

CONNECT_SECONDS = 10.0
PREPARE_SECONDS = 120.0
"""A large pool's pages take a while to be made."""
CHECKED_BLOCKS = 256
"""Blocks of a transfer whose bytes are compared; more are taken evenly from all."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides prepare.

    Attributes:
        layout: of both pools.
        blocks: of either pool.
        config: of the transport's two ends.
        seed: of the pool's content.
    """

    layout: KVLayout
    blocks: int
    config: TransportConfig
    seed: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round's times.

    Attributes:
        seconds: of each transfer, from the first ship call to the last acknowledgement.
        wall: from the first transfer's start to the last one's end.
    """

    seconds: tuple[float, ...]
    wall: float


@asynccontextmanager
async def opened(host: str, port: int, scheme: str, setup: Setup) -> AsyncIterator[Session]:
    """A session that has shipped one block, with the process that listens at ``host:port``.

    Raises:
        ConnectionFailed: nobody answers there.
        KVFerryError: the transport does not work between the two; says why.
    """
    async with AsyncExitStack() as stack:
        channel = await _connected(host, port)
        stack.push_async_callback(channel.close)
        pool = stack.enter_context(memory.made_pool(setup.layout.pool_bytes(setup.blocks)))
        pattern = random.Random(setup.seed).randbytes(memory.PATTERN_BYTES)  # noqa: S311
        await asyncio.to_thread(memory.fill, pool.view, pattern)
        sender = ready_sender(scheme, pool, setup.config)

        async def end() -> None:
            await to_the_end(sender.close())

        stack.push_async_callback(end)
        wanted = Prepare(
            version=VERSION,
            scheme=scheme,
            block_bytes=setup.layout.block_bytes,
            blocks=setup.blocks,
            streams=setup.config.streams,
            timeout=setup.config.timeout,
            ucx_tls=setup.config.ucx_tls,
        )
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                prepared = await _ask(channel, wanted, Prepared)
        except TimeoutError as error:
            raise ConnectionFailed(f"{host}:{port} did not answer in {PREPARE_SECONDS:.0f} seconds") from error
        session = Session(channel, sender, pool.view, setup.layout, prepared)
        stack.push_async_callback(session.end_plain)
        stack.callback(session.end_copy)
        first = Span(0, 0, setup.layout.block_bytes)
        await session.ship_round([Transfer((0,), (0,), (((first,), (0,)),))], checked=True)
        yield session


class Session:
    """Both ends of one transport, ready."""

    def __init__(
        self, channel: Channel, sender: Sender, pool: memoryview, layout: KVLayout, prepared: Prepared
    ) -> None:
        self._channel = channel
        self._sender = sender
        self._pool = pool
        self._layout = layout
        self._address = prepared.address
        self._plain: socket.socket | None = None
        self._copies = ExitStack()
        self._copy_target = memoryview(b"")
        self._perftest: Perftest | None = None
        self.same_host = prepared.host == host_identity()

    async def ship_round(self, transfers: Sequence[Transfer], *, checked: bool = False) -> Round:
        """Ship all ``transfers`` at once, each through a window of its own; with ``checked`` compare what landed.

        Raises:
            TransferError: a ship failed.
            IntegrityMismatch: not all bytes landed, or other ones did.
        """
        tickets = tuple(secrets.token_bytes(TICKET_BYTES) for _ in transfers)
        blocks = tuple(transfer.target for transfer in transfers)
        await _ask(self._channel, Open(tickets=tickets, blocks=blocks, poison=checked), Done)
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(tickets, transfers, strict=True)
                ships = [group.create_task(self._ship(ticket, transfer)) for ticket, transfer in pairs]
        except* KVFerryError as errors:
            raise errors.exceptions[0] from None
        wall = time.perf_counter() - started
        expected = tuple(len(transfer.target) * self._layout.block_bytes for transfer in transfers)
        closed = await _ask(self._channel, Close(tickets=tickets, expected=expected), Closed)
        if closed.landed != expected:
            raise IntegrityMismatch(f"{closed.landed} bytes landed of {expected}")
        if checked:
            for transfer in transfers:
                await self._compare(transfer)
        return Round(tuple(ship.result() for ship in ships), wall)

    async def _ship(self, ticket: bytes, transfer: Transfer) -> float:
        started = time.perf_counter()
        for spans, targets in transfer.ships:
            named = [(target, GENERATION) for target in targets]
            await self._sender.ship(self._address, ticket, spans, named)
        return time.perf_counter() - started

    async def _compare(self, transfer: Transfer) -> None:
        step = -(-len(transfer.source) // CHECKED_BLOCKS)
        size = self._layout.block_bytes
        ours = [self._pool[block * size : (block + 1) * size] for block in transfer.source[::step]]
        there = await _ask(self._channel, Checksum(blocks=transfer.target[::step]), Sum)
        if there.crc != await asyncio.to_thread(checksum, ours):
            raise IntegrityMismatch("other bytes landed than were sent")

    async def begin_plain(self, transfers: Sequence[Transfer]) -> None:
        """Connect a plain socket for :meth:`plain_round` of these transfers."""
        await self.end_plain()
        spans = [span for transfer in transfers for span in transfer.spans()]
        wanted = Plain(offsets=tuple(span.target for span in spans), sizes=tuple(span.nbytes for span in spans))
        port = (await _ask(self._channel, wanted, Port)).port
        self._plain = await plain_socket.connect(self._channel.peer_host, port)

    async def plain_round(self, transfers: Sequence[Transfer]) -> float:
        """Seconds that the plain socket takes for the same bytes."""
        assert self._plain is not None, "begin_plain comes first"
        spans = [span for transfer in transfers for span in transfer.spans()]
        buffers = [self._pool[span.source : span.source + span.nbytes] for span in spans]
        return await plain_socket.ship(self._plain, buffers)

    async def end_plain(self) -> None:
        """Close the plain socket; may be called more than once."""
        plain, self._plain = self._plain, None
        if plain is not None:
            plain.close()

    async def begin_copy(self) -> None:
        """Make the second pool that :meth:`copy_round` copies to."""
        if not self._copy_target.nbytes:
            self._copy_target = self._copies.enter_context(memory.made_pool(self._pool.nbytes)).view
            await asyncio.to_thread(memory.fill, self._copy_target, b"\0" * memory.PATTERN_BYTES)

    def end_copy(self) -> None:
        """Let go of it; may be called more than once."""
        self._copy_target = memoryview(b"")
        self._copies.close()

    @property
    def perftest(self) -> Perftest:
        """UCX's own benchmark over TCP, which keeps what it found; there must be one."""
        if self._perftest is None:
            program = find()
            assert program is not None, "looked for before"
            self._perftest = Perftest(program, "tcp")
        return self._perftest

    async def copy_round(self, transfers: Sequence[Transfer]) -> float:
        """Seconds that one thread takes to copy the same spans within this process."""
        source, target = np.asarray(self._pool), np.asarray(self._copy_target)
        spans = [span for transfer in transfers for span in transfer.spans()]

        def copy() -> float:
            started = time.perf_counter()
            for span in spans:
                np.copyto(
                    target[span.target : span.target + span.nbytes], source[span.source : span.source + span.nbytes]
                )
            return time.perf_counter() - started

        return await asyncio.to_thread(copy)


async def _connected(host: str, port: int) -> Channel:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError as error:
        raise ConnectionFailed(f"nobody answers at {host}:{port} within {CONNECT_SECONDS:.0f} seconds") from error
    except OSError as error:
        raise ConnectionFailed(f"nobody answers at {host}:{port}: {error}") from error
    return Channel(reader, writer)


async def _ask(channel: Channel, request: Request, kind: type[A]) -> A:
    await channel.send(request)
    reply = await channel.reply()
    if isinstance(reply, Failed):
        raise error_from_code(reply.code, reply.text)
    if not isinstance(reply, kind):
        raise ProtocolError(f"{type(reply).__name__} is no answer to {type(request).__name__}")
    return reply
