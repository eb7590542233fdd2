"""A pool as if it were on a device: what is packed, gathered and unpacked there is what host memory would hold.

The same on a GPU, where there is one; only there can the order between steps and copies be wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_repack import BLOCKS, TOKENS, filled, layout, memory_of

from engine.block_runs import block_runs
from engine.copy_queue import CudaQueue, HostQueue, copy_queue
from engine.device_pool import DevicePool
from engine.kv_cache import KVCache
from engine.repack import pack, unpack
from kv_transfer.conversion import convert
from protocol.layout import CacheDtype, Order
from protocol.wire_layout import WireDtype, WireLayout

DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
TABLE = [5, 6, 7, 12, 3, 9, 10, 11, 1, 2, 19, 0]


def cache_on(device: str, size: int, order: Order, dtype: CacheDtype, seed: int = 0) -> KVCache:
    cache = KVCache(layout(size, order, dtype), BLOCKS, device)
    cache.tensor.copy_(filled(cache.layout, seed))
    return cache


def pool_of(cache: KVCache) -> DevicePool:
    return DevicePool(cache, copy_queue(cache.tensor.device))


@pytest.mark.parametrize("wire_dtype", [None, "float32", "float16", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD"), ("NHD", "NHD")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_packed_and_unpacked_there_is_what_it_is_in_host_memory(
    device: str, dtype: CacheDtype, orders: tuple[Order, Order], wire_dtype: WireDtype | None
) -> None:
    cache = cache_on(device, 4, orders[0], dtype)
    there = layout(6, orders[1], "float32")
    wire = WireLayout(there, wire_dtype)
    count = there.blocks_for(TOKENS)
    found = convert(cache.layout, TABLE[: cache.layout.blocks_for(TOKENS)], wire, range(count), range(TOKENS))
    made, wanted = (torch.full((count * wire.block_bytes,), 7, dtype=torch.uint8) for _ in range(2))
    pool_of(cache).pack(found.moves, memory_of(made), wire, found.incomplete)
    source = memory_of(cache.tensor.cpu())
    pack(source, cache.layout, found.moves, memory_of(wanted), wire, found.incomplete)
    if wire_dtype == "float8_e4m3":
        # Between the values and the scales, and behind these, nothing is said of the bytes.
        made, wanted = (reopened(each, wire) for each in (made, wanted))
    assert torch.equal(made, wanted)


def reopened(landed: torch.Tensor, wire: WireLayout) -> torch.Tensor:
    count = landed.nbytes // wire.block_bytes
    pool = torch.zeros(wire.layout.pool_shape(count), dtype=torch.float32)
    unpack(memory_of(landed), wire, range(count), memory_of(pool))
    return pool


@pytest.mark.parametrize("wire_dtype", [None, "float16", "float8_e4m3"])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_unpacked_where_they_belong_and_nowhere_else(device: str, wire_dtype: WireDtype | None) -> None:
    cache = cache_on(device, 4, "HND", "bfloat16", seed=1)
    wire = WireLayout(cache.layout, wire_dtype)
    landed = torch.zeros(BLOCKS * wire.block_bytes, dtype=torch.uint8)
    source = filled(cache.layout, 2)
    found = convert(cache.layout, range(BLOCKS), wire, range(BLOCKS), range(4 * BLOCKS))
    pack(memory_of(source), cache.layout, found.moves, memory_of(landed), wire, found.incomplete)
    wanted = filled(cache.layout, 1)
    unpack(memory_of(landed), wire, (9, 3, 4, 5, 17), memory_of(wanted))
    pool_of(cache).unpack(memory_of(landed), wire, (9, 3, 4, 5, 17))
    assert torch.equal(cache.tensor.cpu(), wanted)
    assert not torch.equal(wanted, filled(cache.layout, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_whole_blocks_are_gathered_in_the_order_asked_for(device: str) -> None:
    cache = cache_on(device, 4, "NHD", "float16")
    size = cache.layout.block_bytes
    target = torch.zeros(len(TABLE) * size, dtype=torch.uint8)
    pool_of(cache).gather(TABLE, memory_of(target))
    assert torch.equal(target.view(torch.float16).view(-1, *cache.tensor.shape[1:]), filled(cache.layout)[TABLE])


def test_runs_of_neighbours() -> None:
    assert block_runs([9, 3, 4, 5, 17, 8]) == [(3, 3), (8, 2), (17, 1)]
    assert block_runs([]) == []


def test_host_memory_needs_no_queue() -> None:
    queue = copy_queue(torch.device("cpu"))
    assert isinstance(queue, HostQueue)
    assert not queue.pin(memoryview(bytearray(16)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_waits_for_the_step_before_it_on_the_gpu() -> None:
    cache = cache_on("cuda:0", 4, "NHD", "float32")
    queue: Any = copy_queue(cache.tensor.device)
    assert isinstance(queue, CudaQueue)
    pool = DevicePool(cache, queue)
    target = torch.zeros(cache.nbytes, dtype=torch.uint8)
    memory = memory_of(target)
    assert queue.pin(memory)
    try:
        for value in (1.0, 2.0, 3.0):
            torch.cuda._sleep(50_000_000)  # the step: it holds its stream up before it stores
            cache.tensor.fill_(value)
            queue.mark()
            pool.gather(range(BLOCKS), memory)
            assert (target.view(torch.float32) == value).all()
    finally:
        queue.unpin(memory)
