"""A shared-memory listener that strangers talk to, memory that will not do, and nothing left behind."""

import asyncio
import fcntl
import gc
import os
import socket
import threading
from pathlib import Path

import pytest
import uvloop
from caller import hello_of
from ferry import GENERATION, Harbor, Quay, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.shared_memory import allocate
from kv_transfer.shm import endpoint, sealed, wire
from kv_transfer.shm.ledger import LEDGER_BYTES, SLOTS, WORDS, ReceiverLedger, SenderLedger
from kv_transfer.span import Span
from kv_transfer.transport import TransportConfig, make_receiver, make_sender, why_unreachable
from protocol.errors import ChannelLost, ConfigError

BLOCK = 4096
HELLO = hello_of("shm")


def memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def dial(address: str) -> socket.socket:
    connection = endpoint.connect(address)
    connection.settimeout(10)
    return connection


def hear_all(connection: socket.socket) -> bytes:
    heard = b""
    try:
        while piece := connection.recv(4096):
            heard += piece
    except ConnectionError:
        pass
    return heard


def talk(address: str, words: bytes, descriptors: list[int]) -> bytes:
    """Say hello, then ``words`` with these descriptors, hang up our half, hear all that comes after it."""
    with dial(address) as connection:
        try:
            connection.sendall(HELLO)
            assert connection.recv(len(HELLO)) == HELLO
            if words:
                socket.send_fds(connection, [words], descriptors)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        return hear_all(connection)


class Stranger:
    """A peer that does as it likes, with a pool and a ledger of its own."""

    def __init__(self, address: str) -> None:
        self.connection = dial(address)
        self.ledger = SenderLedger()
        self.pool = memfd(4 * BLOCK)
        own = sealed.reopen(self.ledger.descriptor, writable=True)
        self.connection.sendall(HELLO)
        assert self.connection.recv(100) == HELLO
        socket.send_fds(self.connection, [wire.pack_offer(4 * BLOCK)], [self.pool, own])
        os.close(own)
        assert self.connection.recv(100) == wire.pack_welcome(None)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.ledger.close()
        os.close(self.pool)

    def say(self, words: bytes) -> bytes:
        """Send ``words`` and hear one answer, or nothing when the listener hangs up."""
        self.connection.sendall(words)
        return self.connection.recv(1000)


NOISE = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda tail: wire.pack_offer(BLOCK) + tail),
    st.binary(min_size=8, max_size=8).map(lambda tail: b"KVSO" + tail),
)


async def test_garbage_leaves_the_listener_up(harbor, quay) -> None:
    there, here = harbor("shm", 4, BLOCK), quay("shm", 4, BLOCK)
    ticket = there.open([1])
    given_fds = [os.open(os.devnull, os.O_RDONLY), memfd(BLOCK), memfd(LEDGER_BYTES)]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(NOISE, st.lists(st.sampled_from(given_fds), max_size=6))
    def speak(words: bytes, descriptors: list[int]) -> None:
        talk(there.address, words, descriptors)

    before = len(os.listdir("/proc/self/fd"))
    await asyncio.to_thread(speak)
    for descriptor in given_fds:
        os.close(descriptor)
    # Of all the descriptors that came, not one is kept.
    await until(lambda: len(os.listdir("/proc/self/fd")) < before)
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])
    assert (there.pool[1] == here.pool[0]).all()


