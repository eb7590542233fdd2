r"""One sequence on the decode side, and the table of its moves.

Life cycle::

    WAITING --reserve--> IMPORTING --commit--> RUNNING --finish--> FINISHED
       |                     |                    |  \--drop while a step computes it--> LEAVING --step ends--> GONE
       \-------drop---------/---drop-------------/--drop--> GONE

A fork of a sequence that has just committed goes from WAITING to RUNNING at once: it shares the other's blocks, the
last and partial one too, until one of them writes that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from decode_worker.drafter import Drafter
from engine.block_pool import HolderKind, Owner
from engine.prefix_index import BlockHash
from protocol.ids import Peer, RequestKey
from protocol.messages import Reserve, StageTimes
from protocol.transitions import Tracker, TransitionTable


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    IMPORTING = auto()
    RUNNING = auto()
    LEAVING = auto()
    FINISHED = auto()
    GONE = auto()


class SequenceEvent(Enum):
    """What moves a sequence."""

    RESERVE = auto()
    COMMIT = auto()
    FORK = auto()
    FINISH = auto()
    DROP = auto()
    DROP_IN_STEP = auto()
    STEP_ENDED = auto()


SEQUENCES = TransitionTable(
    "sequence",
    SequenceState.WAITING,
    {
        (SequenceState.WAITING, SequenceEvent.RESERVE): SequenceState.IMPORTING,
        (SequenceState.WAITING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.WAITING, SequenceEvent.FORK): SequenceState.RUNNING,
        (SequenceState.IMPORTING, SequenceEvent.COMMIT): SequenceState.RUNNING,
        (SequenceState.IMPORTING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.RUNNING, SequenceEvent.FINISH): SequenceState.FINISHED,
        (SequenceState.RUNNING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.RUNNING, SequenceEvent.DROP_IN_STEP): SequenceState.LEAVING,
        (SequenceState.LEAVING, SequenceEvent.STEP_ENDED): SequenceState.GONE,
    },
)
"""The one transition table of a sequence."""


def table_owner(key: RequestKey) -> Owner:
    """Holds the blocks that a sequence's kernels use."""
    return Owner(HolderKind.TABLE, str(key))


def import_owner(key: RequestKey) -> Owner:
    """Holds the blocks that the transport may write."""
    return Owner(HolderKind.IMPORT, str(key))


def quarantine_owner(key: RequestKey) -> Owner:
    """Holds the blocks of an import that ended before its window was quiet."""
    return Owner(HolderKind.QUARANTINE, str(key))


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's sequence.

    Attributes:
        request: as it came from the router.
        router: who asked.
        order: by arrival; the youngest is preempted first.
        arrived, committed: on the injected clock.
        token_ids: prompt and output so far.
        computed: tokens whose KV is in the pool.
        produced: output tokens of the whole request so far, earlier attempts included.
        block_table: physical blocks.
        passed: leading blocks that lie out of reach, given back; the padding block stands in their place.
        cached_blocks: leading blocks found in this worker's own prefix cache.
        lanes: sequences that it comes to once it has forked.
        copied: ``(source, target)`` of a shared block that the next step copies before it writes; the hold on the
            source goes when that step has ended.
        hashes: of the full blocks so far.
        times: of the handoff, sent with the first tokens.
        drafter: guesses how it goes on; None before it runs, and where nothing is guessed.
        draft: what the step under way tries after its last token.
    """

    request: Reserve
    router: Peer
    order: int
    arrived: float
    tracker: Tracker[SequenceState, SequenceEvent]
    token_ids: list[int]
    hashes: list[BlockHash]
    produced: int
    computed: int = 0
    committed: float = 0.0
    block_table: list[int] = field(default_factory=list)
    passed: int = 0
    cached_blocks: int = 0
    lanes: int = 1
    copied: tuple[int, int] | None = None
    times: StageTimes | None = None
    drafter: Drafter | None = None
    draft: tuple[int, ...] = ()

    @property
    def key(self) -> RequestKey:
        """Request and attempt."""
        return self.request.key
