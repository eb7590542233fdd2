"""A ticket: good once, for these blocks, from one life of a sender to one life of a receiver, and for a time."""

import secrets
import time

import pytest
from caller import WIRE, Caller, announcing
from ferry import GENERATION, Harbor, Quay, as_pool, until

from decode_worker.imports import Imports
from decode_worker.scheduler import DecodeScheduler
from engine.block_pool import BlockPool
from kv_transfer.instructions import Commit
from kv_transfer.span import Span
from kv_transfer.transport import TransportConfig, make_receiver
from kv_transfer.windows import Part
from protocol.errors import TicketRejected
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import ErrorInfo, Grant, Handover, Message, PrefillAddress, Reserve
from protocol.sampling import SamplingParams
from protocol.wire_layout import WireLayout

BLOCK = 4096
LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=256, block_size=4, dtype="float16")
PREFILL = Peer("prefill-0", 7)
RESTARTED = Peer("prefill-0", 8)
SECRET = "the secret of this cluster"


def of(peer: Peer) -> TransportConfig:
    return TransportConfig(secret=SECRET, name=str(peer))


class DecodeSide:
    """The production's own imports over a real pool, around the receiver of a harbor."""

    def __init__(self, there: Harbor) -> None:
        assert LAYOUT.block_bytes == BLOCK
        self.pool = BlockPool(len(there.pool), LAYOUT.block_size)
        self.scheduler = DecodeScheduler(self.pool, block_size=LAYOUT.block_size, max_sequences=8)
        self.sent: list[Message] = []
        self.failed: list[ErrorInfo] = []
        self.committed: list[RequestKey] = []
        self.imports = Imports(
            self.pool,
            WireLayout(LAYOUT),
            there.receiver,
            vocab_size=100,
            send=lambda _, message: self.sent.append(message) is None,
            commit=self._commit,
            failed=self._fail,
            freed=lambda: None,
        )

    def grant(self, name: str, prefill: Peer, ttl: float = 30.0) -> Grant:
        """Reserve two blocks, and grant them."""
        request = Reserve(
            key=RequestKey(name, 0),
            token_ids=tuple(range(8)),
            sampling=SamplingParams(max_tokens=4),
            prefill=PrefillAddress(peer=prefill, endpoint="tcp://127.0.0.1:1"),
            lease_ttl=ttl,
            cache_salt=name,
        )
        self.scheduler.add(request, Peer("router-0", 1), time.monotonic())
        (sequence,) = self.scheduler.admit()
        self.imports.open(sequence)
        return next(message for message in reversed(self.sent) if isinstance(message, Grant))

    def ended(self) -> bool:
        self.imports.tick()
        return not self.imports.book.open_count

    def _commit(self, commit: Commit, _: float) -> None:
        key = commit.key
        self.scheduler.commit(key, commit.handover.next_token, 0.0)
        self.committed.append(key)

    def _fail(self, key: RequestKey, error: ErrorInfo) -> None:
        self.scheduler.drop(key)
        self.failed.append(error)


async def answer(here: Quay, grant: Grant) -> None:
    spans = [Span(index * BLOCK, block * BLOCK, BLOCK) for index, block in enumerate(grant.blocks)]
    named = list(zip(grant.blocks, grant.generations, strict=True))
    await here.sender.ship(grant.addresses[0], grant.ticket, spans, named)


async def test_a_forged_ticket_is_refused(scheme, harbor, quay) -> None:
    there, here = harbor(scheme, 4, BLOCK), quay(scheme, 4, BLOCK)
    ticket = there.open([1])
    near = bytes([ticket[0] ^ 1, *ticket[1:]])
    for forged in (secrets.token_bytes(16), bytes(16), near, ticket[::-1]):
        with pytest.raises(TicketRejected, match="unknown or closed ticket"):
            await here.ship(there.address, forged, [(0, 1)])
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])


