"""Checksums by every transport: what has changed between two ends fails and never lands."""

import asyncio
import threading

import pytest
from caller import called
from damage import damage, relay
from ferry import GENERATION, until
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import checksum
from kv_transfer.checksum import Checksum, reckon
from kv_transfer.gate import Gate
from kv_transfer.shm import sender as shm_sender
from kv_transfer.tcp import wire
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, IntegrityMismatch, MalformedFrame, TicketRejected

BLOCK = 4096
SUMMED = TransportConfig(checksum=True, streams=2)


@pytest.mark.parametrize("count", [1, 7, 512, 4096])
async def test_summed_ships_of_all_sizes_land(greeted, harbor, quay, count: int) -> None:
    there, here = harbor(greeted, count, BLOCK, SUMMED), quay(greeted, count, BLOCK, SUMMED)
    await here.ship(there.address, there.open(range(count)), [(count - 1 - i, i) for i in range(count)])
    await until(lambda: there.landed)
    assert (there.pool == here.pool[::-1]).all()


@pytest.mark.parametrize("count", [1, 256, 2048])
async def test_a_flipped_bit_fails_the_ship_and_nothing_else(greeted, harbor, quay, count: int) -> None:
    there, here = harbor(greeted, count, BLOCK, SUMMED), quay(greeted, count, BLOCK, SUMMED)
    pairs = [(i, i) for i in range(count)]
    async with damage(greeted, there.address) as (address, striking):
        ticket = there.open(range(count))
        striking.strikes = True
        with pytest.raises(IntegrityMismatch, match="checksum") as caught:
            await here.ship(address, ticket, pairs)
        assert caught.value.retryable
        assert not striking.strikes
        await until(lambda: there.broken)
        assert there.broken[0][0] == ticket
        assert isinstance(there.broken[0][1], IntegrityMismatch)
        assert not there.landed
        await there.receiver.close_window(ticket)
        await here.ship(address, there.open(range(count)), pairs)
        await until(lambda: there.landed)
        assert (there.pool == here.pool).all()
        await here.sender.close()


async def test_without_checksums_a_flipped_bit_goes_through(greeted, harbor, quay) -> None:
    # What the two tests above rest on: the bit is really flipped, and nothing else notices.
    there, here = harbor(greeted, 1, BLOCK), quay(greeted, 1, BLOCK)
    async with damage(greeted, there.address) as (address, striking):
        striking.strikes = True
        await here.ship(address, there.open([0]), [(0, 0)])
        await until(lambda: there.landed)
        assert (there.pool != here.pool).sum() == 1
        await here.sender.close()


async def test_who_wants_checksums_takes_nothing_without_and_who_does_not_takes_both(greeted, harbor, quay) -> None:
    strict, lenient, plain = harbor(greeted, 2, BLOCK, SUMMED), harbor(greeted, 2, BLOCK), quay(greeted, 2, BLOCK)
    ticket = strict.open([0, 1])
    with pytest.raises(TicketRejected, match="nothing without a checksum"):
        await plain.ship(strict.address, ticket, [(0, 1)])
    assert strict.poisoned
    await quay(greeted, 2, BLOCK, SUMMED).ship(strict.address, ticket, [(0, 1)])
    ticket = lenient.open([0, 1])
    await quay(greeted, 2, BLOCK, SUMMED).ship(lenient.address, ticket, [(0, 1)])
    await plain.ship(lenient.address, ticket, [(1, 0)])


@pytest.mark.parametrize("count", [1, 256])
@pytest.mark.parametrize("where", ["head", "end"])
async def test_over_tcp_the_announcement_and_the_checksum_itself_are_covered(
    harbor, quay, count: int, where: str
) -> None:
    there, here = harbor("tcp", count, BLOCK, SUMMED), quay("tcp", count, BLOCK, SUMMED)
    async with relay(there.address) as between:
        ticket = there.open(range(count))
        await here.ship(between.address, ticket, [(i, i) for i in range(count)])
        await until(lambda: there.landed)
        await there.receiver.close_window(ticket)
        ticket = there.open(range(count))
        tables = len(wire.pack_frame(ticket, Part(1, 0, 1, [(0, BLOCK)] * count, [(0, 0)] * count)))
        # The head's ship number: nothing but the checksum guards it.
        between.damage_at = {"head": 24, "end": tables + count * BLOCK + 3}[where]
        with pytest.raises((IntegrityMismatch, MalformedFrame) if where == "head" else IntegrityMismatch):
            await here.ship(between.address, ticket, [(i, i) for i in range(count)])
        await until(lambda: there.broken)
        assert isinstance(there.broken[0][1], IntegrityMismatch)
        assert len(there.landed) == 1
        await here.sender.close()


async def test_a_refused_summed_frame_leaves_the_connection_in_step(harbor) -> None:
    there = harbor("tcp", 4, BLOCK, SUMMED)
    ticket = there.open([1, 2, 3])

    def frame(block: int, generation: int, flip: int = 0) -> bytes:
        part = Part(block, 0, 1, [(block * BLOCK, BLOCK)], [(block, generation)])
        words = wire.pack_frame(ticket, part, summed=True) + bytes([block]) * BLOCK
        total = bytearray(Checksum(words).digest())
        total[0] ^= flip
        return words + total

    caller = await called(there.address, SUMMED)
    verdicts = []
    for words in (frame(1, GENERATION + 1), frame(1, GENERATION), frame(2, GENERATION, 1), frame(3, GENERATION)):
        caller.say(words)
        answer = wire.ANSWER.unpack(await caller.hear(wire.ANSWER.size))
        verdicts.append(answer[3])
        await caller.hear(answer[4])
    caller.hang_up()
    refused, damaged, landed = wire.Verdict.REFUSED, wire.Verdict.DAMAGED, wire.Verdict.LANDED
    assert verdicts == [refused, landed, damaged, landed]
    await until(lambda: len(there.landed) == 2)
    assert [landed.blocks for landed in there.landed] == [(1,), (3,)]
    assert [type(error) for _, error in there.broken] == [IntegrityMismatch]


async def test_shm_reckons_large_ships_beside_the_loop_and_an_abort_ends_it(harbor, quay, monkeypatch) -> None:
    count = 256
    there, here = harbor("shm", count, BLOCK, SUMMED), quay("shm", count, BLOCK, SUMMED)
    threads: list[threading.Thread] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: object) -> bytes | None:
        threads.append(threading.current_thread())
        begun.set()
        if threads[-1] is not threading.main_thread():
            assert go_on.wait(20)
        return reckon(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shm_sender, "reckon", slow)
    ticket = there.open(range(count))
    task = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(count)]))
    # The loop runs while the other thread reckons.
    await until(begun.is_set)
    await here.sender.abort(ticket)
    go_on.set()
    with pytest.raises(ChannelLost, match="aborted"):
        await task
    assert there.poisoned
    await there.receiver.close_window(ticket)
    await here.ship(there.address, there.open([0]), [(0, 0)])
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
    await here.sender.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-shm-sum")]


@given(st.binary(max_size=20), st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_the_checksum_is_of_all_bytes_in_order(first: bytes, views: list[bytes], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "PIECE_BYTES", piece)
        found = reckon(first, [memoryview(view) for view in views], Gate())
    assert found == Checksum(first + b"".join(views)).digest()
    assert len(found) == checksum.SUM_BYTES


def test_nothing_is_read_behind_a_shut_gate() -> None:
    gate = Gate()
    gate.shut_now()
    assert reckon(b"", [memoryview(b"x")], gate) is None
