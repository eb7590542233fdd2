"""A UCX receiver that strangers talk to: they are turned away, and the others are served on."""

import asyncio
import secrets
import socket
import struct
import threading

import numpy as np
import psutil
import pytest
from caller import Caller, hello_of, party
from ferry import GENERATION, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ucx_here import need_ucx

from kv_transfer import hello as greeting
from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig, make_receiver
from kv_transfer.ucx import wire
from kv_transfer.ucx.address import as_tcp
from kv_transfer.ucx.channel import Channel, Stop
from kv_transfer.ucx.library import Context, library
from kv_transfer.ucx.wire import Worker
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, ConfigError, MalformedFrame, VersionMismatch

pytestmark = pytest.mark.ucx

BLOCK = 4096


@pytest.fixture(autouse=True)
def ucx() -> None:
    need_ucx()


def talk(address: str, words: bytes) -> bytes:
    """Say ``words``, and hear all that comes until the listener hangs up."""
    heard = b""
    with socket.create_connection(parse(as_tcp(address)), timeout=10) as connection:
        try:
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                heard += piece
        except ConnectionError:
            pass
    return heard


def hello(worker: bytes = b"not an address") -> bytes:
    return hello_of("ucx") + wire.pack_worker(Worker(wire.ucx_release(library().version), worker))


def announced(ticket: bytes = bytes(16), nbytes: int = BLOCK, **change: int) -> bytes:
    values = {"index": 0, "count": 1, "spans": 1, "blocks": 1} | change
    head = wire.PART.pack(wire.PART_MAGIC, ticket, 5, *values.values())
    return head + wire.SPAN.pack(0, nbytes) + wire.BLOCK.pack(0, GENERATION)


STRANGERS = {
    "other ucx": lambda _: hello_of("ucx") + wire.pack_worker(Worker((1, 1), b"wxyz")),
    "endless address": lambda _: hello_of("ucx") + wire.WORKER.pack(wire.WORKER_MAGIC, 1, 1, 65535),
    "no address": lambda _: hello_of("ucx") + wire.WORKER.pack(wire.WORKER_MAGIC, 1, 1, 0),
    "no worker": lambda _: hello_of("ucx") + bytes(64),
    "no part": lambda _: hello() + bytes(64),
    "part of none": lambda ticket: hello() + announced(ticket, count=0),
    "part beyond the last": lambda ticket: hello() + announced(ticket, index=1),
    "too many spans": lambda ticket: hello() + announced(ticket, spans=1 << 20),
    "no blocks": lambda ticket: hello() + announced(ticket, blocks=0),
    "empty span": lambda ticket: hello() + announced(ticket, nbytes=0),
    "unknown ticket": lambda _: hello() + announced(),
    "half a part": lambda ticket: hello() + announced(ticket)[:-5],
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_strangers_are_turned_away_and_others_served(harbor, quay, kind: str) -> None:
    there, here = harbor("ucx", 4, BLOCK), quay("ucx", 4, BLOCK)
    ticket = there.open([0])
    heard = await asyncio.to_thread(talk, there.address, STRANGERS[kind](ticket))
    if kind == "unknown ticket":
        # Refused by its ticket, and the nonsense that stands for its UCX address has not been looked at.
        assert heard.endswith(b"unknown or closed ticket")
    assert there.poisoned
    await here.ship(there.address, there.open([1]), [(2, 1)])
    assert (there.pool[1] == here.pool[2]).all()


NOISE = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda tail: hello() + tail),
    st.binary(max_size=300).map(lambda tail: hello() + wire.PART_MAGIC + tail),
    st.integers(0, 200).map(lambda length: (hello() + announced())[:length]),
    st.sampled_from([1 << 16, 1 << 31, (1 << 32) - 1]).map(lambda many: hello() + announced(spans=many)),
    st.sampled_from([1 << 16, 1 << 31, (1 << 32) - 1]).map(lambda many: hello() + announced(blocks=many)),
)


