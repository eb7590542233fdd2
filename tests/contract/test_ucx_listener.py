"""A UCX receiver that strangers talk to: they are turned away, and the others are served on."""

import asyncio
import secrets
import socket
import struct
import threading

import psutil
import pytest
from ferry import GENERATION, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ucx_here import need_ucx

from kv_transfer.tcp.address import parse
from kv_transfer.transport import make_receiver
from kv_transfer.ucx import wire
from kv_transfer.ucx.address import as_tcp
from kv_transfer.ucx.library import library
from kv_transfer.ucx.wire import Hello
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, ConfigError, VersionMismatch

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
    return wire.pack_hello(Hello(wire.ucx_release(library().version), worker))


def announced(**change: int) -> bytes:
    values = {"index": 0, "count": 1, "spans": 1, "blocks": 1} | change
    head = wire.PART.pack(wire.PART_MAGIC, bytes(16), 5, *values.values())
    return head + wire.SPAN.pack(0, BLOCK) + wire.BLOCK.pack(0, GENERATION)


STRANGERS = {
    "nothing": lambda: b"",
    "http": lambda: b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n",
    "other version": lambda: wire.HELLO.pack(wire.HELLO_MAGIC, 7, 9, 1, 1, 4) + b"wxyz",
    "other ucx": lambda: wire.pack_hello(Hello((1, 1), b"wxyz")),
    "endless address": lambda: wire.HELLO.pack(wire.HELLO_MAGIC, 1, 1, 1, 1, 65535),
    "no address": lambda: wire.HELLO.pack(wire.HELLO_MAGIC, 1, 1, 1, 1, 0),
    "no part": lambda: hello() + bytes(64),
    "part of none": lambda: hello() + announced(count=0),
    "part beyond the last": lambda: hello() + announced(index=1),
    "too many spans": lambda: hello() + announced(spans=1 << 20),
    "no blocks": lambda: hello() + announced(blocks=0),
    "empty span": lambda: hello() + announced()[: wire.PART.size] + wire.SPAN.pack(0, 0) + wire.BLOCK.pack(0, 1),
    "unknown ticket": lambda: hello() + announced(),
    "half a part": lambda: hello() + announced()[:-5],
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_strangers_are_turned_away_and_others_served(harbor, quay, kind: str) -> None:
    there, here = harbor("ucx", 4, BLOCK), quay("ucx", 4, BLOCK)
    heard = await asyncio.to_thread(talk, there.address, STRANGERS[kind]())
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
        (wire.HELLO.pack(wire.HELLO_MAGIC, 7, 9, 1, 1, 4) + b"wxyz", VersionMismatch, "speaks 7 to 9"),
        (wire.pack_hello(Hello((1, 1), b"wxyz")), VersionMismatch, r"peer runs UCX 1\.1, this process UCX"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Exception, "not a hello of the UCX transport"),
        (b"KVUH", ChannelLost, "cannot connect"),
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
        reader.feed_data(wire.pack_part(bytes(range(16)), part))
        return await wire.read_part(reader)

    assert asyncio.run(there_and_back()) == (bytes(range(16)), part)
    assert struct.calcsize("!4s16sQHHII") == wire.PART.size
