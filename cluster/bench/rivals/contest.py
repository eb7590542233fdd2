"""The rivals of one transport under measurement, each by two processes of its own, in step with the rounds of a case.

Life cycle of an :func:`entered` contest: rivals started -> [prepared for a case -> rounds]* -> ended. A rival that
fails drops out and says why; the others go on.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from cluster.bench.block_table import Transfer
from cluster.bench.rivals.process import RivalProcess, started
from cluster.bench.statistics import Latency, latency, paired_ratio, rate
from protocol.errors import ConnectionFailed, IntegrityMismatch, KVFerryError
from protocol.layout import KVLayout

RIVALS: Mapping[str, str] = MappingProxyType(
    {
        "nixl": "UCX backend, no progress thread, the other process polls; blocks prepared once, a request names some",
        "mooncake": "its tcp protocol, for it has no other between two processes without RDMA; batches of 1,024 runs",
    }
)
"""Name and how it is run. Of READ and WRITE the one that is better in a few tries counts, case by case."""
MOVERS = Path(__file__).with_name("movers.py")
START_SECONDS = 120.0
TRIES = 3
"""Of each mode, to find the better one."""
MAX_TOLD = 4096


class RivalFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rival's figures for one case, from the same rounds.

    Attributes:
        rival: its name.
        mode: the better of its ways, ``READ`` by the receiving process or ``WRITE`` by the sending one.
        latency: of one transfer.
        gb_per_s: bytes of a round over its median time.
        ratio: our speed over the rival's, the median over the rounds.
    """

    rival: str
    mode: str
    latency: Latency
    gb_per_s: float
    ratio: float


class RivalState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rival took part.

    Attributes:
        rival: its name.
        version: of its package; empty where it never started.
        settings: how it was run.
        reason: why it did not take part, or not to the end; else empty.
    """

    rival: str
    version: str = ""
    settings: str = ""
    reason: str = ""


OnRival = Callable[[RivalState], None]
"""Called when a rival has started, and when it drops out."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Which rivals are to take part.

    Attributes:
        names: of :data:`RIVALS`.
        python: the interpreter that has them.
    """

    names: tuple[str, ...]
    python: str


def settings_of(scheme: str, tls: str) -> dict[str, str]:
    """UCX's settings for NIXL: those that decide its result, and the same road as ours."""
    return {
        "UCX_TLS": tls or ("tcp" if scheme == "tcp" else "shm"),
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_TX_SEG_SIZE": "1m",
        "UCX_TCP_RX_SEG_SIZE": "1m",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }


@dataclass(slots=True)
class _Entrant:
    """One rival that takes part."""

    name: str
    near: RivalProcess
    far: RivalProcess
    modes: tuple[str, ...] = ()
    mode: str = ""
    seconds: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)

    async def start(self, layout: KVLayout, blocks: int) -> str:
        """Start both processes; returns the rival's version."""
        size = {"rival": self.name, "blocks": blocks, "block_bytes": layout.block_bytes}
        near = await self.near.ask("start", role="near", seed=1, **size)
        far = await self.far.ask("start", role="far", seed=2, **size)
        await self.near.ask("meet", card=far["card"])
        await self.far.ask("meet", card=near["card"])
        self.modes = tuple(msgspec.convert(near["modes"], list[str]))
        return str(near["version"])

    async def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Forget the last case, move this one once in each mode, checked, and find the better mode."""
        self.seconds, self.walls = [], []
        await self.near.ask("prepare", transfers=[_ships(transfer) for transfer in transfers])
        here = [block for transfer in transfers for block in transfer.source]
        there = [block for transfer in transfers for block in transfer.target]
        for mode in self.modes:
            target, blocks = (self.near, here) if mode == "READ" else (self.far, there)
            await target.ask("poison", blocks=blocks)
            await self._move(mode)
            sums = [await one.ask("checksum", blocks=of) for one, of in ((self.near, here), (self.far, there))]
            if sums[0] != sums[1]:
                raise IntegrityMismatch(f"{mode} moved other bytes than there were")
        tried: dict[str, list[float]] = {mode: [] for mode in self.modes}
        for mode in self.modes * TRIES:
            tried[mode].append(max(await self._move(mode)))
        self.mode = min(tried, key=lambda each: statistics.median(tried[each]))

    async def turn(self) -> None:
        """One round in the better mode."""
        seconds = await self._move(self.mode)
        self.seconds.extend(seconds)
        self.walls.append(max(seconds))

    async def _move(self, mode: str) -> list[float]:
        # It polls during the rival's own turns only, not while others are measured.
        await self.far.ask("serve")
        moved = await self.near.ask("move", mode=mode)
        await self.far.ask("rest")
        seconds = msgspec.convert(moved["seconds"], list[float])
        if not seconds or min(seconds) <= 0:
            raise ConnectionFailed(f"it says that {mode} took {seconds} seconds")
        return seconds

    def figure(self, walls: Sequence[float], nbytes: int) -> RivalFigure:
        """The better mode's figures beside ``walls`` of ours, for ``nbytes`` a round."""
        return RivalFigure(
            rival=self.name,
            mode=self.mode,
            latency=latency(self.seconds),
            gb_per_s=rate(nbytes, self.walls),
            ratio=paired_ratio(walls, self.walls),
        )


