"""The decode side of the benchmark: a decode worker without a model, and without a router.

Life cycle: staged by the first line of standard input -> takes requests, one at a time -> standard input ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack

import msgspec
import zmq.asyncio

from cluster.bench import memory
from cluster.bench.far_end import checksum
from cluster.bench.handoff.order import LINE_BYTES, TOKEN, Answer, Failed, Order, Ready, Stage, Take, Taken
from decode_worker.imports import Imports
from decode_worker.peers import PrefillPeers
from decode_worker.scheduler import DecodeScheduler
from decode_worker.worker import TICK
from engine.block_pool import BlockPool
from kv_transfer.choice import listen
from kv_transfer.instructions import Commit
from kv_transfer.transport import TransportConfig
from protocol.errors import KVFerryError
from protocol.ids import Peer, RequestKey
from protocol.messages import ErrorInfo
from protocol.wire_layout import WireLayout

ROUTER = Peer("bench", 0)

log = logging.getLogger(__name__)


async def serve() -> None:
    """Carry out the orders on standard input until it ends."""
    orders = await _standard_input()
    async with AsyncExitStack() as stack:
        side: DecodeSide | None = None
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=Order)
            if isinstance(order, Stage):
                try:
                    side = await DecodeSide.staged(order, stack)
                except (KVFerryError, ImportError, OSError) as error:
                    _say(Failed(code=getattr(error, "code", KVFerryError.code), text=str(error)))
                else:
                    _say(Ready(me=side.me))
            else:
                assert side is not None, "staged first"
                side.take(order)


class DecodeSide:
    """See the module; made by :meth:`staged`."""

    def __init__(self, pool: BlockPool, view: memoryview, block_bytes: int) -> None:
        self.me = Peer("decode", time.time_ns())
        self._pool = pool
        self._view = view
        self._block_bytes = block_bytes
        self._scheduler = DecodeScheduler(pool, block_size=pool.block_size, max_sequences=1)
        self._checked = False
        self._imports: Imports | None = None

    @classmethod
    async def staged(cls, stage: Stage, stack: AsyncExitStack) -> DecodeSide:
        """Everything that a decode worker has around its imports; ``stack`` ends it.

        Raises:
            KVFerryError: the transport cannot be used here.
        """
        made = stack.enter_context(memory.made_pool(stage.layout.pool_bytes(stage.blocks)))
        await asyncio.to_thread(memory.fill, made.view, b"\0" * memory.PATTERN_BYTES)
        pool = BlockPool(stage.blocks, stage.layout.block_size, prefix_cache=False)
        side = cls(pool, made.view, stage.layout.block_bytes)
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        config = TransportConfig(ucx_tls=stage.ucx_tls, name=str(side.me))
        receiver = listen(stage.scheme, "127.0.0.1", made.view, config)
        stack.push_async_callback(receiver.close)
        peers = PrefillPeers(
            context,
            side.me,
            receive=lambda sender, message: imports.receive(sender, message),
            refused=lambda error: log.warning("of the prefill side: %s", error),
            renewed=lambda endpoint: imports.reconnected(endpoint),
        )
        stack.push_async_callback(peers.close)
        imports = side._imports = Imports(
            pool,
            WireLayout(stage.layout),
            receiver,
            vocab_size=TOKEN + 1,
            send=peers.send,
            commit=side._commit,
            failed=side._failed,
            freed=lambda: None,
        )
        stack.push_async_callback(imports.close)
        ticking = asyncio.create_task(_ticks(imports))
        stack.push_async_callback(_ended, ticking)
        return side

    def take(self, order: Take) -> None:
        """Reserve and grant; what follows comes by the sockets."""
        assert self._imports is not None, "staged"
        self._checked = order.checked
        self._scheduler.add(order.reserve, ROUTER, time.monotonic())
        for sequence in self._scheduler.admit():
            self._imports.open(sequence)

    def _commit(self, commit: Commit, _handoff: float) -> None:
        key = commit.key
        sequence = self._scheduler.commit(key, commit.handover.next_token, time.monotonic())
        crc = None
        if self._checked:
            size = self._block_bytes
            crc = checksum([self._view[block * size : (block + 1) * size] for block in sequence.block_table])
        self._scheduler.drop(key)
        _say(Taken(key=key, at=sequence.committed, crc=crc))

    def _failed(self, key: RequestKey, error: ErrorInfo) -> None:
        self._scheduler.drop(key)
        _say(Failed(code=error.code, text=error.message))


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _ticks(imports: Imports) -> None:
    while True:
        await asyncio.sleep(TICK)
        imports.tick()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
