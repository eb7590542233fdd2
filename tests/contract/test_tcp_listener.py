"""A TCP listener that strangers talk to, connections that come and go, and nothing left behind."""

import asyncio
import queue
import secrets
import socket
import struct
import threading
from pathlib import Path

import psutil
import pytest
from caller import hello_of
from ferry import GENERATION, Harbor, Quay, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.tcp import wire
from kv_transfer.tcp.address import parse
from kv_transfer.tcp.destination import EXPRESS_BYTES
from kv_transfer.transport import TransportConfig, Window, make_receiver
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, ConfigError

BLOCK = 4096
HELLO = hello_of("tcp")


def dial(address: str) -> socket.socket:
    connection = socket.create_connection(parse(address), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def talk(address: str, words: bytes) -> bytes:
    """Say ``words``, hang up our half, and hear all that comes until the listener hangs up."""
    heard = b""
    with dial(address) as connection:
        try:
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                heard += piece
        except OSError:
            pass
    return heard


def huge(**fields: int) -> bytes:
    values = {"parts": 1, "part": 0, "spans": 1, "blocks": 1, "payload": BLOCK} | fields
    order = (values["part"], values["parts"], values["spans"], values["blocks"], values["payload"])
    return HELLO + struct.pack("!4s16sQHHIIQ", b"KVFR", bytes(16), 1, *order)


NOISE = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda tail: HELLO + tail),
    st.binary(min_size=48, max_size=300).map(lambda tail: HELLO + b"KVFR" + tail),
)


async def test_garbage_leaves_the_listener_up_and_small(harbor, quay) -> None:
    there, here = harbor("tcp", 4, BLOCK), quay("tcp", 4, BLOCK)
    ticket = there.open([1])
    fixed = [huge(spans=1 << 31), huge(blocks=1 << 31), huge(payload=1 << 63), huge(parts=0), huge(part=9)]
    # Allowed lengths, unknown ticket: the tables are 1.8 MB and the payload 4 GiB, and none of it may be kept.
    fixed.append(huge(spans=1 << 16, blocks=1 << 16, payload=1 << 32))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(NOISE)
    def speak(words: bytes) -> None:
        heard = talk(there.address, words)
        if not words.startswith(b"KVFH"):
            assert not heard

    def all_of_it() -> int:
        before = psutil.Process().memory_info().rss
        for words in fixed * 4:
            talk(there.address, words)
        speak()
        return psutil.Process().memory_info().rss - before

    grown = await asyncio.to_thread(all_of_it)
    assert grown < 32 << 20
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])
    assert (there.pool[1] == here.pool[0]).all()


async def test_a_known_ticket_does_not_help_garbage(harbor, quay) -> None:
    there, here = harbor("tcp", 4, BLOCK), quay("tcp", 4, BLOCK)
    ticket = there.open([1, 2])
    lying = [
        Part(1, 0, 1, [(BLOCK, BLOCK), (2 * BLOCK, BLOCK)], [(1, GENERATION)]),
        Part(2, 0, 1, [(1 << 63, BLOCK)], [(1, GENERATION)]),
        Part(3, 0, 1, [(BLOCK, 1)] * 4096, [(1, GENERATION)]),
        Part(4, 0, 1, [(BLOCK, BLOCK)] * 2, [(1, GENERATION)] * 2),
    ]
    for part in lying:
        frame = HELLO + wire.pack_frame(ticket, part) + bytes(sum(size for _, size in part.targets))
        heard = await asyncio.to_thread(talk, there.address, frame)
        verdict, length = wire.parse_answer(heard[len(HELLO) : len(HELLO) + wire.ANSWER.size], part)
        assert verdict is wire.Verdict.REFUSED
        assert length
    head = bytearray(wire.pack_frame(ticket, Part(5, 0, 1, [(BLOCK, BLOCK)], [(1, GENERATION)])))
    head[wire.FRAME.size - 8 : wire.FRAME.size] = (2 * BLOCK).to_bytes(8)
    assert await asyncio.to_thread(talk, there.address, HELLO + bytes(head)) == HELLO
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1), (3, 2)])