class Contest:
    """See the module."""

    def __init__(self, on_rival: OnRival) -> None:
        self._on_rival = on_rival
        self._entrants: list[_Entrant] = []

    def join(self, entrant: _Entrant) -> None:
        """One more takes part."""
        self._entrants.append(entrant)

    async def prepare(self, transfers: Sequence[Transfer]) -> None:
        """A new case begins."""
        for entrant in tuple(self._entrants):
            await self._tried(entrant, entrant.prepare(transfers))

    def turns(self) -> list[Callable[[], Coroutine[object, object, None]]]:
        """One round of each rival; to be called in every round, in any order."""
        return [partial(self._turn, entrant) for entrant in self._entrants]

    async def _turn(self, entrant: _Entrant) -> None:
        if entrant in self._entrants:
            await self._tried(entrant, entrant.turn())

    def figures(self, walls: Sequence[float], nbytes: int) -> tuple[RivalFigure, ...]:
        """Of those that took part to the end."""
        return tuple(entrant.figure(walls, nbytes) for entrant in self._entrants)

    async def _tried(self, entrant: _Entrant, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except (KVFerryError, msgspec.ValidationError) as error:
            self._entrants.remove(entrant)
            # One of the two may still be polling for the other.
            await entrant.near.end()
            await entrant.far.end()
            self._on_rival(RivalState(rival=entrant.name, reason=said(error)))


@asynccontextmanager
async def entered(
    invitation: Invitation, scheme: str, tls: str, layout: KVLayout, blocks: int, on_rival: OnRival
) -> AsyncIterator[Contest]:
    """The invited rivals that are installed, each with two pools of ``blocks`` blocks.

    Args:
        invitation: who, and where.
        scheme: of our transport: what is not TCP is held against the rival's shared memory.
        tls: what UCX is held to on our side; empty where it is not.
        layout: of the blocks.
        blocks: of either pool.
        on_rival: told of each.
    """
    async with AsyncExitStack() as stack:
        contest = Contest(on_rival)
        for name in invitation.names:
            settings = settings_of(scheme, tls)
            try:
                near = await stack.enter_async_context(started(invitation.python, settings, MOVERS))
                far = await stack.enter_async_context(started(invitation.python, settings, MOVERS))
                entrant = _Entrant(name, near, far)
                async with asyncio.timeout(START_SECONDS):
                    version = await entrant.start(layout, blocks)
            except (KVFerryError, msgspec.ValidationError, KeyError) as error:
                on_rival(RivalState(rival=name, reason=said(error)))
            except TimeoutError:
                on_rival(RivalState(rival=name, reason=f"it did not start in {START_SECONDS:.0f} seconds"))
            else:
                told = " ".join(f"{key}={value}" for key, value in settings.items()) if name == "nixl" else ""
                on_rival(RivalState(rival=name, version=version, settings=f"{RIVALS[name]}; {told}".rstrip("; ")))
                contest.join(entrant)
        yield contest


def _ships(transfer: Transfer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Blocks here and there of each ship call, from a transfer whose blocks are shipped in their order."""
    ships = []
    first = 0
    for _, targets in transfer.ships:
        ships.append((transfer.source[first : first + len(targets)], targets))
        first += len(targets)
    return ships


def said(error: Exception) -> str:
    """Why a rival drops out, for its state."""
    return (error.message if isinstance(error, KVFerryError) else f"its answer is none: {error}")[:MAX_TOLD]