async def test_garbage_leaves_the_listener_up_and_small(harbor, quay) -> None:
    there, here = harbor("ucx", 4, BLOCK), quay("ucx", 4, BLOCK)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(NOISE)
    def speak(words: bytes) -> None:
        talk(there.address, words)

    def all_of_it() -> int:
        before = psutil.Process().memory_info().rss
        speak()
        return psutil.Process().memory_info().rss - before

    assert await asyncio.to_thread(all_of_it) < 64 << 20
    assert there.poisoned
    await here.ship(there.address, there.open([1]), [(0, 1)])
    assert (there.pool[1] == here.pool[0]).all()


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (hello_of("ucx") + wire.pack_worker(Worker((1, 1), b"wxyz")), VersionMismatch, r"peer runs UCX 1\.1, this"),
        (hello_of("ucx") + b"HTTP/1.1 400 Bad Request\r\n\r\n", MalformedFrame, "not a worker on the UCX transport"),
        (hello_of("ucx")[:4], ChannelLost, "cannot connect"),
    ],
)
async def test_a_sender_meets_something_else(quay, words: bytes, error: type[Exception], match: str) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    here = quay("ucx", 1, BLOCK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error, match=match):
            await here.ship(f"ucx://127.0.0.1:{listener.getsockname()[1]}", secrets.token_bytes(16), [(0, 0)])
        thread.join()


async def test_closed_ends_leave_no_thread_port_or_descriptor(harbor, quay) -> None:
    async def once() -> int:
        there, here = harbor("ucx", 2, BLOCK), quay("ucx", 2, BLOCK)
        await here.ship(there.address, there.open([1]), [(0, 1)])
        await until(lambda: there.landed)
        await here.sender.close()
        await there.receiver.close()
        port = parse(as_tcp(there.address))[1]
        assert not [found for found in psutil.Process().net_connections("tcp") if found.laddr.port == port]
        assert not [found.name for found in threading.enumerate() if found.name.startswith("kv-ucx")]
        return psutil.Process().num_fds()

    await once()
    before = await once()
    for _ in range(3):
        assert await once() <= before


@pytest.mark.parametrize("address", ["ucx://nowhere", "ucx://127.0.0.1:0/path", "ucx://"])
async def test_addresses_that_will_not_do(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        make_receiver(address, memoryview(bytearray(8)))


def test_a_part_is_read_as_it_was_packed() -> None:
    part = Part(1 << 63, 2, 3, [(4096, 8192), (0, 4096)], [(1, 7), (2, 7), (0, 1 << 40)])

    async def there_and_back() -> tuple[bytes, Part]:
        reader = asyncio.StreamReader()
        words = wire.pack_part(bytes(range(16)), part)
        reader.feed_data(words)
        head = await wire.read_head(reader)
        assert wire.PART.size + head.table_bytes == len(words)
        return head.ticket, wire.parse_tables(head, words[wire.PART.size :])

    assert asyncio.run(there_and_back()) == (bytes(range(16)), part)
    assert struct.calcsize("!4s16sQHHII") == wire.PART.size


@pytest.mark.parametrize("knows_the_tag", [False, True])
async def test_ucx_takes_bytes_from_anybody_and_the_tag_is_what_a_stranger_cannot_know(
    harbor, knows_the_tag: bool
) -> None:
    config = TransportConfig(secret="the secret of this cluster")
    there = harbor("ucx", 1, BLOCK, config)
    ticket, part = there.open([0]), Part(1, 0, 1, [(0, BLOCK)], [(0, GENERATION)])
    ours, theirs = (np.full(BLOCK, value, np.uint8) for value in (1, 2))
    contexts = [Context(pool.ctypes.data, BLOCK, writable=False) for pool in (ours, theirs)]
    caller = await Caller.dial(there.address)
    met = await caller.hold(greeting.greet(party("ucx", config)))
    tag = int.from_bytes(met.key[:8])
    channel, stranger = Channel(contexts[0], tag), Channel(contexts[1], tag if knows_the_tag else 0)
    try:
        caller.say(wire.pack_worker(Worker(wire.ucx_release(library().version), channel.address())))
        worker = await wire.read_worker(caller.reader)
        channel.connect(worker.address)
        caller.say(wire.pack_part(ticket, part))
        assert (await wire.read_answer(caller.reader)).verdict is wire.Verdict.GO
        # Somebody has learned the address of the worker, which UCX connects to whoever has it.
        stranger.connect(worker.address)
        await stranger.move([(theirs.ctypes.data, BLOCK)], Stop(), receives=False)
        if knows_the_tag:
            await until(lambda: (there.pool == 2).all())
        else:
            await channel.move([(ours.ctypes.data, BLOCK)], Stop(), receives=False)
            await until(lambda: there.landed)
            assert (there.pool == 1).all()
    finally:
        caller.hang_up()
        await asyncio.gather(channel.close(), stranger.close())
        for context in contexts:
            context.free()
