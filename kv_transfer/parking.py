"""Grants and aborts that reached a prefill worker before the request that they are about.

Router and decode worker reach a prefill worker by different ways, so a grant may overtake the prompt. Life cycle of a
parked message: parked, then taken when the request begins, or dropped when its time is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.ids import Peer, RequestKey
from protocol.messages import MAX_BLOCKS, Abort, Grant


@dataclass(frozen=True, slots=True)
class Parked:
    """A message that waits for its request.

    Attributes:
        sender: who sent it.
        message: the grant, or the abort that took its place.
        expires: when it is dropped.
    """

    sender: Peer
    message: Grant | Abort
    expires: float


class Parking:
    """A bounded place for early messages, at most one of each sender about each key.

    Args:
        capacity: messages parked at most.
        ttl: seconds that one waits at most; a grant's own ``ttl`` may be shorter.
        max_blocks: blocks that all parked grants name together at most, since a grant may be as long as a frame.

    Raises:
        ConfigError: a value is not above 0; names the field and the value.
    """

    def __init__(self, capacity: int = 1024, ttl: float = 60.0, max_blocks: int = MAX_BLOCKS) -> None:
        for name, value in (("capacity", capacity), ("ttl", ttl), ("max_blocks", max_blocks)):
            if not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}", field=name)
        self._capacity = capacity
        self._ttl = ttl
        self._lots: dict[RequestKey, dict[Peer, Parked]] = {}
        self._count = 0
        self._max_blocks = max_blocks
        self._blocks = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._lots

    def park(self, sender: Peer, message: Grant | Abort, now: float) -> bool:
        """Keep ``message`` for its request; False when there is no room, or another of the same sender stands.

        An abort takes the place of the same sender's grant; the same message again changes nothing.
        """
        lot = self._lots.get(message.key, {})
        if sender in lot:
            if isinstance(message, Grant):
                return lot[sender].message == message
            self._blocks -= _blocks(lot[sender].message)
        elif self._count >= self._capacity or self._blocks + _blocks(message) > self._max_blocks:
            return False
        else:
            self._count += 1
        # In this order a ttl that is not a number cannot win.
        wait = min(self._ttl, message.ttl) if isinstance(message, Grant) else self._ttl
        lot[sender] = Parked(sender, message, now + wait)
        self._blocks += _blocks(lot[sender].message)
        self._lots[message.key] = lot
        return True

    def take(self, key: RequestKey) -> list[Parked]:
        """Remove and return everything parked for ``key``."""
        lot = self._lots.pop(key, {})
        self._count -= len(lot)
        self._blocks -= sum(_blocks(parked.message) for parked in lot.values())
        return list(lot.values())

    def drop_sender(self, sender: Peer) -> None:
        """Forget everything that ``sender`` parked."""
        self._drop([parked for lot in self._lots.values() for parked in lot.values() if parked.sender == sender])

    def take_expired(self, now: float) -> list[Parked]:
        """Remove and return what has waited long enough."""
        expired = [parked for lot in self._lots.values() for parked in lot.values() if now >= parked.expires]
        self._drop(expired)
        return expired

    def deadline(self) -> float | None:
        """When the next one expires."""
        return min((parked.expires for lot in self._lots.values() for parked in lot.values()), default=None)

    def _drop(self, gone: list[Parked]) -> None:
        for parked in gone:
            lot = self._lots[parked.message.key]
            del lot[parked.sender]
            self._count -= 1
            self._blocks -= _blocks(parked.message)
            if not lot:
                del self._lots[parked.message.key]


def _blocks(message: Grant | Abort) -> int:
    return len(message.blocks) if isinstance(message, Grant) else 0
