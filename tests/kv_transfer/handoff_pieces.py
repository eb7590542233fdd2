"""What the handoff's test world is made of: block pools, ships and windows under way, requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kv_transfer import instructions as do
from protocol.ids import RequestKey
from protocol.messages import Abort, Grant, Handover, Refuse, Renew, Settle

Owner = tuple[str, RequestKey]
Tokens = tuple[tuple[str, int], ...]
"""What one layer of a block holds: request and position of each token."""
Action = tuple[Any, ...]
"""What happens, and to whom."""
TTL = 3.0
METHODS = {Grant: "grant", Renew: "renew", Settle: "settle", Abort: "abort", Handover: "handover", Refuse: "refuse"}
"""Of the books, by the message that they take."""


class Fault(Exception):
    """The books have let something happen that must not."""


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise Fault(complaint)


@dataclass
class Pool:
    """Who holds which block, and what is in its layers. An unheld block holds nothing that anyone could want."""

    size: int
    holds: dict[int, frozenset[Owner]] = field(default_factory=dict)
    content: dict[int, dict[int, Tokens]] = field(default_factory=dict)
    generation: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def free(self) -> list[int]:
        return [block for block in range(1, self.size + 1) if block not in self.holds]

    def take(self, owner: Owner, count: int) -> tuple[int, ...]:
        blocks = tuple(self.free[:count])
        for block in blocks:
            self.generation[block] += 1
        self.add(owner, blocks)
        return blocks

    def add(self, owner: Owner, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.holds[block] = self.holds.get(block, frozenset()) | {owner}

    def drop(self, *owners: Owner) -> None:
        for block, holders in list(self.holds.items()):
            left = holders.difference(owners)
            self.holds[block] = left
            if not left:
                del self.holds[block]
                self.content.pop(block, None)

    def write(self, block: int, layers: Iterable[int], value: Tokens) -> None:
        self.content[block] = {**self.content.get(block, {}), **dict.fromkeys(layers, value)}

    def move(self, source: Owner, target: Owner) -> None:
        held = [block for block, holders in self.holds.items() if source in holders]
        self.add(target, held)
        self.drop(source)

    def held_by(self, block: int, *owners: Owner) -> bool:
        return not self.holds.get(block, frozenset()).isdisjoint(owners)

    def copy(self) -> Pool:
        return Pool(self.size, dict(self.holds), dict(self.content), self.generation.copy())


@dataclass(frozen=True)
class ShipRun:
    """A ship under way."""

    ship: do.Ship
    done: int = 0
    stopping: bool = False

    @property
    def layers(self) -> range:
        return range(self.ship.layout.num_layers) if self.ship.layers is None else self.ship.layers

    def reads(self, block: int, layers: range) -> bool:
        return block in self.ship.source_blocks and not set(layers).isdisjoint(self.layers)


@dataclass(frozen=True)
class WindowRun:
    """An open window."""

    key: RequestKey
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    closing: bool = False
    written: frozenset[tuple[int, int]] = frozenset()
    """Block and layer of every byte that a ship has written."""
    reported: frozenset[tuple[int, int]] = frozenset()
    """Block and layer of what whole ships have reported."""

    def whole(self, blocks: Iterable[int], layers: Iterable[int]) -> int:
        """How many of these blocks have been reported with all of these layers."""
        return sum(all((block, layer) in self.reported for layer in layers) for block in blocks)


@dataclass(frozen=True)
class Request:
    """What the router knows of one request; ``first_block`` counts blocks of the decode worker."""

    tokens: int
    first_block: int = 0
    attempt: int = 0
    state: str = "new"

    def runs(self, key: RequestKey) -> bool:
        """Whether that is its attempt, and has not ended."""
        return (self.attempt, self.state) == (key.attempt, "live")
