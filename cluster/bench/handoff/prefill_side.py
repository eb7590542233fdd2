"""The measuring side: a prefill worker without a model, which is its own router too.

Life cycle of a :func:`staged` side: pool made, socket bound, decode side started -> requests, one at a time -> ended.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from cluster.bench import memory
from cluster.bench.ending import to_the_end
from cluster.bench.far_end import checksum
from cluster.bench.handoff.order import LINE_BYTES, TOKEN, Answer, Failed, Order, Ready, Stage, Take, Taken
from engine.block_pool import BlockPool, HolderKind, Owner
from kv_transfer.transport import TransportConfig
from prefill_worker.exports import Exports
from prefill_worker.worker import TICK
from protocol.errors import ConnectionFailed, IntegrityMismatch, KVFerryError, ProtocolError, error_from_code
from protocol.ids import Peer, RequestKey, new_request_id
from protocol.layout import KVLayout
from protocol.messages import ErrorInfo, Message, Prefill, PrefillAddress, Reserve
from protocol.sampling import SamplingParams
from protocol.sockets import Hub

START_SECONDS = 60.0
REQUEST_SECONDS = 30.0
END_SECONDS = 5.0
STAGING_BYTES = 1 << 20
"""Both sides have one layout, so it is not used."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=2)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is measured with.

    Attributes:
        scheme: of the transport.
        ucx_tls: what UCX is held to; empty where it is not.
        layout: of both pools.
        blocks: of either pool.
        chunk_tokens: of a chunk, whole blocks.
        pause: seconds before each chunk.
    """

    scheme: str
    ucx_tls: str
    layout: KVLayout
    blocks: int
    chunk_tokens: int
    pause: float


class DecodeProcess:
    """The decode side as this process has it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def tell(self, order: Order) -> None:
        """Give an order."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def hear(self) -> Ready | Taken:
        """The next answer.

        Raises:
            ConnectionFailed: it has ended.
            KVFerryError: it could not do as it was told.
        """
        assert self._process.stdout is not None, "asked for"
        line = await self._process.stdout.readline()
        if not line:
            raise ConnectionFailed("the decode side's process has ended")
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"no answer of a decode side: {error}") from error
        if isinstance(answer, Failed):
            raise error_from_code(answer.code, answer.text)
        return answer

    async def end(self) -> None:
        """Close its standard input, and wait for it."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def staged(scene: Scene) -> AsyncIterator[PrefillSide]:
    """Both sides, ready.

    Raises:
        KVFerryError: the transport does not work here; says why.
    """
    async with AsyncExitStack() as stack:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cluster", "bench", "handoff", "--decode"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        decode = DecodeProcess(process)

        async def end() -> None:
            await to_the_end(decode.end())

        stack.push_async_callback(end)
        layout = scene.layout
        decode.tell(Stage(scheme=scene.scheme, ucx_tls=scene.ucx_tls, layout=layout, blocks=scene.blocks))
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await decode.hear()
        except TimeoutError as error:
            raise ConnectionFailed(f"the decode side did not start in {START_SECONDS:.0f} seconds") from error
        if not isinstance(ready, Ready):
            raise ProtocolError(f"{type(ready).__name__} is no answer to Stage")
        pool = stack.enter_context(memory.made_pool(layout.pool_bytes(scene.blocks)))
        pattern = random.Random(scene.blocks).randbytes(memory.PATTERN_BYTES)  # noqa: S311
        await asyncio.to_thread(memory.fill, pool.view, pattern)
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        side = PrefillSide(scene, pool, decode, ready.me, context)
        stack.push_async_callback(side.close)
        yield side