async def test_half_a_frame_breaks_its_window(harbor) -> None:
    there = harbor("tcp", 4, BLOCK)
    ticket = there.open([1])
    part = Part(1, 0, 1, [(BLOCK, BLOCK)], [(1, GENERATION)])
    words = HELLO + wire.pack_frame(ticket, part) + bytes(BLOCK // 2)
    assert await asyncio.to_thread(talk, there.address, words) == HELLO
    await until(lambda: there.broken)
    assert there.broken[0][0] == ticket
    assert not there.landed


async def test_connections_are_bounded(harbor, quay) -> None:
    there = harbor("tcp", 2, BLOCK, TransportConfig(max_connections=3))
    kept = [dial(there.address) for _ in range(3)]
    try:
        for connection in kept:
            connection.sendall(HELLO)
            assert await asyncio.to_thread(connection.recv, 99) == HELLO
        with dial(there.address) as turned_away:
            assert await asyncio.to_thread(turned_away.recv, 1) == b""
        with pytest.raises(ChannelLost):
            await quay("tcp", 1, BLOCK).ship(there.address, bytes(16), [(0, 0)])
    finally:
        for connection in kept:
            connection.close()
    here, ticket = quay("tcp", 1, BLOCK), there.open([0])
    while not there.landed:
        try:
            await here.ship(there.address, ticket, [(0, 0)])
        except ChannelLost:
            continue
        await until(lambda: there.landed)


@pytest.mark.parametrize("small_first", [True, False])
async def test_a_full_receiver_is_served_over_the_lane_that_there_is(harbor, quay, small_first: bool) -> None:
    large = 2 * EXPRESS_BYTES // BLOCK
    there = harbor("tcp", 2 * large, BLOCK, TransportConfig(max_connections=1))
    here = quay("tcp", large, BLOCK)
    ticket = there.open(range(2 * large))
    sizes = [1, large, 1, large - 2] if small_first else [large, 1, large - 2]
    first = 0
    for count in sizes:
        await here.ship(there.address, ticket, [(index, first + index) for index in range(count)])
        assert (there.pool[first : first + count] == here.pool[:count]).all()
        first += count


async def test_frames_that_come_without_waiting_are_served_in_turn(harbor) -> None:
    there = harbor("tcp", 40, BLOCK)
    ticket = there.open(range(40))
    parts = [Part(block, 0, 1, [(block * BLOCK, BLOCK)], [(block, GENERATION)]) for block in range(40)]
    stale = [Part(part.ship + 100, 0, 1, part.targets, [(part.index, GENERATION + 1)]) for part in parts]
    words = b"".join(
        wire.pack_frame(ticket, part) + bytes([index + 1]) * BLOCK
        for index, pair in enumerate(zip(parts, stale, strict=True))
        for part in pair
    )
    await asyncio.to_thread(talk, there.address, HELLO + words)
    await until(lambda: len(there.landed) == 40)
    assert (there.pool[:, 0] == range(1, 41)).all()
    assert (there.pool[:, 0] == there.pool.T).all()


async def test_a_receiver_that_came_back_on_its_port_is_found_again(harbor, quay) -> None:
    here, first = quay("tcp", 4, BLOCK), harbor("tcp", 4, BLOCK)
    await here.ship(first.address, first.open([1]), [(0, 1)])
    address = first.address
    await first.receiver.close()
    second = harbor("tcp", 4, BLOCK)
    await second.receiver.close()
    second.receiver = make_receiver(address, memoryview(second.pool))
    try:
        await here.ship(address, second.open([2]), [(0, 2)])
        assert (second.pool[2] == here.pool[0]).all()
    finally:
        await second.receiver.close()


async def test_an_idle_connection_that_was_closed_a_moment_ago_costs_nothing(harbor, quay) -> None:
    here, told, stop = quay("tcp", 4, BLOCK), queue.SimpleQueue[tuple[str, bytes]](), threading.Event()

    async def elsewhere() -> None:
        first = Harbor("tcp", 4, BLOCK)
        told.put((first.address, first.open([1])))
        await asyncio.to_thread(stop.wait)
        await first.receiver.close()

    other = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    other.start()
    try:
        address, ticket = told.get()
        await here.ship(address, ticket, [(0, 1)])
    finally:
        stop.set()
        # The loop stands still meanwhile, and cannot have seen the end of the connection when the next ship starts.
        other.join()
    pool = bytearray(4 * BLOCK)
    second = make_receiver(address, memoryview(pool))
    try:
        second.open(Window(ticket, (2,), (GENERATION,), BLOCK), lambda _: None, lambda *_: None)
        await here.ship(address, ticket, [(0, 2)])
        assert pool[2 * BLOCK : 3 * BLOCK] == here.pool[0].tobytes()
    finally:
        await second.close()


async def test_nothing_is_left_after_a_hundred_cycles() -> None:
    async def cycle() -> None:
        there, here = Harbor("tcp", 4, BLOCK), Quay("tcp", 4, BLOCK)
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


@pytest.mark.parametrize(
    "address", ["tcp://", "tcp://host", "tcp://:80", "tcp://h:99999", "tcp://h:1/path", "udp://h:1"]
)
async def test_a_malformed_address_names_itself(address: str, quay) -> None:
    with pytest.raises(ConfigError) as caught:
        await quay("tcp", 1, BLOCK).ship(address, secrets.token_bytes(16), [(0, 0)])
    assert address in caught.value.message


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_ipv6(quay) -> None:
    there = Harbor("tcp", 1, BLOCK)
    await there.receiver.close()
    there.receiver = make_receiver("tcp://[::1]:0", memoryview(there.pool))
    try:
        assert there.address.startswith("tcp://[::1]:")
        await quay("tcp", 1, BLOCK).ship(there.address, there.open([0]), [(0, 0)])
    finally:
        await there.receiver.close()


async def test_a_host_name_is_looked_up(harbor, quay) -> None:
    there, here = harbor("tcp", 1, BLOCK), quay("tcp", 1, BLOCK)
    port = parse(there.address)[1]
    await here.ship(f"tcp://localhost:{port}", there.open([0]), [(0, 0)])
    with pytest.raises(ChannelLost, match="does not resolve"):
        await here.ship("tcp://no.such.host.invalid:1", secrets.token_bytes(16), [(0, 0)])
