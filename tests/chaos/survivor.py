"""The process that goes on: strikes its peer at one point after the other, and judges what it is left with."""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from crew import Crew, Hand, until
from fault_points import Point, Transfer, innocent_transfers
from own_time import OwnTime, in_own_time
from pace import allowed
from port import Port, holdings, pattern

from kv_transfer.shm.ledger import SLOTS, _lock
from kv_transfer.transport import TransportConfig

TIMEOUT, LONGEST_TIMEOUT = 1.5, 6.0
"""The survivor's time limit for a peer that does not move: on an idle machine, and at most."""
KNOWN = 1.0
"""Seconds of our own time in which a kill is known, a window closed and a ship aborted."""
SLACK = 1.0
"""What may come on top of the time limit."""


class Survivor:
    """See the module.

    Attributes:
        known: seconds from a fault to the end of the last transfer that it cut off, by side and fault.
        struck: how many transfers were not begun, under way and over when a fault struck.
        held: stopped receivers that held up their ships by a copy they were stopped in.
    """

    def __init__(self, scheme: str, crew: Crew) -> None:
        self.known: dict[str, list[float]] = {}
        self.struck: Counter[str] = Counter()
        self.held = 0
        self._scheme = scheme
        self._crew = crew
        self._timeout = min(allowed(TIMEOUT), LONGEST_TIMEOUT)
        self._config = TransportConfig(timeout=self._timeout)
        self._port = Port(scheme, self._config, pattern())
        self._rate: dict[str, float] = {}
        self._harbours: dict[int, str] = {}
        self._base: dict[str, int] = {}

    async def prepare(self) -> None:
        """Hire the peers, meet them, and note what this process holds when one of them is there."""
        self._innocent = await self._hire()
        for transfer in _first(40, innocent_transfers(1, 64 << 10)):
            await self._serve_both(transfer)
        # As many at a time as there can be connections.
        await asyncio.gather(*[self._serve_both(transfer) for transfer in _apart(8)])
        for side in ("sender", "receiver"):
            self._rate[side] = max([await self._measure(transfer, side) for transfer in _apart(3)])
        self._base = holdings()
        self._innocent_base = await self._innocent.ask("look")
        self._victim = await self._hire()

    async def finish(self) -> None:
        """Part from the peers; whatever a process holds now it would hold for ever."""
        await self._victim.end()
        await self._at_baseline(after="the end")
        grown = holdings()["rss"] - self._base["rss"]
        assert grown < 64 << 20, f"{grown >> 20} MiB more than at the start"
        look = await self._innocent.ask("look")
        assert (look["windows"], look["ships"]) == (0, 0)
        assert int(str(look["threads"])) <= int(str(self._innocent_base["threads"]))
        assert int(str(look["fds"])) <= int(str(self._innocent_base["fds"]))

    async def __aenter__(self) -> Survivor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._port.shut()

    async def strike(self, point: Point) -> None:
        """Let the fault of ``point`` happen, and check everything that must hold after it."""
        async with self._serving(point):
            if point.warm:
                for transfer in _apart(2):
                    await self._serve(self._victim, transfer, ships=point.victim == "receiver")
            begin = self._ship_there if point.victim == "receiver" else self._ship_here
            ships = await begin(point)
            await self._until_the_moment(point)
            struck = time.monotonic()
            if point.fault == "kill":
                await self._victim.kill()
            else:
                await self._victim.stop()
                struck = time.monotonic()
            judge = self._judge_windows if point.victim == "sender" else self._judge_ships
            await judge(point, ships, struck)
        if point.fault == "kill":
            await self._victim.end()
            await self._at_baseline(after="a kill")
            self._victim = await self._hire()
        else:
            look = await self._victim.ask("look")
            assert (look["windows"], look["ships"]) == (0, 0), "the resumed peer is not idle"
        assert not self._port.open_windows()
        assert not self._port.open_ships()

    async def _hire(self) -> Hand:
        hand = await self._crew.hire(scheme=self._scheme, timeout=10.0)
        self._harbours[hand.pid] = str((await hand.answer("address", "me"))["address"])
        return hand

    # --- an innocent peer, served all the time ---------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self, point: Point) -> AsyncIterator[None]:
        over = asyncio.Event()

        async def serve() -> None:
            for transfer in innocent_transfers(secrets.randbits(32), point.transfers[0].size):
                await self._serve(self._innocent, transfer, ships=point.victim == "receiver")
                if over.is_set():
                    return

        serving = asyncio.create_task(serve())
        try:
            yield
        finally:
            over.set()
            await serving

    async def _serve_both(self, transfer: Transfer) -> None:
        await self._serve(self._innocent, transfer, ships=True)
        await self._serve(self._innocent, transfer, ships=False)

    async def _measure(self, transfer: Transfer, victim: str) -> float:
        began = time.monotonic()
        await self._serve(self._innocent, transfer, ships=victim == "receiver")
        return transfer.nbytes / (time.monotonic() - began)

    async def _serve(self, hand: Hand, transfer: Transfer, *, ships: bool) -> None:
        """A transfer from here to a peer, or from it to here, that ends well, whatever happens to others."""
        ticket, size = transfer.ticket, transfer.size
        if ships:
            await hand.ask("open", ticket=ticket, size=size, blocks=transfer.targets)
            code = await self._port.ship(self._harbours[hand.pid], ticket, size, transfer.chunks)
            assert code == "shipped"
            end = await hand.ask("close", ticket=ticket, size=size, pairs=transfer.pairs, whole=True)
            assert end == {"landed": len(transfer.pairs), "right": True}
        else:
            self._port.open(ticket, transfer.targets, size)
            self._tell_to_ship(hand, transfer)
            code = str((await hand.answer("ship", ticket))["code"])
            assert code == "shipped"
            await until(lambda: len(self._port.landed[ticket]) == len(transfer.pairs), "the landing")
            await self._port.close(ticket)
            assert self._port.right(transfer.pairs, size)
            self._port.forget(ticket)

    # --- the fault -------------------------------------------------------------------------------------------------

    async def _ship_there(self, point: Point) -> list[asyncio.Task[str]]:
        for transfer in point.transfers:
            await self._victim.ask("open", ticket=transfer.ticket, size=transfer.size, blocks=transfer.targets)
        return [
            asyncio.create_task(self._port.ship(self._harbours[self._victim.pid], each.ticket, each.size, each.chunks))
            for each in point.transfers
        ]

    async def _ship_here(self, point: Point) -> list[asyncio.Task[str]]:
        for transfer in point.transfers:
            self._port.open(transfer.ticket, transfer.targets, transfer.size)
            self._tell_to_ship(self._victim, transfer)
        return []

    def _tell_to_ship(self, hand: Hand, transfer: Transfer) -> None:
        hand.tell(
            "ship",
            address=self._port.receiver.address,
            ticket=transfer.ticket,
            size=transfer.size,
            chunks=transfer.chunks,
        )

    async def _until_the_moment(self, point: Point) -> None:
        nbytes = sum(transfer.nbytes for transfer in point.transfers)
        moment = time.monotonic() + point.moment * nbytes / self._rate[point.victim] + point.jitter
        while time.monotonic() < moment:  # noqa: ASYNC110 -- a moment within a transfer is shorter than a sleep
            await asyncio.sleep(0)

    # --- when the sender was struck --------------------------------------------------------------------------------

    async def _judge_windows(self, point: Point, _: list[asyncio.Task[str]], struck: float) -> None:
        port = self._port
        for transfer in point.transfers:
            whole = len(port.landed[transfer.ticket]) == len(transfer.pairs)
            begun = not port.untouched(transfer.targets, transfer.size)
            self.struck["over" if whole else "under way" if begun else "not begun"] += 1
        if point.fault == "kill":
            clock = OwnTime()
            known = await in_own_time(lambda: all(map(self._is_known, point.transfers)), KNOWN, clock)
            assert known, f"a window did not end in {KNOWN} s of our own time after the kill"
            parted = await in_own_time(lambda: not self._excess(), KNOWN, clock)
            assert parted, f"a connection did not end in {KNOWN} s of our own time after the kill: {self._excess()}"
            assert all(map(self._is_known, point.transfers)), "a window that nobody fills was not reported"
            self._note(point, struck)
        else:
            await asyncio.sleep(point.pause)
        for transfer in point.transfers:
            began = time.monotonic()
            closing = asyncio.create_task(port.close(transfer.ticket))
            assert await in_own_time(closing.done, KNOWN), f"closing a window took over {KNOWN} s of our own time"
            await closing
            if point.fault == "stop":
                self.known.setdefault("sender stop, window closed", []).append(time.monotonic() - began)
            landed = port.landed[transfer.ticket]
            assert port.right([pair for pair in transfer.pairs if pair[1] in landed], transfer.size)
            port.poison(transfer.targets, transfer.size)
        if point.fault == "stop":
            self._victim.signal(signal.SIGCONT)
            for transfer in point.transfers:
                end = await self._victim.answer("ship", transfer.ticket)
                whole = len(port.landed[transfer.ticket]) == len(transfer.pairs)
                assert end["code"] in ("shipped", "ticket_rejected", "channel_lost"), end
                assert whole or end["code"] != "shipped"
        for transfer in point.transfers:
            assert port.untouched(transfer.targets, transfer.size), "a byte came after the window was closed"
            port.forget(transfer.ticket)

    def _is_known(self, transfer: Transfer) -> bool:
        """Broken, or every byte that came is of a ship that landed: there is nothing to be told of the others."""
        if transfer.ticket in self._port.broken:
            return True
        landed = self._port.landed[transfer.ticket]
        rest = [target for target in transfer.targets if target not in landed]
        return self._port.untouched(rest, transfer.size)

    # --- when the receiver was struck ------------------------------------------------------------------------------

    async def _judge_ships(self, point: Point, ships: list[asyncio.Task[str]], struck: float) -> None:
        for ship in ships:
            self.struck["over" if ship.done() else "under way"] += 1
        killed = point.fault == "kill"
        if not killed and not point.patient:
            await asyncio.sleep(point.pause)
            struck = time.monotonic()
            await self._abort(point)
        limit = self._timeout * 1.25 + SLACK if point.patient and not killed else KNOWN
        if not await in_own_time(lambda: all(ship.done() for ship in ships), limit):
            late = f"{sum(not ship.done() for ship in ships)} ships go on {limit} s of our own time"
            assert not killed, f"{late} after the kill"
            assert self._is_held(), f"{late} after the stop, and no copy holds them"
            self.held += 1
        else:
            self._note(point, struck)
            # Every ship is over: their blocks are for others now.
            for transfer in point.transfers:
                self._port.spoil(transfer.sources, transfer.size)
        if not killed:
            self._victim.signal(signal.SIGCONT)
            ended = await in_own_time(lambda: all(ship.done() for ship in ships), KNOWN)
            assert ended, f"a ship goes on {KNOWN} s of our own time after the receiver did"
        codes = [ship.result() for ship in ships]
        assert set(codes) <= {"shipped", "channel_lost"}, codes
        for transfer, code in zip(point.transfers, codes, strict=True):
            if not killed:
                end = await self._victim.ask(
                    "close",
                    ticket=transfer.ticket,
                    size=transfer.size,
                    pairs=transfer.pairs,
                    whole=code == "shipped",
                )
                assert end["right"], "what landed are not the bytes that were shipped"
            self._port.mend(transfer.sources, transfer.size)

    async def _abort(self, point: Point) -> None:
        aborts = [
            asyncio.create_task(self._port.sender.abort(bytes.fromhex(transfer.ticket))) for transfer in point.transfers
        ]
        in_time = await in_own_time(lambda: all(abort.done() for abort in aborts), KNOWN)
        assert in_time or self._is_held(), f"an abort takes over {KNOWN} s of our own time, and no copy holds it up"

    def _is_held(self) -> bool:
        """Whether a receiver was stopped within a batch that it copies from our memory: only shm can be."""
        if self._scheme != "shm":
            return False
        descriptor = self._port.sender._ledger.descriptor  # type: ignore[attr-defined]
        for slot in range(SLOTS):
            if not _lock(descriptor, fcntl.F_WRLCK, slot):
                return True
            _lock(descriptor, fcntl.F_UNLCK, slot)
        return False

    # --- what is left ----------------------------------------------------------------------------------------------

    def _note(self, point: Point, struck: float) -> None:
        how = "" if point.fault == "kill" else ", waited" if point.patient else ", aborted"
        self.known.setdefault(f"{point.victim} {point.fault}{how}", []).append(time.monotonic() - struck)

    def _excess(self) -> dict[str, tuple[int, int]]:
        now = holdings()
        return {name: (now[name], self._base[name]) for name in ("threads", "fds") if now[name] > self._base[name]}

    async def _at_baseline(self, after: str) -> None:
        try:
            await until(lambda: not self._excess(), f"the baseline after {after}", allowed(5.0))
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._excess()}") from error


def _first(count: int, transfers: Iterator[Transfer]) -> list[Transfer]:
    return [transfer for _, transfer in zip(range(count), transfers, strict=False)]


def _apart(count: int) -> list[Transfer]:
    """Transfers of different blocks, 4 MiB each."""
    size, blocks = 512 << 10, 8
    return [
        Transfer(secrets.token_hex(16), size, (tuple((block, block) for block in range(first, first + blocks)),))
        for first in range(0, count * blocks, blocks)
    ]
