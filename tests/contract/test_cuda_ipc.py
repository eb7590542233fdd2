"""From GPU to GPU of one host: what has no CUDA in it, and the rest against a stand-in for the driver.

The stand-in keeps what the real one demands (a context in the thread, no process opens its own handle, a copy is done
when its stream has been waited for), so that ledger, gates and frames are tested with copies that come late. What a
real device does is for the tests marked ``gpu``.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_here import held, set_up
from far_process import LARGE, MANY, Start
from ferry import GENERATION, POISON, as_pool, until

from kv_transfer.choice import Chooser, listen, listen_on_device, schemes_of
from kv_transfer.cuda_ipc import driver, wire
from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from kv_transfer.transport import TransportConfig, Window, describe, make_receiver, make_sender, why_unusable
from protocol.errors import ChannelLost, ConfigError, MalformedFrame, TicketRejected, TransportRefused

OFFER = wire.Offer(nbytes=4096, allocation=8192, offset=512, address=1 << 40, uuid=b"u" * 16, handle=b"h" * 64)
SOMEWHERE = DeviceMemory(4096, 4096, 0)
BLOCK = 4096


# --- without CUDA -------------------------------------------------------------------------------------------------


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-is-not-here.so.1")
    words = "cuda_ipc needs NVIDIA's driver: .*libcuda-is-not-here"
    assert "needs NVIDIA's driver" in str(why_unusable("cuda_ipc"))
    assert describe("cuda_ipc").startswith("cuda_ipc: cuda_ipc needs NVIDIA's driver")
    for memory in (memoryview(bytearray(8)), SOMEWHERE):
        with pytest.raises(ConfigError, match=words):
            make_receiver("cuda_ipc://*", memory)
        with pytest.raises(ConfigError, match=words):
            make_sender("cuda_ipc", memory)
    assert listen_on_device("auto", "127.0.0.1", SOMEWHERE, TransportConfig()) is None
    with pytest.raises(ConfigError, match=words):
        listen_on_device("cuda_ipc", "127.0.0.1", SOMEWHERE, TransportConfig())
    assert listen_on_device("tcp", "127.0.0.1", SOMEWHERE, TransportConfig()) is None


def test_a_library_that_is_not_the_driver_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    assert "needs NVIDIA's driver" in str(why_unusable("cuda_ipc"))


@pytest.mark.parametrize("field", ["address", "nbytes", "device"])
def test_memory_of_a_device_names_what_is_wrong_with_it(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least") as caught:
        replace(SOMEWHERE, **{field: -1})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_an_offer_comes_as_it_went() -> None:
    assert wire.parse_offer(OFFER.pack()) == OFFER
    assert len(OFFER.pack()) == wire.OFFER.size


@pytest.mark.parametrize(
    "data",
    [
        bytes(wire.OFFER.size),
        b"KVSO" + OFFER.pack()[4:],
        replace(OFFER, nbytes=0).pack(),
        replace(OFFER, nbytes=8193).pack(),
        replace(OFFER, offset=4097).pack(),
        replace(OFFER, offset=(1 << 64) - 1).pack(),
        replace(OFFER, allocation=1 << 63).pack(),
    ],
)
def test_an_offer_outside_its_allocation_is_none(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        wire.parse_offer(data)


ALL = ("tcp://h:1", "shm://x", "cuda_ipc://y")


def test_it_is_the_first_choice_where_both_can() -> None:
    assert schemes_of("auto")[0] == "cuda_ipc"
    chooser = Chooser("auto", reach=lambda _: None)
    assert chooser.choose(ALL) == "cuda_ipc://y"
    here = Chooser("auto", {"cuda_ipc": "the pool is in host memory"}, reach=lambda _: None)
    assert here.choose(ALL) == "shm://x"
    assert (chooser.fallbacks, here.fallbacks) == (0, 1)
    with pytest.raises(ConfigError, match="transport 'cuda_ipc' cannot be used: the pool is in host memory"):
        Chooser("cuda_ipc", {"cuda_ipc": "the pool is in host memory"})


def test_who_refused_it_is_not_asked_again() -> None:
    chooser = Chooser("auto", reach=lambda _: None)
    assert chooser.choose(ALL) == "cuda_ipc://y"
    chooser.avoid("cuda_ipc://y", "no peer access")
    assert [chooser.choose(ALL), chooser.choose(ALL)] == ["shm://x"] * 2
    assert chooser.fallbacks == 0  # told of once already, when it was the best
    chooser.forget(ALL)
    assert chooser.choose(ALL) == "shm://x"
    assert chooser.choose(("cuda_ipc://z", "tcp://h:2")) == "cuda_ipc://z"
    with pytest.raises(ChannelLost, match="cuda_ipc: no peer access"):
        chooser.choose(("cuda_ipc://y",))


async def test_auto_does_not_try_it_on_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    receiver = listen("auto", "127.0.0.1", memoryview(bytearray(64)), TransportConfig())
    await receiver.close()
    assert not caplog.records
    with pytest.raises(ConfigError):
        listen("cuda_ipc", "127.0.0.1", memoryview(bytearray(64)), TransportConfig())


# --- with a stand-in for the driver -------------------------------------------------------------------------------


async def test_nothing_is_held_after_it_is_closed(cuda: Path, harbor, quay) -> None:
    before = held(cuda)
    here, there = quay("cuda_ipc", 4, BLOCK), harbor("cuda_ipc", 4, BLOCK)
    await here.ship(there.address, there.open([1]), [(0, 1)])
    assert held(cuda) > before
    await here.sender.close()
    await there.receiver.close()
    assert held(cuda) == before
    with pytest.raises(ConfigError, match="listen"):
        make_receiver(harbor("cuda_ipc", 1, BLOCK).address, as_pool("cuda_ipc", memoryview(bytearray(8))))


async def test_checksums_are_refused_at_once(cuda: Path) -> None:
    summed = TransportConfig(checksum=True)
    for make in (make_sender, lambda scheme, *rest: make_receiver(f"{scheme}://*", *rest)):
        with pytest.raises(ConfigError, match="no checksums"):
            make("cuda_ipc", SOMEWHERE, summed)


async def test_a_pool_that_cannot_be_shared_is_refused_at_once(cuda: Path) -> None:
    before = held(cuda)
    set_up(cuda, fail_handles=1)
    with pytest.raises(ConfigError, match="cannot be shared between processes: cuIpcGetMemHandle: invalid argument"):
        make_sender("cuda_ipc", SOMEWHERE)
    set_up(cuda, devices=0)
    assert why_unusable("cuda_ipc") == "cuda_ipc needs a GPU: cuInit: no CUDA-capable device is detected (100)"
    assert held(cuda) == before


async def test_gpus_without_peer_access_turn_each_other_away(cuda: Path, harbor) -> None:
    set_up(cuda, devices=2)
    there = harbor("cuda_ipc", 4, BLOCK)
    pool = np.ones((4, BLOCK), np.uint8)
    sender = make_sender("cuda_ipc", DeviceMemory(pool.ctypes.data, pool.nbytes, 1))
    try:
        set_up(cuda, devices=2, peers=0)
        ticket = there.open([1])
        with pytest.raises(TransportRefused, match="no peer access between the two GPUs"):
            await sender.ship(there.address, ticket, [Span(0, BLOCK, BLOCK)], [(1, GENERATION)])
        assert there.poisoned
        set_up(cuda, devices=2)
        await sender.ship(there.address, ticket, [Span(0, BLOCK, BLOCK)], [(1, GENERATION)])
        assert (there.pool[1] == 1).all()
    finally:
        await sender.close()


async def test_a_copy_that_fails_lands_nothing_and_frees_the_source(cuda: Path, harbor, quay) -> None:
    here, there = quay("cuda_ipc", 8, BLOCK), harbor("cuda_ipc", 8, BLOCK)
    await here.ship(there.address, there.open([0]), [(0, 0)])
    await until(lambda: there.landed)
    ticket = there.open([1, 2])
    set_up(cuda, fail_copies=1)
    with pytest.raises(TicketRejected, match="cuMemcpyAsync: an illegal memory access"):
        await here.ship(there.address, ticket, [(1, 1), (3, 2)])
    await until(lambda: there.broken)
    assert isinstance(there.broken[0][1], ChannelLost)
    assert len(there.landed) == 1
    set_up(cuda)
    await here.ship(there.address, there.open([5]), [(5, 5)])
    assert (there.pool[5] == here.pool[5]).all()


async def test_between_processes_the_handle_is_opened_and_quiet_is_proved(cuda: Path, start: Start, harbor) -> None:
    there = harbor("cuda_ipc", MANY, LARGE)
    far = await start("send", scheme="cuda_ipc", value=1, timeout=10, cuda=str(cuda))
    await far.hear()

    def ask(blocks: list[int]) -> bytes:
        ticket = there.open(blocks)
        far.tell(address=there.address, ticket=ticket.hex(), blocks=blocks, generation=GENERATION)
        return ticket

    ticket = ask([3, 5])
    assert (await far.hear())["result"] == "shipped"
    await there.receiver.close_window(ticket)
    assert (there.pool[[3, 5]] == 1).all()
    assert (there.pool[[2, 4]] == POISON).all()
    for _ in range(40):
        there.poison()
        there.landed.clear()
        ticket = ask(list(range(MANY)))
        await until(lambda: there.pool[0, -1] != POISON)
        await there.receiver.close_window(ticket)
        midway = (there.pool[:, -1] == POISON).any()
        there.poison()
        result = (await far.hear())["result"]
        assert there.poisoned
        if midway:
            assert result == "ticket_rejected"
            break
    else:
        pytest.fail("the ship was over too soon every time")
    # A sender that dies: its connection ends, and the receiver goes on.
    far.signal(signal.SIGKILL)
    await far.process.wait()
    here = make_sender("cuda_ipc", as_pool("cuda_ipc", memoryview(there.pool)))
    await here.ship(there.address, there.open([1]), [Span(0, LARGE, LARGE)], [(1, GENERATION)])
    await here.close()


# --- with CUDA ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_blocks_cross_from_pool_to_pool_on_the_gpu(start: Start) -> None:
    """From another process, whose handle is opened, and from this one, whose is not."""
    pool = torch.full((MANY, LARGE), POISON, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    receiver = make_receiver("cuda_ipc://*", DeviceMemory(pool.data_ptr(), pool.nbytes, 0))
    far = await start("send", scheme="cuda_ipc", value=1, timeout=10)
    try:
        await far.hear()
        for blocks in ([3, 5], list(range(MANY))):
            ticket = secrets.token_bytes(16)
            window = Window(ticket, tuple(blocks), (GENERATION,) * len(blocks), LARGE)
            receiver.open(window, lambda _: None, lambda *_: None)
            far.tell(address=receiver.address, ticket=ticket.hex(), blocks=blocks, generation=GENERATION)
            assert (await far.hear())["result"] == "shipped"
            assert bool((pool[blocks] == 1).all())
            assert bool((pool[2] == POISON).all()) == (len(blocks) == 2)
            await receiver.close_window(ticket)
        own = torch.full((2, LARGE), 7, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        sender = make_sender("cuda_ipc", DeviceMemory(own.data_ptr(), own.nbytes, 0))
        ticket = secrets.token_bytes(16)
        receiver.open(Window(ticket, (9,), (GENERATION,), LARGE), lambda _: None, lambda *_: None)
        await sender.ship(receiver.address, ticket, [Span(LARGE, 9 * LARGE, LARGE)], [(9, GENERATION)])
        assert bool((pool[9] == 7).all())
        await sender.close()
    finally:
        await asyncio.wait_for(receiver.close(), 10.0)
