"""The receiver's book of windows and the gates before them, without a transport."""

import asyncio
import threading

import pytest

from kv_transfer import windows
from kv_transfer.gate import Gate
from kv_transfer.transport import Landed, Window
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, TicketRejected, TransferError

SIZE = 8
TICKET = bytes(16)
WHOLE = Part(1, 0, 1, [(SIZE, SIZE)], [(1, 5)])


class Opened:
    def __init__(self) -> None:
        self.landed: list[Landed] = []
        self.broken: list[TransferError] = []
        self.book = WindowBook(64)
        window = Window(TICKET, (1, 2, 3), (5, 5, 5), SIZE)
        self.book.open(window, self.landed.append, lambda _, error: self.broken.append(error))
        self.window: OpenWindow = self.book.find(TICKET)


async def turn() -> None:
    await asyncio.sleep(0)


async def test_no_callback_comes_after_a_close_even_when_it_was_on_its_way() -> None:
    opened = Opened()
    opened.window.admit(WHOLE, 0.0)
    landed = opened.window.complete(WHOLE, 2.5)
    assert landed == Landed(TICKET, (1,), SIZE, 2.5)
    opened.window.report(landed)
    other = Part(2, 0, 1, [(2 * SIZE, SIZE)], [(2, 5)])
    opened.window.admit(other, 0.0)
    opened.window.abandon(other, ChannelLost("gone"))
    await opened.book.close(TICKET)
    await turn()
    assert not opened.landed
    assert not opened.broken


async def test_callbacks_come_on_the_loop_and_never_from_within() -> None:
    opened = Opened()
    opened.window.admit(WHOLE, 0.0)
    landed = opened.window.complete(WHOLE, 1.0)
    assert landed is not None
    opened.window.report(landed)
    assert not opened.landed
    await turn()
    assert opened.landed == [landed]


async def test_nothing_is_admitted_or_completed_after_a_close() -> None:
    opened = Opened()
    opened.window.admit(WHOLE, 0.0)
    await opened.book.close(TICKET)
    with pytest.raises(TicketRejected, match="closed"):
        opened.window.complete(WHOLE, 1.0)
    with pytest.raises(TicketRejected, match="closed"):
        opened.window.admit(Part(2, 0, 1, [(2 * SIZE, SIZE)], [(2, 5)]), 1.0)
    with pytest.raises(TicketRejected, match="unknown or closed"):
        opened.book.find(TICKET)


async def test_a_ship_lands_with_the_last_of_its_parts_in_any_order() -> None:
    opened = Opened()
    parts = [Part(1, index, 3, [((index + 1) * SIZE, SIZE)], [(index + 1, 5)]) for index in range(3)]
    for part in parts:
        opened.window.admit(part, 0.0)
    assert opened.window.complete(parts[2], 1.0) is None
    assert opened.window.complete(parts[0], 2.0) is None
    assert opened.window.complete(parts[1], 3.0) == Landed(TICKET, (3, 1, 2), 3 * SIZE, 3.0)


async def test_a_ship_that_lost_a_part_never_lands() -> None:
    opened = Opened()
    parts = [Part(1, index, 3, [((index + 1) * SIZE, SIZE)], [(index + 1, 5)]) for index in range(3)]
    opened.window.admit(parts[0], 0.0)
    opened.window.admit(parts[1], 0.0)
    opened.window.abandon(parts[0], ChannelLost("gone"))
    with pytest.raises(TicketRejected, match="another part"):
        opened.window.complete(parts[1], 1.0)
    with pytest.raises(TicketRejected, match="another part"):
        opened.window.admit(parts[2], 1.0)
    await turn()
    assert [str(error) for error in opened.broken] == ["gone"]


async def test_all_parts_of_a_damaged_ship_are_answered_with_the_damage() -> None:
    # The sender raises what it is answered first: a part that only shares the ship may be before the damaged one.
    opened = Opened()
    parts = [Part(1, index, 3, [((index + 1) * SIZE, SIZE)], [(index + 1, 5)]) for index in range(3)]
    opened.window.admit(parts[0], 0.0)
    opened.window.admit(parts[1], 0.0)
    opened.window.abandon(parts[0], IntegrityMismatch("not its checksum"))
    with pytest.raises(IntegrityMismatch, match="not its checksum"):
        opened.window.complete(parts[1], 1.0)
    with pytest.raises(IntegrityMismatch, match="not its checksum"):
        opened.window.admit(parts[2], 1.0)
    await turn()
    assert [str(error) for error in opened.broken] == ["not its checksum"]


async def test_a_ship_whose_connections_end_between_two_parts_is_reported_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "GRACE", 0.05)
    opened = Opened()
    parts = [Part(1, index, 3, [((index + 1) * SIZE, SIZE)], [(index + 1, 5)]) for index in range(3)]
    for part, carrier in zip(parts[:2], "ab", strict=True):
        opened.window.admit(part, 0.0, carrier)
        opened.window.complete(part, 0.0)
    opened.book.lost("a")
    await asyncio.sleep(0.1)
    assert not opened.broken
    opened.book.lost("b")
    assert not opened.broken
    async with asyncio.timeout(5.0):
        while not opened.broken:
            await turn()
    assert "between two parts" in str(opened.broken[0])
    with pytest.raises(TicketRejected, match="another part"):
        opened.window.admit(parts[2], 1.0, "c")


async def test_a_ship_that_goes_on_by_another_connection_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "GRACE", 0.05)
    opened = Opened()
    parts = [Part(1, index, 2, [((index + 1) * SIZE, SIZE)], [(index + 1, 5)]) for index in range(2)]
    opened.window.admit(parts[0], 0.0, "a")
    opened.window.complete(parts[0], 0.0)
    opened.book.lost("a")
    opened.window.admit(parts[1], 0.0, "b")
    await asyncio.sleep(0.1)
    assert not opened.broken
    assert opened.window.complete(parts[1], 0.0) is not None
    # What has landed needs no connection any more.
    opened.book.lost("b")
    await asyncio.sleep(0.1)
    assert not opened.broken


@pytest.mark.parametrize(("index", "count"), [(0, 2), (1, 3)])
async def test_a_part_that_does_not_fit_its_ship_is_refused(index: int, count: int) -> None:
    opened = Opened()
    opened.window.admit(Part(1, 0, 2, [(SIZE, SIZE)], [(1, 5)]), 0.0)
    with pytest.raises(TicketRejected, match="does not fit"):
        opened.window.admit(Part(1, index, count, [(2 * SIZE, SIZE)], [(2, 5)]), 0.0)


async def test_shutting_a_gate_waits_for_who_is_inside() -> None:
    gate = Gate()
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        assert gate.enter()
        entered.set()
        leave.wait()
        gate.leave()

    visitor = threading.Thread(target=inside)
    visitor.start()
    entered.wait()
    shutting = [asyncio.create_task(gate.shut()) for _ in range(2)]
    await turn()
    await turn()
    assert not any(task.done() for task in shutting)
    assert not gate.enter()
    leave.set()
    await asyncio.gather(*shutting)
    visitor.join()
    await gate.shut()


async def test_a_shut_gate_with_nobody_inside_is_quiet_at_once() -> None:
    gate = Gate()
    assert gate.enter()
    gate.leave()
    await gate.shut()
    assert not gate.is_open
    assert not gate.enter()