@pytest.mark.parametrize("fault", ["not sealed", "too small", "no memfd", "ledger", "one", "none"])
async def test_a_strangers_memory_that_will_not_do_is_refused(harbor, fault: str) -> None:
    there = harbor("shm", 4, BLOCK)
    pool, ledger = memfd(BLOCK), memfd(LEDGER_BYTES)
    given_fds, words, nbytes = [pool, ledger], "", BLOCK
    match fault:
        case "not sealed":
            os.close(pool)
            given_fds[0], words = memfd(BLOCK, 0), "not sealed against shrinking"
        case "too small":
            nbytes, words = 2 * BLOCK, "has 4096 bytes, 8192 were announced"
        case "no memfd":
            os.close(pool)
            given_fds[0], words = os.open("/proc/self/exe", os.O_RDONLY), "is no memfd"
        case "ledger":
            os.close(ledger)
            given_fds[1], words = memfd(BLOCK), f"has 4096 bytes, {LEDGER_BYTES} were announced"
        case "one":
            os.close(given_fds.pop())
            words = "an offer with 1 descriptors"
        case "none":
            while given_fds:
                os.close(given_fds.pop())
            words = "an offer with 0 descriptors"
    heard = await asyncio.to_thread(talk, there.address, wire.pack_offer(nbytes), given_fds)
    for descriptor in given_fds:
        os.close(descriptor)
    refused, length = wire.parse_welcome(heard[: wire.WELCOME.size])
    assert refused
    assert words in heard[wire.WELCOME.size :].decode()
    assert length == len(heard) - wire.WELCOME.size


async def test_a_known_ticket_does_not_help_a_liar(harbor, quay) -> None:
    there, here = harbor("shm", 4, BLOCK), quay("shm", 4, BLOCK)
    ticket = there.open([1, 2])
    good = [(1, GENERATION)]
    lies = [
        wire.pack_frame(ticket, 1, 0, [Span(0, BLOCK, BLOCK), Span(0, 2 * BLOCK, BLOCK)], good),
        wire.pack_frame(ticket, 1, 0, [Span(0, BLOCK, 1)] * 4096, good),
        wire.pack_frame(ticket, 1, 0, [Span(0, BLOCK, BLOCK)], [(1, GENERATION + 1)]),
        wire.pack_frame(ticket, 1, 0, [Span(0, 3 * BLOCK, BLOCK)], [(3, GENERATION)]),
        # Not what the ledger says.
        wire.pack_frame(ticket, 2, 0, [Span(0, BLOCK, BLOCK)], good),
        wire.pack_frame(ticket, 1, 1, [Span(0, BLOCK, BLOCK)], good),
    ]
    with Stranger(there.address) as stranger:
        slot = stranger.ledger.take(1)
        assert slot == SLOTS - 1
        for lie in lies:
            _, verdict, _ = wire.parse_answer((await asyncio.to_thread(stranger.say, lie))[: wire.ANSWER.size])
            assert verdict is wire.Verdict.REFUSED
    outside = [
        wire.pack_frame(ticket, 1, 0, [Span(4 * BLOCK, BLOCK, BLOCK)], good),
        wire.pack_frame(ticket, 1, 0, [Span(3 * BLOCK + 1, BLOCK, BLOCK)], good),
        wire.FRAME.pack(wire.FRAME_MAGIC, ticket, 1, SLOTS, 1, 1),
        wire.FRAME.pack(wire.FRAME_MAGIC, ticket, 1, 0, wire.MAX_SPANS + 1, 1),
        wire.FRAME.pack(wire.FRAME_MAGIC, ticket, 1, 0, 1, 0),
    ]
    for lie in outside:
        with Stranger(there.address) as stranger:
            assert not await asyncio.to_thread(stranger.say, lie)
    assert there.poisoned
    assert not there.landed
    await here.ship(there.address, ticket, [(0, 1), (3, 2)])


async def test_another_users_process_is_turned_away(harbor, quay, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = harbor("shm", 1, BLOCK), quay("shm", 1, BLOCK)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ChannelLost, match="user"):
        await here.ship(there.address, there.open([0]), [(0, 0)])
    assert "user" in str(why_unreachable(there.address))


async def test_connections_are_bounded(harbor, quay) -> None:
    there = harbor("shm", 2, BLOCK, TransportConfig(max_connections=2))
    with Stranger(there.address), Stranger(there.address), pytest.raises(ChannelLost):
        await quay("shm", 1, BLOCK).ship(there.address, bytes(16), [(0, 0)])
    here, ticket = quay("shm", 1, BLOCK), there.open([0])
    while not there.landed:
        try:
            await here.ship(there.address, ticket, [(0, 0)])
        except ChannelLost:
            continue
        await until(lambda: there.landed)