class PrefillSide:
    """See the module."""

    def __init__(
        self, scene: Scene, pool: memory.Pool, decode: DecodeProcess, reader: Peer, context: zmq.asyncio.Context
    ) -> None:
        self._scene = scene
        self._view = pool.view
        self._decode = decode
        self._reader = reader
        me = Peer("prefill", time.time_ns())
        self._hub = Hub(context, me, "tcp://127.0.0.1:0")
        self._address = PrefillAddress(peer=me, endpoint=self._hub.endpoint)
        self._blocks = BlockPool(scene.blocks, scene.layout.block_size, prefix_cache=False)
        self._news = asyncio.Event()
        self._failure: KVFerryError | None = None
        self._taken: dict[RequestKey, Taken] = {}
        self._exports = Exports(
            self._blocks,
            scene.layout,
            pool.view,
            descriptor=pool.descriptor,
            mode=scene.scheme,
            send=self._send,
            failed=self._failed,
            closed=lambda _: self._news.set(),
            transport=TransportConfig(ucx_tls=scene.ucx_tls, name=str(me)),
            staging_bytes=STAGING_BYTES,
        )
        loops = (self._answers(), self._readers(), self._ticks())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def hand_over(self, tokens: int, *, checked: bool = False) -> float:
        """Seconds from the moment a prompt's last chunk is complete to its commit on the decode side.

        Args:
            tokens: of the prompt.
            checked: whether what landed is compared with what was sent.

        Raises:
            KVFerryError: it failed, or took too long.
            IntegrityMismatch: other bytes landed.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self._hand_over(tokens, checked)
        except TimeoutError as error:
            raise ConnectionFailed(f"a prompt of {tokens} tokens was not handed over in time") from error

    async def _hand_over(self, tokens: int, checked: bool) -> float:
        key = RequestKey(new_request_id(), 0)
        owner = Owner(HolderKind.TABLE, str(key))
        prompt = (TOKEN,) * tokens
        blocks = self._blocks.allocate(owner, self._scene.layout.blocks_for(tokens))
        self._exports.open(Prefill(key=key, token_ids=prompt, sampling=SAMPLING, handoff=self._reader), self._reader)
        reserve = Reserve(key=key, token_ids=prompt, sampling=SAMPLING, prefill=self._address)
        self._decode.tell(Take(reserve=reserve, checked=checked))
        await self._until(lambda: self._exports.book.is_granted(key))
        step = self._scene.chunk_tokens // self._scene.layout.block_size
        chunks = [blocks[first : first + step] for first in range(0, len(blocks), step)]
        for chunk in chunks[:-1]:
            await asyncio.sleep(self._scene.pause)
            self._exports.computed(key, chunk)
        await asyncio.sleep(self._scene.pause)
        complete = time.monotonic()
        self._exports.computed(key, chunks[-1])
        self._exports.finished(key, TOKEN)
        self._blocks.release_all(owner)
        await self._until(lambda: key in self._taken and not self._exports.book.open_count)
        taken = self._taken.pop(key)
        if checked and taken.crc != await asyncio.to_thread(checksum, self._bytes(blocks)):
            raise IntegrityMismatch("other bytes landed than were sent")
        return taken.at - complete

    async def close(self) -> None:
        """End everything of this side."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await to_the_end(self._exports.close())
        self._hub.close()

    def _bytes(self, blocks: Sequence[int]) -> list[memoryview]:
        size = self._scene.layout.block_bytes
        return [self._view[block * size : (block + 1) * size] for block in blocks]

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()

    def _send(self, peer: Peer, message: Message) -> bool:
        return self._hub.send(str(peer).encode(), message)

    def _failed(self, _key: RequestKey, error: ErrorInfo) -> None:
        self._failure = error.to_error()
        self._news.set()

    async def _answers(self) -> None:
        try:
            while True:
                answer = await self._decode.hear()
                if isinstance(answer, Taken):
                    self._taken[answer.key] = answer
                self._news.set()
        except KVFerryError as error:
            self._failure = error
            self._news.set()

    async def _readers(self) -> None:
        while True:
            _, envelope = await self._hub.receive()
            self._exports.receive(envelope.sender, envelope.body)
            self._news.set()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._exports.tick()
