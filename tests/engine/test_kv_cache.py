"""The pool's memory, and that another process can be given it."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from engine.kv_cache import KVCache
from engine.shared_memory import LARGE_PAGE, allocate, take_large_pages
from protocol.errors import EngineFailure
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float16")

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")


@needs_memfd
def test_a_cpu_pool_is_shared_memory() -> None:
    cache = KVCache(LAYOUT, 6)
    assert cache.descriptor is not None
    assert os.fstat(cache.descriptor).st_size == cache.nbytes == len(cache.memory())
    assert not cache.tensor.any()
    cache.tensor[3] = 1.5
    with mmap.mmap(cache.descriptor, cache.nbytes, prot=mmap.PROT_READ) as seen:
        there = torch.frombuffer(bytearray(seen), dtype=torch.float16).view(cache.tensor.shape)
        assert torch.equal(there, cache.tensor)
    assert cache.tensor.is_contiguous()
    assert cache.data_ptr % mmap.PAGESIZE == 0


@needs_memfd
def test_memory_begins_where_a_large_page_does_and_is_unmapped_with_its_last_view() -> None:
    memory, descriptor = allocate(2 * LARGE_PAGE + 5, "kvferry-mapped")
    os.close(descriptor)
    assert (memory.nbytes, memory.format, bytes(memory[-3:])) == (2 * LARGE_PAGE + 5, "B", bytes(3))
    if take_large_pages(memory):
        (mapped,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "ShmemPmd" in line]
        assert int(mapped.split()[1]) >= 2 * LARGE_PAGE >> 10
    assert not any(memory[::4096])
    memory[-1] = 7
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert tensor.data_ptr() % LARGE_PAGE == 0
    del memory
    gc.collect()
    assert tensor[-1] == 7
    assert "kvferry-mapped" in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert "kvferry-mapped" not in Path("/proc/self/maps").read_text()


@needs_memfd
def test_nobody_else_can_write_or_shorten_it() -> None:
    cache = KVCache(LAYOUT, 6)
    assert cache.descriptor is not None
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(cache.descriptor, 0)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(cache.descriptor, cache.nbytes)


@needs_memfd
def test_the_descriptor_ends_with_the_cache_and_the_memory_with_its_last_view() -> None:
    cache = KVCache(LAYOUT, 6)
    tensor, descriptor = cache.tensor, cache.descriptor
    assert descriptor is not None
    memory = os.fstat(descriptor).st_ino
    assert mapped(memory)
    del cache
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    tensor.fill_(2)
    assert tensor.sum() == 2 * tensor.numel()
    assert mapped(memory)
    del tensor
    gc.collect()
    assert not mapped(memory)


def mapped(inode: int) -> bool:
    """Whether this process still has a file in its memory; its descriptors are its threads' too, and come and go."""
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


@needs_memfd
def test_more_than_there_is_fails_before_it_is_touched() -> None:
    with pytest.raises(OSError, match="memory"):
        allocate(1 << 50)
    with pytest.raises(EngineFailure, match="num_blocks"):
        KVCache(LAYOUT, 1 << 45)


def test_without_memfd_the_pool_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    cache = KVCache(LAYOUT, 6)
    assert cache.descriptor is None
    assert not cache.tensor.any()
