"""One lease of a prefill worker: its states, and what it has computed, shipped and promised.

::

    COMPUTING  - grant  -> GRANTED  - finish -> HANDED_OVER
    COMPUTING  - finish -> COMPUTED - grant  -> HANDED_OVER

Each of these closes: to CLOSED where no ship is in flight, else to DRAINING, and to CLOSED when the last has reported.

The hand-over goes out with the last ship, not after its answer. It promises that every wanted block has been written or
is in a ship under way; what has really landed only the reader knows, and it takes nothing over before that is all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.instructions import Ship
from protocol.errors import IntegrityMismatch, InvariantViolation, KVFerryError, LeaseRefused
from protocol.ids import Peer, RequestKey
from protocol.layout import PADDING_BLOCK, KVLayout
from protocol.messages import Grant, Handover
from protocol.sampling import TokenId
from protocol.transitions import Tracker, TransitionTable


class LeaseState(Enum):
    """Where a lease stands."""

    COMPUTING = auto()
    GRANTED = auto()
    COMPUTED = auto()
    HANDED_OVER = auto()
    DRAINING = auto()
    CLOSED = auto()


class LeaseEvent(Enum):
    """What moves a lease."""

    GRANT = auto()
    FINISH = auto()
    CLOSE = auto()
    CLOSE_IN_FLIGHT = auto()
    DRAINED = auto()


LEASE_TABLE: TransitionTable[LeaseState, LeaseEvent] = TransitionTable(
    "lease",
    LeaseState.COMPUTING,
    {
        (LeaseState.COMPUTING, LeaseEvent.GRANT): LeaseState.GRANTED,
        (LeaseState.COMPUTING, LeaseEvent.FINISH): LeaseState.COMPUTED,
        (LeaseState.COMPUTING, LeaseEvent.CLOSE): LeaseState.CLOSED,
        (LeaseState.GRANTED, LeaseEvent.FINISH): LeaseState.HANDED_OVER,
        (LeaseState.GRANTED, LeaseEvent.CLOSE): LeaseState.CLOSED,
        (LeaseState.GRANTED, LeaseEvent.CLOSE_IN_FLIGHT): LeaseState.DRAINING,
        (LeaseState.COMPUTED, LeaseEvent.GRANT): LeaseState.HANDED_OVER,
        (LeaseState.COMPUTED, LeaseEvent.CLOSE): LeaseState.CLOSED,
        (LeaseState.HANDED_OVER, LeaseEvent.CLOSE): LeaseState.CLOSED,
        (LeaseState.HANDED_OVER, LeaseEvent.CLOSE_IN_FLIGHT): LeaseState.DRAINING,
        (LeaseState.DRAINING, LeaseEvent.DRAINED): LeaseState.CLOSED,
    },
)
"""How a lease moves; anything else is illegal."""

_MAY_SHIP = (LeaseState.GRANTED, LeaseState.HANDED_OVER, LeaseState.DRAINING)


@dataclass(frozen=True, slots=True)
class Layers:
    """The first layers of some blocks, which are computed while the others are not.

    Attributes:
        done: how many, fewer than all.
        layout: of the pool they are in; a reader whose layout is another gets its blocks whole.
    """

    done: int
    layout: KVLayout

    def __post_init__(self) -> None:
        if not 0 < self.done < self.layout.num_layers:
            raise InvariantViolation(f"done must lie in (0, {self.layout.num_layers}), got {self.done}", field="done")


@dataclass(slots=True, kw_only=True)
class Lease:
    """What a lease book knows of one key.

    Attributes:
        key: request and attempt.
        reader: the decode worker's incarnation that may grant, renew, settle and abort.
        router: opaque to the book; returned with a failure.
        num_tokens, block_size, num_blocks: of the prompt in this worker's pool; all that is shipped counts in the
            reader's blocks.
        ttl: seconds the lease lives without a sign of its reader.
        tracker: the state.
        source: ids of this worker's complete blocks, in logical order.
        begun, layers: the blocks after these of which the first layers are computed, and which.
        shipped_layers: how many of these layers ships have taken.
        grant: the reader's, once it is there.
        next_block: logical index of the first block that no ship has taken.
        in_flight: blocks that each ship finishes which has not reported, by ship id.
        shipped_blocks, shipped_bytes: sums over the reports.
        next_token, fork_tokens, finished_at: set when the whole prompt is computed.
        expires: when the lease ends by itself; None while nothing counts.
    """

    key: RequestKey
    reader: Peer
    router: bytes | None
    num_tokens: int
    block_size: int
    num_blocks: int
    ttl: float
    tracker: Tracker[LeaseState, LeaseEvent]
    source: list[int] = field(default_factory=list)
    begun: tuple[int, ...] = ()
    layers: Layers | None = None
    shipped_layers: int = 0
    grant: Grant | None = None
    next_block: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    shipped_blocks: int = 0
    shipped_bytes: int = 0
    next_token: TokenId | None = None
    fork_tokens: tuple[TokenId, ...] = ()
    finished_at: float | None = None
    expires: float | None = None

    @property
    def state(self) -> LeaseState:
        """Where the lease stands."""
        return self.tracker.state

    @property
    def open(self) -> bool:
        """Whether the lease has not closed (a draining lease has)."""
        return self.state not in (LeaseState.DRAINING, LeaseState.CLOSED)

    @property
    def prefilling(self) -> bool:
        """Whether the prompt is still being computed, or waits for it."""
        return self.state in (LeaseState.COMPUTING, LeaseState.GRANTED)

    @property
    def awaits_grant(self) -> bool:
        """Whether the prompt is computed, holds blocks, and its reader has no room for them yet."""
        return self.finished_at is not None and self.grant is None

    @property
    def ships_differ(self) -> bool:
        """Whether everything has been reported as written, and it is not what was handed over."""
        if self.state is not LeaseState.HANDED_OVER or self.in_flight or self.grant is None:
            return False
        return (self.shipped_blocks, self.shipped_bytes) != (len(self.grant.blocks), self.grant.nbytes)

    @property
    def computed_blocks(self) -> int:
        """Leading blocks of the reader's of which every token is computed; 0 while its block size is not known."""
        if self.grant is None:
            return 0
        if len(self.source) == self.num_blocks:
            return self.grant.layout.blocks_for(self.num_tokens)
        return len(self.source) * self.block_size // self.grant.layout.block_size

    @property
    def end(self) -> tuple[int, int] | None:
        """The prompt's last block, and the slots in it behind the last token; None until the prompt is computed."""
        if len(self.source) < self.num_blocks:
            return None
        return self.source[-1], self.num_blocks * self.block_size - self.num_tokens

    def grant_fault(self, grant: Grant) -> KVFerryError | None:
        """Why this lease cannot take this grant, or None."""
        key, blocks = self.key, grant.blocks
        if self.grant is not None:
            return LeaseRefused(f"lease {key} has a grant already")
        end, wanted = grant.first_block + len(blocks), grant.layout.blocks_for(self.num_tokens)
        if end != wanted:
            return IntegrityMismatch(f"lease {key} fills {wanted} blocks, the grant ends at block {end}")
        if len(grant.generations) != len(blocks):
            counts = f"{len(blocks)} blocks and {len(grant.generations)} generations"
            return IntegrityMismatch(f"the grant of {key} has {counts}")
        if len(set(blocks)) != len(blocks) or PADDING_BLOCK in blocks:
            return IntegrityMismatch(f"the grant of {key} names a block twice, or block {PADDING_BLOCK}")
        return None

    def advance(self, blocks: tuple[int, ...], layers: Layers | None) -> tuple[int, ...]:
        """The next blocks are complete, or these layers of them; returns those that were not known.

        Raises:
            InvariantViolation: they do not follow what was known, or are more than the prompt has.
        """
        if len(self.source) + len(blocks) > self.num_blocks:
            counts = f"{self.num_blocks} blocks, got {len(self.source)} and {len(blocks)} more"
            raise InvariantViolation(f"lease {self.key} has {counts}")
        before = 0 if self.layers is None else self.layers.done
        if (self.begun and blocks != self.begun) or (layers is not None and layers.done <= before):
            told = f"{layers} of blocks {blocks} after {self.layers} of {self.begun}"
            raise InvariantViolation(f"lease {self.key} is told of {told}")
        fresh = () if self.begun else blocks
        self.begun, self.layers = ((), None) if layers is None else (blocks, layers)
        if layers is None:
            self.source.extend(blocks)
        return fresh

    def next_ship(self, ship_id: int) -> Ship | None:
        """Take what is granted, computed and in no ship yet into a ship; None when that is nothing."""
        grant, begin, end = self.grant, self.next_block, self.computed_blocks
        if grant is None:
            return None
        layers, first = None, self.shipped_layers
        if begin < end:
            # Of blocks that were shipped in part these are all: they become complete together, and then ship at once.
            layers = range(first, grant.layout.num_layers) if first else None
            self.next_block, self.shipped_layers = end, 0
        elif self._may_cut(grant) and self.layers is not None and first < self.layers.done:
            end += len(self.begun)
            if begin >= end:
                return None
            layers = range(first, self.layers.done)
            self.shipped_layers = self.layers.done
        else:
            return None
        size = grant.layout.block_size
        tokens = range(begin * size, min(end * size, self.num_tokens))
        known = [*self.source, *self.begun]
        wanted = slice(begin - grant.first_block, end - grant.first_block)
        ship = Ship(
            key=self.key,
            ship_id=ship_id,
            addresses=grant.addresses,
            ticket=grant.ticket,
            layout=grant.layout,
            source_blocks=tuple(known[tokens.start // self.block_size : -(-tokens.stop // self.block_size)]),
            target_blocks=grant.blocks[wanted],
            generations=grant.generations[wanted],
            tokens=tokens,
            wire_dtype=grant.wire_dtype,
            layers=layers,
        )
        self.in_flight[ship_id] = ship.finishes
        return ship

    def _may_cut(self, grant: Grant) -> bool:
        return self.layers is not None and self.layers.layout == grant.layout and grant.wire.as_in_pool

    def handover(self, now: float) -> Handover:
        """The hand-over record of a lease whose wanted blocks have shipped, or are in ships under way."""
        assert self.state is LeaseState.HANDED_OVER
        assert self.grant is not None
        assert self.next_block == self.grant.first_block + len(self.grant.blocks), "ships take what is computed at once"
        assert self.next_token is not None
        assert self.finished_at is not None
        return Handover(
            key=self.key,
            num_tokens=self.num_tokens,
            next_token=self.next_token,
            fork_tokens=self.fork_tokens,
            blocks=len(self.grant.blocks),
            nbytes=self.grant.nbytes,
            ticket=self.grant.ticket,
            tail=max(0.0, now - self.finished_at),
        )

    def check_integrity(self) -> None:
        """Raise where the parts contradict each other.

        Raises:
            InvariantViolation: they do; names the lease.
        """
        taken = 0 if self.grant is None else self.next_block - self.grant.first_block
        checks = (
            (self.state is not LeaseState.CLOSED, "is closed and still kept"),
            (not self.in_flight or self.state in _MAY_SHIP, f"has ships in flight in {self.state.name}"),
            (self.state is not LeaseState.DRAINING or bool(self.in_flight), "drains with nothing in flight"),
            (self.next_block <= self.computed_blocks or taken == 0, "ships blocks that are not computed"),
            (len(self.source) + len(self.begun) <= self.num_blocks, "has more blocks than its prompt"),
            (bool(self.begun) == (self.layers is not None), "has layers of no blocks, or blocks of no layers"),
            (self.shipped_layers <= (0 if self.layers is None else self.layers.done), "ships layers not computed"),
            (not self.open or taken == self.shipped_blocks + sum(self.in_flight.values()), "has lost a ship"),
            (self.open or self.expires is None, "is closed and still expires"),
            (self.state is not LeaseState.COMPUTED or self.expires is not None, "waits and never expires"),
        )
        for holds, complaint in checks:
            if not holds:
                raise InvariantViolation(f"lease {self.key} {complaint}")
