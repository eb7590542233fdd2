"""What happens at one point of a soak: drawn from the seed and the point's number alone, so that it can be replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from port import POOL_BYTES

SIZES = (4 << 10, 64 << 10, 512 << 10)
INNOCENT_SHARE = 4
"""The last of so many parts of the pool belongs to the innocent peer."""

Side = Literal["sender", "receiver"]
Fault = Literal["kill", "stop"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One window, filled by one ship or several.

    Attributes:
        ticket: in hexadecimal.
        size: bytes of a block.
        chunks: ``(source block, destination block)`` pairs of each ship.
    """

    ticket: str
    size: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [pair for chunk in self.chunks for pair in chunk]

    @property
    def sources(self) -> list[int]:
        return [source for source, _ in self.pairs]

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.pairs]

    @property
    def nbytes(self) -> int:
        return self.size * len(self.pairs)


@dataclass(frozen=True, slots=True)
class Point:
    """One fault.

    Attributes:
        victim: which side of the transfers it strikes.
        fault: ``kill -9`` or SIGSTOP.
        warm: whether the two have spoken before, so that nothing is lost in connecting.
        transfers: under way with the victim.
        moment: when it strikes, as a share of the time that the transfers take.
        jitter: seconds on top of that.
        patient: a stopped receiver is waited for as long as the time limit allows; else its ships are aborted.
        pause: seconds between a stop and what the survivor does about it.
    """

    victim: Side
    fault: Fault
    warm: bool
    transfers: tuple[Transfer, ...]
    moment: float
    jitter: float
    patient: bool
    pause: float


def draw_point(seed: int, scheme: str, number: int) -> Point:
    """The point of that number: each four in a row have both sides and both faults."""
    rng = random.Random(f"{seed} {scheme} {number}")
    size = rng.choice(SIZES)
    blocks = POOL_BYTES // size
    victims = range(blocks - blocks // INNOCENT_SHARE)
    count = rng.choice((1, 1, 2, 3))
    room = len(victims) // count
    transfers = []
    for index in range(count):
        # Few blocks as often as many.
        most = max(1, int(room ** rng.random()))
        transfers.append(draw_transfer(rng, size, victims[index * room : (index + 1) * room], most))
    side: Side = "sender" if number % 2 else "receiver"
    fault: Fault = "kill" if number % 4 < 2 else "stop"
    return Point(
        victim=side,
        fault=fault,
        transfers=tuple(transfers),
        moment=rng.uniform(-0.05, 1.1),
        jitter=rng.uniform(0.0, 0.003),
        patient=rng.random() < 0.5,
        pause=rng.uniform(0.0, 0.2),
        warm=rng.random() < 0.7,
    )


def draw_transfer(rng: random.Random, size: int, room: Sequence[int], count: int) -> Transfer:
    """``count`` blocks of ``room``, in runs or scattered, in one to four chunks."""
    count = min(count, len(room))
    if rng.random() < 0.5:
        first, second = rng.randrange(len(room) - count + 1), rng.randrange(len(room) - count + 1)
        pairs = list(zip(room[first : first + count], room[second : second + count], strict=True))
    else:
        pairs = list(zip(rng.sample(room, count), sorted(rng.sample(room, count)), strict=True))
    chunks = min(rng.randint(1, 4), count)
    cuts = [0, *sorted(rng.sample(range(1, count), chunks - 1)), count]
    parts = tuple(tuple(pairs[start:stop]) for start, stop in pairwise(cuts))
    return Transfer(rng.randbytes(16).hex(), size, parts)


def innocent_transfers(seed: int, size: int) -> Iterator[Transfer]:
    """Small transfers without end, in the part of the pool that is the innocent peer's."""
    rng = random.Random(seed)
    blocks = POOL_BYTES // size
    room = range(blocks - blocks // INNOCENT_SHARE, blocks)
    while True:
        yield draw_transfer(rng, size, room, max(1, int(len(room) ** rng.random())))
