"""The carried transports where neither library is: a stand-in for ucx-py shows what stands around the library."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ferry import POISON, SHALLOW, Harbor, Quay, until
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.carried import wire
from kv_transfer.carried.library import LIBRARIES, UCXX, Library
from kv_transfer.carried.sender import as_tcp
from kv_transfer.carried.staging import SLOT_BYTES, SLOTS, cut
from kv_transfer.carried.wire import Chunk, Kind
from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig, make_receiver, make_sender, why_unusable
from kv_transfer.windows import Part
from protocol.errors import (
    AuthenticationFailed,
    ChannelLost,
    ConfigError,
    IntegrityMismatch,
    MalformedFrame,
    TicketRejected,
    VersionMismatch,
)

STAND_IN = Path(__file__).with_name("stand_in")
ROOT = Path(__file__).parents[2]
BLOCK = 1 << 20
MANY = 6 * SLOTS
"""MANY blocks of BLOCK bytes: more than all slots hold."""
GUARDED = TransportConfig(secret="the secret of this cluster")


@pytest.fixture
def ucp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the ucxx transport find the stand-in, in this process and in the carriers, unless ucxx is really here."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not carriers()


def carriers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "kv_transfer.carried.child" in child.cmdline()
    ]


async def crosses(there: Harbor, here: Quay) -> None:
    there.poison()
    ticket = there.open(range(MANY))
    await here.ship(there.address, ticket, [(MANY - 1 - i, i) for i in range(MANY)])
    assert (there.pool == here.pool[::-1]).all()
    await there.receiver.close_window(ticket)


async def test_bytes_cross_and_a_dead_carrier_costs_one_ship(ucp, harbor, quay) -> None:
    config = replace(GUARDED, checksum=True)
    there, here = harbor("ucxx", MANY, BLOCK, config), quay("ucxx", MANY, BLOCK, config)
    await crosses(there, here)
    first, second = carriers()
    there.poison()
    ticket = there.open(range(MANY))
    ship = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(MANY)]))
    await until(lambda: not (there.pool[0] == POISON).all() or ship.done())
    first.kill()
    await asyncio.gather(ship, return_exceptions=True)
    assert ship.exception() is None or isinstance(ship.exception(), ChannelLost)
    await there.receiver.close_window(ticket)
    await crosses(there, here)
    await until(lambda: not second.is_running())


async def test_an_abort_in_mid_ship_leaves_the_line_in_step(ucp, harbor, quay) -> None:
    there, here = harbor("ucxx", MANY, BLOCK), quay("ucxx", MANY, BLOCK)
    await crosses(there, here)
    before = {carrier.pid for carrier in carriers()}
    ticket = there.open(range(MANY))
    ship = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(MANY)]))
    await until(lambda: (there.pool[0] == here.pool[0]).all() or ship.done())
    await here.sender.abort(ticket)
    await asyncio.gather(ship, return_exceptions=True)
    await there.receiver.close_window(ticket)
    with pytest.raises(TicketRejected, match="unknown or closed ticket"):
        await here.ship(there.address, secrets.token_bytes(16), [(0, 0)])
    await crosses(there, here)
    assert {carrier.pid for carrier in carriers()} == before


async def test_bytes_that_were_changed_never_land(ucp, harbor, quay, monkeypatch: pytest.MonkeyPatch) -> None:
    if UCXX.found() != "ucp":
        pytest.skip("the real library changes no byte")
    monkeypatch.setenv("STAND_IN_FLIPS", "1")
    config = replace(SHALLOW, checksum=True)
    there, here = harbor("ucxx", 2, BLOCK, config), quay("ucxx", 2, BLOCK, config)
    ticket = there.open([0, 1])
    with pytest.raises(IntegrityMismatch, match="has not the checksum"):
        await here.ship(there.address, ticket, [(0, 1)])
    await until(lambda: there.broken)
    assert isinstance(there.broken[0][1], IntegrityMismatch)
    plain = quay("ucxx", 2, BLOCK)
    with pytest.raises(TicketRejected, match="without a checksum"):
        await plain.ship(there.address, ticket, [(0, 0)])
    assert not there.landed


async def test_who_does_not_know_the_secret_starts_no_carrier(ucp, harbor, quay) -> None:
    there = harbor("ucxx", 2, BLOCK, GUARDED)
    for config in (SHALLOW, TransportConfig(secret="the secret of another one")):
        with pytest.raises(AuthenticationFailed):
            await quay("ucxx", 2, BLOCK, config).ship(there.address, there.open([0]), [(0, 0)])
        assert not carriers()
        await there.receiver.close_window(next(iter(there.receiver._book.tickets())))
    with pytest.raises(TicketRejected):
        await quay("ucxx", 2, BLOCK, GUARDED).ship(there.address, bytes(16), [(0, 0)])
    assert not [carrier for carrier in carriers() if "receive" in carrier.cmdline()]


PART = Part(5, 0, 1, [(0, BLOCK)], [(0, 7)])
ANNOUNCED = wire.pack(Kind.PART, wire.pack_part(bytes(16), PART))


def altered(**change: int) -> bytes:
    values = {"ship": 5, "index": 0, "count": 1, "spans": 1, "blocks": 1, "summed": 0} | change
    return wire.pack(
        Kind.PART, wire.PART.pack(bytes(16), *values.values()) + ANNOUNCED[wire.HEAD.size + wire.PART.size :]
    )


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n",
        wire.HEAD.pack(wire.MAGIC, 99, 0),
        wire.HEAD.pack(wire.MAGIC, Kind.PART, (1 << 32) - 1),
        wire.HEAD.pack(wire.MAGIC, Kind.INTRODUCTION, 1 << 20),
        wire.pack(Kind.TAKEN, b"\0"),
        altered(count=0),
        altered(index=1),
        altered(spans=1 << 20),
        altered(blocks=0),
        altered(blocks=2),
        altered(summed=2),
        wire.pack_chunk(Chunk(0, 1, b"")),
        ANNOUNCED + wire.pack_chunk(Chunk(0, 1, b"")),
    ],
)
async def test_strangers_are_turned_away(ucp, harbor, words: bytes) -> None:
    there = harbor("ucxx", 2, BLOCK)
    reader, writer = await asyncio.open_connection(*parse(as_tcp("ucxx", there.address)))
    writer.write(wire.party("ucxx", SHALLOW).hello() + words)
    # The listener hangs up: it waits for nothing, and starts no carrier.
    heard = await asyncio.wait_for(reader.read(), 10)
    assert (b"unknown or closed ticket" in heard) == words.startswith(ANNOUNCED)
    assert not carriers()
    writer.close()
    assert there.poisoned


@given(st.binary(max_size=64))
def test_no_bytes_are_taken_for_what_they_are_not(data: bytes) -> None:
    async def head() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        _, length = await wire.read_head(reader, frozenset(Kind))
        await wire.read_part_head(reader, length)

    with pytest.raises((MalformedFrame, asyncio.IncompleteReadError)):
        asyncio.run(head())
    if data:
        with pytest.raises((MalformedFrame, VersionMismatch)):
            wire.parse_introduction(data, "a release of more than sixty-four bytes, which no sixty-four can name" * 2)


def test_a_chunk_and_an_introduction_are_read_as_they_were_packed() -> None:
    for chunk in (Chunk(3, SLOT_BYTES, bytes(8)), Chunk(0, 1, b"checksum")):
        assert wire.parse_chunk(wire.pack_chunk(chunk)[wire.HEAD.size :]) == chunk
    for wrong in ((4, 1, b""), (0, 0, b""), (0, SLOT_BYTES + 1, b"")):
        with pytest.raises(MalformedFrame, match="out of bounds"):
            wire.parse_chunk(wire.CHUNK.pack(*wrong))
    said = wire.pack_introduction("UCX 1.21", b"where I am")[wire.HEAD.size :]
    assert wire.parse_introduction(said, "UCX 1.21") == b"where I am"
    with pytest.raises(VersionMismatch, match=r"'UCX 1.21', this one is 'UCX 1.20'"):
        wire.parse_introduction(said, "UCX 1.20")


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 3 * SLOT_BYTES)), max_size=8))
def test_chunks_are_the_same_bytes_in_the_same_order(pieces: list[tuple[int, int]]) -> None:
    chunks = list(cut(pieces))
    assert all(sum(nbytes for _, nbytes in chunk) == SLOT_BYTES for chunk in chunks[:-1])
    assert sum(nbytes for chunk in chunks for _, nbytes in chunk) == sum(nbytes for _, nbytes in pieces)
    joined: list[tuple[int, int]] = []
    for offset, nbytes in (piece for chunk in chunks for piece in chunk):
        if joined and sum(joined[-1]) == offset:
            offset, nbytes = joined[-1][0], joined.pop()[1] + nbytes
        joined.append((offset, nbytes))
    again: list[tuple[int, int]] = []
    for offset, nbytes in pieces:
        if again and sum(again[-1]) == offset:
            offset, nbytes = again[-1][0], again.pop()[1] + nbytes
        again.append((offset, nbytes))
    assert joined == again


def test_a_missing_library_is_one_clear_line() -> None:
    missing = Library("pigeon", ("no_such_pigeon", "nor_this"), "loft")
    wanted = r"neither no_such_pigeon nor nor_this is installed \(pip install 'kvferry\[loft\]'\)"
    with pytest.raises(ConfigError, match=f"the pigeon transport is not usable: {wanted}"):
        missing.require()
    assert missing.describe("quiet").startswith("pigeon: not usable: neither")


@pytest.mark.parametrize("scheme", LIBRARIES)
async def test_a_transport_without_its_library_is_refused_when_it_is_made(scheme: str) -> None:
    reason = why_unusable(scheme)
    if reason is None:
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match="not usable"):
        make_receiver(f"{scheme}://127.0.0.1:0", memoryview(bytearray(8)))
    with pytest.raises(ConfigError, match="not usable"):
        make_sender(scheme, memoryview(bytearray(8)))


def test_ucx_that_cannot_be_built_leaves_ucxx(ucp, tmp_path: Path) -> None:
    script = (
        "import asyncio\n"
        "from kv_transfer.choice import Chooser, listen\n"
        "from kv_transfer.transport import TransportConfig\n"
        "async def main():\n"
        "    receiver = listen('ucx', '127.0.0.1', memoryview(bytearray(64)), TransportConfig())\n"
        "    print(Chooser('ucx').choose(receiver.addresses))\n"
        "    await receiver.close()\n"
        "asyncio.run(main())\n"
    )
    # Neither a compiler nor a library that was built before.
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ucxx://127.0.0.1:")
    assert "not listening by ucx: " in done.stderr
