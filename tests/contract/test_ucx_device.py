"""A GPU's memory through UCX: whether it is reached, and what is done around its bytes.

The driver is the stand-in for it, and UCX moves host memory that counts as a GPU's. What only RDMA and a real GPU show
is for the test marked ``gpu``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_here import counted, held, set_up
from ferry import GENERATION, POISON, until
from ucx_here import need_ucx

from kv_transfer.choice import listen_on_device
from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from kv_transfer.transport import (
    Landed,
    TransportConfig,
    Window,
    make_receiver,
    make_sender,
    why_not_on_device,
)
from kv_transfer.ucx import gpudirect as found_here
from kv_transfer.ucx.build import find_ucx
from kv_transfer.ucx.gpudirect import Domain, Found, parse_domains
from kv_transfer.ucx.tuning import without_peer_copies
from protocol.errors import ChannelLost, ConfigError, KVFerryError

pytestmark = pytest.mark.ucx
BLOCK = 64 << 10
BLOCKS = 24
ON = TransportConfig(gpudirect="on")
GOOD = Found(
    "UCX 1.17 (the system's UCX)",
    knows_cuda=True,
    domains=(Domain("tcp", "tcp", cuda=False, dmabuf=False), Domain("ib", "mlx5_0", cuda=True, dmabuf=True)),
    gpu_by_rdma=True,
    gpu_dmabuf=True,
    gpu_shows=True,
)
PLAIN = Domain("ib", "mlx5_1", cuda=False, dmabuf=False)
DMABUF = replace(PLAIN, dmabuf=True)


# --- whether it is reached ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({}, ("mlx5_0",)),
        ({"domains": (PLAIN, GOOD.domains[1])}, ("mlx5_0",)),
        ({"domains": (DMABUF,)}, ("mlx5_1",)),
        ({"gpu_dmabuf": False}, ("mlx5_0",)),
        ({"knows_cuda": False}, "does not move GPU memory: it is built without CUDA"),
        ({"domains": GOOD.domains[:1]}, "finds no RDMA device"),
        ({"domains": (Domain("cuda_cpy", "cuda_cpy", cuda=True, dmabuf=False),)}, "finds no RDMA device"),
        ({"gpu_by_rdma": False}, "the GPU lets no RDMA device at its memory"),
        ({"domains": (PLAIN,)}, "load nvidia_peermem"),
        ({"domains": (DMABUF,), "gpu_dmabuf": False}, "load nvidia_peermem"),
        ({"gpu_shows": False}, "cannot be asked to show"),
    ],
)
def test_what_is_found_comes_to_one_way_or_the_other(changes: dict[str, Any], by: tuple[str, ...] | str) -> None:
    found = replace(GOOD, **changes)
    if isinstance(by, str):
        assert by in str(found.why_not())
    else:
        assert (found.why_not(), found.by) == (None, by)


def test_the_shims_lines_are_read_and_what_is_cut_off_is_not() -> None:
    text = "self self 0 0\nib mlx5_0 1 1\nib mlx5_1 0 1\nib mlx5"
    assert parse_domains(text) == (
        Domain("self", "self", cuda=False, dmabuf=False),
        Domain("ib", "mlx5_0", cuda=True, dmabuf=True),
        Domain("ib", "mlx5_1", cuda=False, dmabuf=True),
    )


@pytest.mark.parametrize(
    ("wanted", "environment", "given"),
    [
        ("", "", "^cuda_ipc"),
        ("", "all", "^cuda_ipc"),
        ("", "rc,cuda", "rc,cuda_copy"),
        ("rc,cuda_ipc", "tcp", "rc,cuda_copy"),
        ("", "^tcp", "^tcp,cuda_ipc"),
        ("^cuda_ipc", "", "^cuda_ipc"),
        ("rc,cuda_copy", "", "rc,cuda_copy"),
    ],
)
def test_no_other_process_copies_from_or_to_the_memory(wanted: str, environment: str, given: str) -> None:
    assert without_peer_copies(wanted, {"UCX_TLS": environment} if environment else {}) == given


def test_this_machine_says_why_it_has_none(cuda: Path) -> None:
    need_ucx()
    memory = DeviceMemory(4096, 4096, 0)
    found = found_here.examine(0)
    assert "self" in {domain.name for domain in found.domains}
    assert (found.gpu_by_rdma, found.gpu_dmabuf, found.gpu_shows) == (True, False, True)
    assert not found.knows_cuda
    set_up(cuda, rdma=0, dmabuf=1, flush_options=2)
    found = found_here.examine(0)
    assert (found.gpu_by_rdma, found.gpu_dmabuf, found.gpu_shows) == (False, True, False)
    set_up(cuda, flush_options=2, ordering=100)
    assert found_here.examine(0).gpu_shows
    assert "UCX" in str(why_not_on_device("ucx", memory, TransportConfig()))
    assert why_not_on_device("ucx", memory, TransportConfig(gpudirect="off")) == "gpudirect is off"
    assert "checksums" in str(why_not_on_device("ucx", memory, TransportConfig(checksum=True)))
    assert why_not_on_device("tcp", memory, TransportConfig()) == "tcp goes from and to host memory"
    set_up(cuda, devices=0)
    assert "no GPU" in str(why_not_on_device("ucx", memory, TransportConfig()))
    assert held(cuda) == 0


def test_ends_of_memory_that_is_not_reached_are_refused(cuda: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_ucx()
    memory = DeviceMemory(4096, 4096, 0)
    with pytest.raises(ConfigError, match=r"no GPUDirect: UCX .* does not move GPU memory") as caught:
        make_receiver("ucx://127.0.0.1:0", memory)
    assert caught.value.field == "gpudirect"
    with pytest.raises(ConfigError, match="no GPUDirect"):
        make_sender("ucx", memory)
    assert not caplog.records
    assert listen_on_device("ucx", "127.0.0.1", memory, TransportConfig(gpudirect="off")) is None
    assert not caplog.records
    assert listen_on_device("ucx", "127.0.0.1", memory, TransportConfig()) is None
    assert "passes pinned host memory" in caplog.text
    with pytest.raises(ConfigError, match=r"gpudirect 'on' cannot be: UCX .* does not move GPU memory"):
        listen_on_device("ucx", "127.0.0.1", memory, ON)
    assert held(cuda) == 0


def test_memory_that_cannot_be_registered_is_refused_or_done_without(
    gpudirect: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another kind than this UCX knows, as a pool would be that does not fit what the bus maps of the GPU."""
    need_ucx()
    monkeypatch.setattr("kv_transfer.ucx.pool.GpuPool.kind", 1)
    pool = np.zeros(BLOCK, np.uint8)
    memory = DeviceMemory(pool.ctypes.data, pool.nbytes, 0)
    for make in (lambda: make_sender("ucx", memory), lambda: listen_on_device("ucx", "127.0.0.1", memory, ON)):
        with pytest.raises(ConfigError, match=f"registering {BLOCK} bytes"):
            make()
    assert listen_on_device("ucx", "127.0.0.1", memory, TransportConfig()) is None
    assert "not listening by ucx on the GPU" in caplog.text
    assert held(gpudirect) == 0