async def test_a_ticket_expires_with_its_import(scheme, harbor, quay) -> None:
    there, here = harbor(scheme, 8, BLOCK, of(Peer("decode-0", 1))), quay(scheme, 4, BLOCK, of(PREFILL))
    side = DecodeSide(there)
    grant = side.grant("late", PREFILL, ttl=0.05)
    await until(side.ended)
    with pytest.raises(TicketRejected, match="unknown or closed ticket"):
        await answer(here, grant)
    assert there.poisoned
    assert [error.code for error in side.failed] == ["import_expired"]
    assert side.pool.counts().importing == side.pool.counts().draining == 0
    # In time it would have been good.
    fresh = side.grant("in time", PREFILL)
    await answer(here, fresh)
    await until(lambda: side.imports.kv_blocks == 2)
    side.imports.cancel(fresh.key)
    await until(side.ended)


async def test_a_ticket_is_not_good_twice(scheme, harbor, quay) -> None:
    there, here = harbor(scheme, 8, BLOCK, of(Peer("decode-0", 1))), quay(scheme, 4, BLOCK, of(PREFILL))
    side = DecodeSide(there)
    grant = side.grant("once", PREFILL)
    await answer(here, grant)
    with pytest.raises(TicketRejected, match="has been written"):
        await answer(here, grant)
    await until(lambda: side.imports.kv_blocks == 2)
    handover = Handover(key=grant.key, num_tokens=8, next_token=1, blocks=2, nbytes=2 * BLOCK, ticket=grant.ticket)
    side.imports.receive(PREFILL, handover)
    await until(lambda: side.committed)
    there.poison()
    with pytest.raises(TicketRejected, match="unknown or closed ticket"):
        await answer(here, grant)
    assert there.poisoned
    assert not side.failed


async def test_a_ticket_is_the_senders_whose_life_it_was_granted_to(scheme, harbor, quay) -> None:
    there = harbor(scheme, 8, BLOCK, of(Peer("decode-0", 1)))
    side = DecodeSide(there)
    grant = side.grant("mine", PREFILL)
    for other in (RESTARTED, Peer("prefill-0", 6), Peer("prefill-1", 7)):
        with pytest.raises(TicketRejected, match=f"the ticket is {PREFILL}'s, it is shown by {other}"):
            await answer(quay(scheme, 4, BLOCK, of(other)), grant)
    with pytest.raises(TicketRejected, match="somebody without a name"):
        await answer(quay(scheme, 4, BLOCK, TransportConfig(secret=SECRET)), grant)
    assert there.poisoned
    await answer(quay(scheme, 4, BLOCK, of(PREFILL)), grant)
    side.imports.cancel(grant.key)
    await until(side.ended)


async def test_the_tickets_of_a_senders_former_life_are_void_once_its_next_is_known(scheme, harbor, quay) -> None:
    there, old = harbor(scheme, 8, BLOCK, of(Peer("decode-0", 1))), quay(scheme, 4, BLOCK, of(PREFILL))
    side = DecodeSide(there)
    former = side.grant("former", PREFILL)
    side.grant("next", RESTARTED)
    await until(lambda: side.imports.book.open_count == 1)
    with pytest.raises(TicketRejected, match="unknown or closed ticket"):
        await answer(old, former)
    assert there.poisoned
    assert [error.code for error in side.failed] == ["worker_lost"]


async def test_a_ticket_of_the_receivers_former_life_is_unknown_to_its_next(scheme, harbor, quay, sites) -> None:
    there, here = harbor(scheme, 4, BLOCK), quay(scheme, 4, BLOCK)
    ticket, address = there.open([1]), there.address
    await there.receiver.close()
    with sites.inside():
        there.receiver = make_receiver(address, as_pool(scheme, memoryview(there.pool)))
    try:
        there.open([1])
        with pytest.raises(TicketRejected, match="unknown or closed ticket"):
            await here.ship(address, ticket, [(0, 1)])
        assert there.poisoned
    finally:
        await there.receiver.close()


@pytest.mark.parametrize("fault", ["another ticket's block", "nobody's block", "another generation", "one too many"])
async def test_a_ticket_is_good_for_its_own_blocks_only(scheme, harbor, quay, fault: str) -> None:
    there, here = harbor(scheme, 8, BLOCK), quay(scheme, 8, BLOCK)
    ticket = there.open([1, 2])
    there.open([3])
    pairs = {"another ticket's block": [(0, 3)], "nobody's block": [(0, 5)], "one too many": [(0, 1), (0, 2), (0, 3)]}
    generation = GENERATION - 1 if fault == "another generation" else GENERATION
    with pytest.raises(TicketRejected):
        await here.ship(there.address, ticket, pairs.get(fault, [(0, 1)]), generation)
    assert there.poisoned


