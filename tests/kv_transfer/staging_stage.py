"""Two pools whose layouts differ, and what ships between them by way of staging memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from engine.kv_cache import TORCH_DTYPES
from engine.repack import pack
from engine.shared_memory import allocate
from kv_transfer.conversion import Conversion
from kv_transfer.instructions import Ship
from kv_transfer.staging import Staging
from kv_transfer.transport import Landed, Receiver, TransportConfig, Window, make_receiver
from protocol.errors import TransferError
from protocol.ids import RequestKey
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

SOURCE = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
TARGET = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=6, dtype="float32", order="HND")
BLOCKS = 24
TICKET = b"t" * 16


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).view(-1).numpy().data


def pool_of(layout: KVLayout, seed: int) -> torch.Tensor:
    values = torch.randn(layout.pool_shape(BLOCKS), generator=torch.Generator().manual_seed(seed))
    return values.to(TORCH_DTYPES[layout.dtype])


def order(tokens: range, addresses: tuple[str, ...], layout: KVLayout = TARGET, ticket: bytes = TICKET) -> Ship:
    """A ship of ``tokens`` from blocks 23, 22, ... to blocks 1, 2, 4, 5, 7 ..., which are neighbours in twos."""
    first, last = tokens.start // SOURCE.block_size, SOURCE.blocks_for(tokens.stop)
    count = layout.blocks_for(tokens.stop) - tokens.start // layout.block_size
    targets = [block for block in range(1, BLOCKS) if block % 3][:count]
    return Ship(
        key=RequestKey("r", 0),
        ship_id=0,
        addresses=addresses,
        ticket=ticket,
        layout=layout,
        source_blocks=tuple(BLOCKS - 1 - index for index in range(first, last)),
        target_blocks=tuple(targets),
        generations=tuple(100 + block for block in targets),
        tokens=tokens,
    )


def sequence(pool: torch.Tensor, layout: KVLayout, blocks: tuple[int, ...]) -> torch.Tensor:
    """``[tokens, layers, 2, heads, dim]`` of whole blocks."""
    found = pool[list(blocks)]
    if layout.order == "HND":
        found = found.transpose(3, 4)
    return found.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)


class Stage:
    """The parts, with a pack that can be held."""

    def __init__(self, scheme: str, staging_bytes: int) -> None:
        self.source = pool_of(SOURCE, 1)
        self.target = pool_of(TARGET, 2)
        self.before = self.target.clone()
        self.go_on = threading.Event()
        self.go_on.set()
        self.packing = 0
        self.packed = 0
        self.landed: list[Landed] = []
        self.broken: list[TransferError] = []
        memory, descriptor = allocate(staging_bytes, "kvferry-test")
        self.staging = Staging(SOURCE, memoryview(memory), descriptor, self._pack, TransportConfig(timeout=5.0))
        bind = f"{scheme}://127.0.0.1:0" if scheme == "tcp" else f"{scheme}://*"
        self.receiver: Receiver = make_receiver(bind, bytes_of(self.target))

    def _pack(self, conversion: Conversion, target: memoryview) -> None:
        self.packing += 1
        assert self.go_on.wait(60.0)
        moves, incomplete = conversion.moves, conversion.incomplete
        pack(bytes_of(self.source), SOURCE, moves, target, conversion.target, incomplete)
        self.packed += 1

    def open(self, ship: Ship) -> None:
        window = Window(ship.ticket, ship.target_blocks, ship.generations, ship.wire.block_bytes)
        self.receiver.open(window, self.landed.append, lambda _, error: self.broken.append(error))

    def arrived(self, ship: Ship) -> bool:
        """Whether the tokens are in the target pool, and nothing else of it has changed but the end of a block."""
        begin = ship.tokens.start
        got = sequence(self.target, TARGET, ship.target_blocks)[: len(ship.tokens)]
        skipped = begin % SOURCE.block_size
        wanted = sequence(self.source, SOURCE, ship.source_blocks)[skipped : skipped + len(ship.tokens)]
        others = [block for block in range(BLOCKS) if block not in ship.target_blocks]
        return torch.equal(got, wanted) and torch.equal(self.target[others], self.before[others])


@asynccontextmanager
async def stage(scheme: str = "inproc", staging_bytes: int = 1 << 16) -> AsyncIterator[Stage]:
    """Made, and closed with no thread left."""
    made = Stage(scheme, staging_bytes)
    try:
        yield made
    finally:
        made.go_on.set()
        await made.staging.close()
        await made.receiver.close()
    assert made.staging._room.used == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


async def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < limit, f"{what} did not come"
        await asyncio.sleep(0.001)


WIRE = WireLayout(TARGET)