# --- what is done around the bytes ----------------------------------------------------------------------------------


class Ends:
    """A sender and a receiver of memory that counts as a GPU's."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.size = block_bytes
        self.source = np.random.default_rng(1).integers(0, POISON, (blocks, block_bytes), np.uint8)
        self.target = np.full((blocks, block_bytes), POISON, np.uint8)
        self.receiver = make_receiver("ucx://127.0.0.1:0", self._memory(self.target), ON)
        self.sender = make_sender("ucx", self._memory(self.source), ON)
        self.landed: list[Landed] = []
        self.broken: list[KVFerryError] = []

    @staticmethod
    def _memory(pool: Any) -> DeviceMemory:
        return DeviceMemory(pool.ctypes.data, pool.nbytes, 0)

    def open(self, blocks: list[int]) -> bytes:
        ticket = secrets.token_bytes(16)
        window = Window(ticket, tuple(blocks), (GENERATION,) * len(blocks), self.size)
        self.receiver.open(window, self.landed.append, lambda _, error: self.broken.append(error))
        return ticket

    async def ship(self, ticket: bytes, blocks: list[int]) -> None:
        spans = [Span(block * self.size, block * self.size, self.size) for block in blocks]
        await self.sender.ship(self.receiver.address, ticket, spans, [(block, GENERATION) for block in blocks])


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def ends(gpudirect: Path, closing: AsyncExitStack) -> Any:
    need_ucx()

    def make(blocks: int = BLOCKS, block_bytes: int = BLOCK) -> Ends:
        made = Ends(blocks, block_bytes)
        closing.push_async_callback(made.receiver.close)
        closing.push_async_callback(made.sender.close)
        return made

    return make


@pytest.mark.parametrize("flushes", [True, False])
async def test_what_rdma_wrote_is_shown_before_it_is_told_of(ends: Any, gpudirect: Path, flushes: bool) -> None:
    if not flushes:
        set_up(gpudirect, ordering=100)
    made = ends()
    seen: list[int] = []
    made.landed = SimpleNamespace(append=lambda _: seen.append(counted(gpudirect, "flushes")))
    for number, blocks in enumerate(([3], [5, 6, 9], [20]), 1):
        await made.ship(made.open(blocks), blocks)
        await until(lambda number=number: len(seen) == number)
        assert (made.target[blocks] == made.source[blocks]).all()
    assert seen == ([1, 2, 3] if flushes else [0, 0, 0])
    assert (np.delete(made.target, [3, 5, 6, 9, 20], axis=0) == POISON).all()
    await made.sender.close()
    await made.receiver.close()
    assert counted(gpudirect, "drains") == 0, "nobody waits for the GPU when all went well"
    assert held(gpudirect) == 0


async def test_what_cannot_be_shown_does_not_land(ends: Any, gpudirect: Path) -> None:
    made = ends()
    set_up(gpudirect, fail_flushes=1)
    with pytest.raises(ChannelLost):
        await made.ship(made.open([1]), [1])
    await until(lambda: made.broken)
    assert not made.landed
    set_up(gpudirect)
    await made.ship(made.open([2]), [2])
    await until(lambda: made.landed)
    assert made.landed[0].blocks == (2,)


async def test_a_cut_move_waits_for_the_gpu_before_it_is_called_quiet(ends: Any, gpudirect: Path) -> None:
    made = ends(64, 512 << 10)
    blocks = list(range(64))
    for _ in range(40):
        made.target[:] = POISON
        ticket = made.open(blocks)
        task = asyncio.create_task(made.ship(ticket, blocks))
        await until(lambda task=task: made.target[0, -1] != POISON or task.done())
        before = counted(gpudirect, "drains")
        await made.receiver.close_window(ticket)
        midway = bool((made.target[:, -1] == POISON).any())
        if midway:
            assert counted(gpudirect, "drains") > before
        made.target[:] = POISON
        with pytest.raises(KVFerryError) if midway else nullcontext():
            await task
        assert (made.target == POISON).all()
        if midway:
            break
    else:
        pytest.fail("the ship was over too soon every time")
    again = made.open([7])
    await made.ship(again, [7])
    assert (made.target[7] == made.source[7]).all()


# --- with UCX's own CUDA module ------------------------------------------------------------------------------------


def test_ucx_itself_takes_the_memory_for_a_gpus(cuda_library: Path, tmp_path: Path) -> None:
    """In a process of its own, for UCX looks for a driver once, when it is first opened."""
    need_ucx()
    ucx = find_ucx()
    if ucx.libraries is None or not list((ucx.libraries / "ucx").glob("libuct_cuda*")):
        pytest.skip(f"{ucx.name} has no CUDA module")
    driver = tmp_path / "libcuda.so.1"
    for name in (driver.name, "libnvidia-ml.so.1"):
        (tmp_path / name).symlink_to(cuda_library)
    script = Path(__file__).with_name("ucx_cuda_case.py")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-X", "faulthandler", str(script), str(driver)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].endswith("finds no RDMA device")
    assert done.stdout.splitlines()[-1] == "done"


# --- with a GPU and RDMA --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_blocks_cross_from_gpu_to_gpu_by_rdma() -> None:
    pools = [torch.randint(0, POISON, (BLOCKS, BLOCK), dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    here, there = (DeviceMemory(pool.data_ptr(), pool.nbytes, 0) for pool in pools)
    reason = why_not_on_device("ucx", here, ON)
    if reason is not None:
        pytest.skip(reason)
    torch.cuda.synchronize()
    receiver, sender = make_receiver("ucx://127.0.0.1:0", there, ON), make_sender("ucx", here, ON)
    try:
        for blocks in ([3], list(range(BLOCKS))):
            ticket, landed = secrets.token_bytes(16), asyncio.Event()
            window = Window(ticket, tuple(blocks), (GENERATION,) * len(blocks), BLOCK)
            receiver.open(window, lambda _, landed=landed: landed.set(), lambda *_: None)
            spans = [Span(block * BLOCK, block * BLOCK, BLOCK) for block in blocks]
            await sender.ship(receiver.address, ticket, spans, [(block, GENERATION) for block in blocks])
            await asyncio.wait_for(landed.wait(), 10.0)
            assert torch.equal(pools[1][blocks], pools[0][blocks])
            await receiver.close_window(ticket)
    finally:
        await sender.close()
        await receiver.close()
