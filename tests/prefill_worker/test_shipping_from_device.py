"""Ships from a pool on a device: in order with the steps that fill it, straight or staged, and nothing left behind."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch
from ucx_here import need_ucx

from decode_worker.reception import Reception
from engine.copy_queue import HostQueue
from engine.device_pool import DevicePool
from engine.kv_cache import KVCache
from kv_transfer.instructions import Ship
from kv_transfer.memory import DeviceMemory
from kv_transfer.transport import GpuDirect, Receiver, TransportConfig, Window, make_receiver
from prefill_worker.shipping import Shipping
from protocol.errors import ConfigError, EngineFailure, LayoutMismatch
from protocol.ids import RequestKey
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
OTHER = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=8, dtype="float32")
BLOCKS = 12
SOURCES, TARGETS = (7, 3, 9), (2, 4, 5)
PATIENT = TransportConfig(timeout=5.0)
ON = TransportConfig(timeout=5.0, gpudirect="on")
BIND = {"cuda_ipc": "cuda_ipc://*", "shm": "shm://*", "ucx": "ucx://127.0.0.1:0"}


class HeldQueue(HostQueue):
    """A device whose last step has not ended, or never will; counts what is pinned."""

    def __init__(self) -> None:
        self.through = threading.Event()
        self.failed = False
        self.pinned = 0

    def wait_for_steps(self) -> None:
        assert self.through.wait(60.0)
        if self.failed:
            raise EngineFailure("a step failed")

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self.wait_for_steps()
        yield

    def pin(self, memory: memoryview) -> bool:
        self.pinned += memory.nbytes
        return True

    def unpin(self, memory: memoryview) -> None:
        self.pinned -= memory.nbytes


class Stage:
    """The parts."""

    def __init__(self, scheme: str, config: TransportConfig) -> None:
        self.source, self.target = KVCache(LAYOUT, BLOCKS), KVCache(LAYOUT, BLOCKS)
        self.queue = HeldQueue()
        pool = DevicePool(self.source, self.queue)
        self.shipping = Shipping(LAYOUT, pool, None, config, 1 << 16, scheme)
        if scheme in ("cuda_ipc", "ucx"):
            memory: memoryview | DeviceMemory = DeviceMemory(self.target.data_ptr, self.target.nbytes, 0)
        else:
            memory = self.target.memory()
        self.receiver: Receiver = make_receiver(BIND[scheme], memory)

    def order(self, targets: tuple[int, ...] = TARGETS) -> Ship:
        window = Window(secrets.token_bytes(16), targets, (1,) * len(targets), LAYOUT.block_bytes)
        self.receiver.open(window, lambda _: None, lambda *_: None)
        return Ship(
            key=RequestKey("r", 0),
            ship_id=0,
            addresses=(self.receiver.address,),
            ticket=window.ticket,
            layout=LAYOUT,
            source_blocks=SOURCES,
            target_blocks=targets,
            generations=window.generations,
            tokens=range(12),
        )


@asynccontextmanager
async def stage(scheme: str, config: TransportConfig = PATIENT) -> AsyncIterator[Stage]:
    made = Stage(scheme, config)
    try:
        yield made
    finally:
        made.queue.through.set()
        await made.shipping.close()
        await made.receiver.close()
    assert made.queue.pinned == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("steps", "staging"))]


@pytest.fixture
def on_a_device(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePool, "device_index", 0)


async def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("scheme", ["cuda_ipc", "shm"])
async def test_nothing_ships_before_the_step_that_computed_it_is_through(scheme: str) -> None:
    async with stage(scheme) as parts:
        task = asyncio.create_task(parts.shipping.ship(parts.receiver.address, parts.order()))
        await until(lambda: [each for each in threading.enumerate() if each.name.startswith(("steps_", "staging_"))])
        # Another one has all the time that this one would need.
        free = Shipping(LAYOUT, DevicePool(parts.source, HostQueue()), None, TransportConfig(), 1 << 16)
        for _ in range(3):
            order = parts.order((6, 7, 8))
            await free.ship(parts.receiver.address, order)
            await parts.receiver.close_window(order.ticket)
        await free.close()
        assert not task.done()
        # What a ship that did not wait would have sent is still zero.
        parts.source.tensor.copy_(torch.randn(parts.source.tensor.shape))
        parts.queue.through.set()
        report = await task
        assert report.nbytes == 3 * LAYOUT.block_bytes
        assert torch.equal(parts.target.tensor[list(TARGETS)], parts.source.tensor[list(SOURCES)])
        assert bool(parts.queue.pinned) == (scheme == "shm")


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("scheme", ["cuda_ipc", "shm"])
async def test_a_device_that_fails_ships_nothing(scheme: str) -> None:
    async with stage(scheme) as parts:
        parts.queue.failed = True
        parts.queue.through.set()
        with pytest.raises(EngineFailure, match="a step failed"):
            await parts.shipping.ship(parts.receiver.address, parts.order())
        assert not parts.target.tensor.any()


@pytest.mark.usefixtures("on_a_device")
async def test_only_blocks_as_they_are_go_from_pool_to_pool() -> None:
    async with stage("cuda_ipc") as parts:
        order = parts.order()
        assert parts.shipping.ways(order) == order.addresses
        both = (*order.addresses, "tcp://127.0.0.1:1")
        for change in ({"layout": OTHER}, {"wire_dtype": "bfloat16"}):
            fields = {name: getattr(order, name) for name in order.__dataclass_fields__}
            converted = Ship(**{**fields, "addresses": both, **change})
            assert parts.shipping.ways(converted) == both[1:]
            with pytest.raises(LayoutMismatch, match=r"convert nothing: (block_size: 4|sent as bfloat16)"):
                parts.shipping.ways(Ship(**{**fields, **change}))


async def test_what_a_pool_cannot_be_shipped_by(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransportConfig()
    cache = KVCache(LAYOUT, BLOCKS)
    for memory in (cache.memory(), DevicePool(cache, HostQueue())):
        shipping = Shipping(LAYOUT, memory, cache.descriptor, config, 1 << 16)
        assert shipping.unusable == {"cuda_ipc": "the pool is in host memory"}
        await shipping.close()
    shipping = Shipping(LAYOUT, cache.memory(), None, config, 1 << 16)
    assert shipping.unusable["shm"] == "the pool is not in shared memory"
    await shipping.close()
    # On a machine without a driver, or where nothing can be shared, with the words of the one who knows.
    monkeypatch.setattr(DevicePool, "device_index", 0)
    monkeypatch.setattr("kv_transfer.cuda_ipc.driver.LIBRARY", "libcuda-is-not-here.so.1")
    shipping = Shipping(LAYOUT, DevicePool(cache, HostQueue()), None, config, 1 << 16)
    assert "needs NVIDIA's driver" in shipping.unusable["cuda_ipc"]
    assert "shm" not in shipping.unusable
    await shipping.close()
    with pytest.raises(ConfigError):
        make_receiver("cuda_ipc://*", cache.memory())


@pytest.mark.ucx
@pytest.mark.usefixtures("on_a_device", "gpudirect")
async def test_where_rdma_reaches_the_gpu_blocks_go_to_other_hosts_straight_and_after_their_step() -> None:
    need_ucx()
    async with stage("ucx", ON) as parts:
        task = asyncio.create_task(parts.shipping.ship(parts.receiver.address, parts.order()))
        await until(lambda: [each for each in threading.enumerate() if each.name.startswith("steps_")])
        parts.source.tensor.copy_(torch.randn(parts.source.tensor.shape))
        assert not task.done()
        parts.queue.through.set()
        assert (await task).nbytes == 3 * LAYOUT.block_bytes
        assert torch.equal(parts.target.tensor[list(TARGETS)], parts.source.tensor[list(SOURCES)])
        assert parts.shipping._staging is None
        # What would have to be converted is not sent by a longer way.
        order = parts.order((6, 7, 8))
        fields = {name: getattr(order, name) for name in order.__dataclass_fields__}
        with pytest.raises(LayoutMismatch, match=r"gpudirect is 'on'.*: (block_size: 4|sent as bfloat16)"):
            parts.shipping.ways(Ship(**{**fields, "layout": OTHER}))


@pytest.mark.ucx
@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("gpudirect_is", ["auto", "off"])
async def test_where_it_does_not_they_are_staged(gpudirect_is: GpuDirect, caplog: pytest.LogCaptureFixture) -> None:
    need_ucx()
    source, target = KVCache(LAYOUT, BLOCKS), KVCache(LAYOUT, BLOCKS)
    source.tensor.normal_()
    config = TransportConfig(timeout=5.0, gpudirect=gpudirect_is)
    shipping = Shipping(LAYOUT, DevicePool(source, HostQueue()), None, config, 1 << 16, "ucx")
    assert ("passes pinned host memory" in caplog.text) == (gpudirect_is == "auto")
    receiver = make_receiver("ucx://127.0.0.1:0", target.memory())
    window = Window(secrets.token_bytes(16), (2,), (1,), LAYOUT.block_bytes)
    receiver.open(window, lambda _: None, lambda *_: None)
    order = Ship(
        key=RequestKey("r", 0),
        ship_id=0,
        addresses=(receiver.address,),
        ticket=window.ticket,
        layout=LAYOUT,
        source_blocks=(5,),
        target_blocks=(2,),
        generations=(1,),
        tokens=range(4),
    )
    await shipping.ship(receiver.address, order)
    assert torch.equal(target.tensor[2], source.tensor[5])
    assert shipping._staging is not None
    await shipping.close()
    await receiver.close()


@pytest.mark.parametrize(
    ("mode", "on_device", "said"),
    [
        ("ucx", False, "the pool is on no CUDA device"),
        ("auto", True, "it is a matter of transport 'ucx', and this is 'auto'"),
        ("ucx", True, "NVIDIA's driver finds no GPU"),
    ],
)
async def test_gpudirect_that_must_be_and_cannot_is_refused_at_once(
    mode: str, on_device: bool, said: str, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(LAYOUT, BLOCKS)
    if on_device:
        monkeypatch.setattr(DevicePool, "device_index", 0)
        monkeypatch.setattr("kv_transfer.cuda_ipc.driver.LIBRARY", "libcuda-is-not-here.so.1")
    pool = DevicePool(cache, HostQueue()) if on_device else cache.memory()
    with pytest.raises(ConfigError, match=f"gpudirect 'on' cannot be: {said}") as caught:
        Shipping(LAYOUT, pool, None, ON, 1 << 16, mode)
    assert caught.value.field == "gpudirect"
    monkeypatch.setattr(KVCache, "in_host_memory", not on_device)
    with pytest.raises(ConfigError, match=f"gpudirect 'on' cannot be: {said}"):
        Reception(cache, HostQueue(), WireLayout(LAYOUT, None), mode, "127.0.0.1", ON)