def announcement(scheme: str, ticket: bytes, spans: int = 1, blocks: int = 1) -> bytes:
    """The head, and the tables of one block, of a part with these counts."""
    wire = WIRE[scheme]
    part = Part(1, 0, 1, [(BLOCK, BLOCK)], [(1, GENERATION)])
    if scheme == "shm":
        whole = wire.pack_frame(ticket, 1, 0, [Span(0, BLOCK, BLOCK)], part.generations)
        return wire.FRAME.pack(wire.FRAME_MAGIC, ticket, 1, 0, spans, blocks) + whole[wire.FRAME.size :]
    if scheme == "tcp":
        head = wire.FRAME.pack(wire.FRAME_MAGIC, ticket, 1, 0, 1, spans, blocks, BLOCK)
        return head + wire.pack_frame(ticket, part)[wire.FRAME.size :]
    head = wire.PART.pack(wire.PART_MAGIC, ticket, 1, 0, 1, spans, blocks)
    return head + wire.pack_part(ticket, part)[wire.PART.size :]


def head_bytes(scheme: str) -> int:
    return (WIRE["ucx"].PART if scheme == "ucx" else WIRE[scheme].FRAME).size


async def verdict_on(wire: str, caller: Caller) -> int:
    answer = WIRE[wire].ANSWER.unpack(await caller.hear(WIRE[wire].ANSWER.size))
    verdict, length = (answer[1], answer[2]) if wire == "shm" else (answer[3], answer[4])
    await caller.hear(length)
    return int(verdict)


@pytest.mark.parametrize("counts", [(2, 1), (2, 2), (1, 2), (1 << 16, 1 << 16)])
async def test_what_a_ticket_does_not_cover_is_refused_before_there_is_room_made_for_it(
    wired, harbor, quay, counts: tuple[int, int]
) -> None:
    there, here = harbor(wired, 4, BLOCK), quay(wired, 4, BLOCK)
    ticket = there.open([1])
    caller = await announcing(there.address)
    # The head alone: the answer does not wait for what the head counts.
    caller.say(announcement(wired, ticket, *counts)[: head_bytes(wired)])
    assert await verdict_on(wired, caller) == WIRE[wired].Verdict.REFUSED
    caller.hang_up()
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])


async def test_an_unknown_ticket_is_refused_by_its_head_alone(wired, harbor) -> None:
    there = harbor(wired, 4, BLOCK)
    caller = await announcing(there.address)
    caller.say(announcement(wired, secrets.token_bytes(16), 1 << 16, 1 << 16)[: head_bytes(wired)])
    assert await verdict_on(wired, caller) == WIRE[wired].Verdict.REFUSED
    caller.hang_up()


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), ((1 << 32) - 1, 1), (1, (1 << 32) - 1)])
async def test_counts_beyond_every_bound_end_the_connection(wired, harbor, quay, counts: tuple[int, int]) -> None:
    there, here = harbor(wired, 4, BLOCK), quay(wired, 4, BLOCK)
    ticket = there.open([1])
    caller = await announcing(there.address)
    caller.say(announcement(wired, ticket, *counts))
    assert await caller.rest() == b""
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])


async def test_half_an_announcement_writes_nothing_and_spends_nothing(wired, harbor, quay) -> None:
    there, here = harbor(wired, 4, BLOCK), quay(wired, 4, BLOCK)
    ticket = there.open([1])
    words = announcement(wired, ticket)
    for length in (1, 20, head_bytes(wired) - 1, head_bytes(wired), len(words) - 1):
        caller = await announcing(there.address)
        caller.say(words[:length])
        await caller.writer.drain()
        caller.writer.write_eof()
        assert await caller.rest() == b""
    assert there.poisoned
    await here.ship(there.address, ticket, [(0, 1)])
    assert (there.pool[1] == here.pool[0]).all()