async def test_the_pool_is_given_for_reading_only(harbor) -> None:
    memory, descriptor = allocate(BLOCK)
    again = sealed.reopen(descriptor, writable=True)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(again, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)
    os.close(again)
    os.close(descriptor)
    memory[0] = 1


async def test_a_sender_needs_shared_memory_of_its_very_size() -> None:
    private, small = memoryview(bytearray(BLOCK)), memfd(BLOCK // 2)
    with pytest.raises(ConfigError, match="shared memory"):
        make_sender("shm", private)
    with pytest.raises(ConfigError, match="2048 bytes, 4096 were"):
        make_sender("shm", private, descriptor=small)
    os.close(small)


async def test_nothing_is_left_after_a_hundred_cycles() -> None:
    async def cycle() -> None:
        there, here = Harbor("shm", 4, BLOCK), Quay("shm", 4, BLOCK)
        ticket = there.open([1, 2])
        await here.ship(there.address, ticket, [(0, 1)])
        await there.receiver.close_window(ticket)
        await here.sender.close()
        await there.receiver.close()

    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    await cycle()
    before = held()
    for _ in range(100):
        await cycle()
    # Less is no leak: what earlier tests left to the garbage collector may have gone meanwhile. Nor is what another
    # thread has for a moment.
    await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_the_workers_loop() -> None:
    async def cycle() -> None:
        there, here = Harbor("shm", 4, BLOCK), Quay("shm", 4, BLOCK)
        ticket = there.open([1, 2])
        await here.ship(there.address, ticket, [(0, 1)])
        await here.ship(there.address, ticket, [(3, 2)])
        assert (there.pool[1:3] == here.pool[[0, 3]]).all()
        await there.receiver.close()
        with pytest.raises(ChannelLost):
            await here.ship(there.address, ticket, [(0, 1)])
        await here.sender.close()

    uvloop.run(cycle())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    uvloop.run(cycle())
    # The pools go with their last view.
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("address", ["shm://", "shm://a/b", "shm://" + "a" * 65, "tcp://h:1"])
def test_a_malformed_address_names_itself(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint.name_of(address)
    assert address in caught.value.message


async def test_reach(harbor) -> None:
    there = harbor("shm", 1, BLOCK)
    assert why_unreachable(there.address) is None
    await there.receiver.close()
    assert "cannot connect" in str(why_unreachable(there.address))
    assert why_unreachable("tcp://192.0.2.1:1") is None
    # The name is free again.
    second = make_receiver(there.address, memoryview(there.pool))
    await second.close()


def test_a_struck_entry_is_quiet_only_between_two_looks() -> None:
    sender = SenderLedger()
    receiver = ReceiverLedger(sealed.reopen(sender.descriptor, writable=True))
    slot, other = sender.take(7), sender.take(8)
    assert receiver.enter(slot, 7)
    sender.strike(slot)
    sender.strike(other)
    assert sender.is_quiet(other)
    assert not sender.is_quiet(slot)
    # What was read after the strike may be anything, and says so.
    assert not receiver.leave(slot, 7, BLOCK)
    assert sender.copied(slot) == 0
    assert sender.is_quiet(slot)
    assert not receiver.enter(slot, 7)
    sender.give_back(slot)
    assert sender.take(9) == slot
    assert not receiver.enter(slot, 7)
    assert receiver.enter(slot, 9)
    assert receiver.leave(slot, 9, 5)
    assert sender.copied(slot) == 5
    # A receiver that dies between two looks gives the entry back.
    assert receiver.enter(slot, 9)
    sender.strike(slot)
    assert not sender.is_quiet(slot)
    receiver.close()
    assert sender.is_quiet(slot)
    sender.close()
    assert LEDGER_BYTES == SLOTS * WORDS * 8
