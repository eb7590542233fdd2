r"""One sequence on the decode side, and the table of its moves.

Life cycle::

    WAITING --reserve--> IMPORTING --commit--> RUNNING --finish--> FINISHED
    WAITING --prefill--> PREFILLING --begin--> RUNNING, of a prompt that this worker computes itself
    RUNNING --swap out--> SWAPPING_OUT --copied--> SWAPPED --swap in--> SWAPPING_IN --copied--> RUNNING
    any of them --drop--> GONE, by way of LEAVING while a step or a copy is at its blocks

A fork of a sequence that has just committed goes from WAITING to RUNNING at once: it shares the other's blocks, the
last and partial one too, until one of them writes that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from decode_worker.drafter import Drafter
from engine.block_pool import BlockPool, HolderKind, Owner
from engine.prefix_index import BlockHash, extend, root_hash
from engine.prompt import Prompt, Work
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill, PrefillAddress, Reserve, StageTimes
from protocol.transitions import Tracker, TransitionTable


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    IMPORTING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    SWAPPING_OUT = auto()
    SWAPPED = auto()
    SWAPPING_IN = auto()
    LEAVING = auto()
    FINISHED = auto()
    GONE = auto()


class SequenceEvent(Enum):
    """What moves a sequence."""

    RESERVE = auto()
    COMMIT = auto()
    PREFILL = auto()
    BEGIN = auto()
    FORK = auto()
    FINISH = auto()
    SWAP_OUT = auto()
    SWAP_IN = auto()
    COPIED = auto()
    DROP = auto()
    DROP_IN_STEP = auto()
    DROP_IN_COPY = auto()
    STEP_ENDED = auto()
    COPY_ENDED = auto()


SEQUENCES = TransitionTable(
    "sequence",
    SequenceState.WAITING,
    {
        (SequenceState.WAITING, SequenceEvent.RESERVE): SequenceState.IMPORTING,
        (SequenceState.WAITING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.WAITING, SequenceEvent.FORK): SequenceState.RUNNING,
        (SequenceState.IMPORTING, SequenceEvent.COMMIT): SequenceState.RUNNING,
        (SequenceState.IMPORTING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.WAITING, SequenceEvent.PREFILL): SequenceState.PREFILLING,
        (SequenceState.PREFILLING, SequenceEvent.BEGIN): SequenceState.RUNNING,
        (SequenceState.PREFILLING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.PREFILLING, SequenceEvent.DROP_IN_STEP): SequenceState.LEAVING,
        (SequenceState.RUNNING, SequenceEvent.FINISH): SequenceState.FINISHED,
        (SequenceState.RUNNING, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.RUNNING, SequenceEvent.DROP_IN_STEP): SequenceState.LEAVING,
        (SequenceState.LEAVING, SequenceEvent.STEP_ENDED): SequenceState.GONE,
        (SequenceState.RUNNING, SequenceEvent.SWAP_OUT): SequenceState.SWAPPING_OUT,
        (SequenceState.SWAPPING_OUT, SequenceEvent.COPIED): SequenceState.SWAPPED,
        (SequenceState.SWAPPED, SequenceEvent.SWAP_IN): SequenceState.SWAPPING_IN,
        (SequenceState.SWAPPING_IN, SequenceEvent.COPIED): SequenceState.RUNNING,
        (SequenceState.SWAPPED, SequenceEvent.DROP): SequenceState.GONE,
        (SequenceState.SWAPPING_OUT, SequenceEvent.DROP_IN_COPY): SequenceState.LEAVING,
        (SequenceState.SWAPPING_IN, SequenceEvent.DROP_IN_COPY): SequenceState.LEAVING,
        (SequenceState.LEAVING, SequenceEvent.COPY_ENDED): SequenceState.GONE,
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
        order: who has the least goes first, who has the most makes room: when the request would have arrived had it
            got its seniority by waiting, and among equals the order in which they came.
        arrived, committed, swapped: on the injected clock.
        token_ids: prompt and output so far.
        computed: tokens whose KV is in the pool.
        produced: output tokens of the whole request so far, earlier attempts included.
        block_table: physical blocks.
        cached_blocks: leading blocks found in this worker's own prefix cache when it got its blocks.
        slots: of its blocks in host memory, while it is out or on its way.
        passed: leading blocks that lie out of reach, given back; the padding block stands in their place.
        lanes: sequences that it comes to once it has forked.
        copied: ``(source, target)`` of a shared block that the next step copies before it writes; the hold on the
            source goes when that step has ended.
        hashes: of the full blocks so far.
        times: of the handoff, sent with the first tokens.
        drafter: guesses how it goes on; None before it runs, and where nothing is guessed.
        draft: what the step under way tries after its last token.
        prompt: how far its prompt is computed, where this worker does that itself; it shares the block table.
        work: what the step under way computes of the prompt; None where it computes a token of the sequence.
    """

    request: Reserve | Prefill
    router: Peer
    order: tuple[float, int]
    arrived: float
    tracker: Tracker[SequenceState, SequenceEvent]
    token_ids: list[int]
    hashes: list[BlockHash]
    produced: int
    computed: int = 0
    committed: float = 0.0
    swapped: float = 0.0
    block_table: list[int] = field(default_factory=list)
    passed: int = 0
    cached_blocks: int = 0
    slots: list[int] = field(default_factory=list)
    lanes: int = 1
    copied: tuple[int, int] | None = None
    times: StageTimes | None = None
    drafter: Drafter | None = None
    draft: tuple[int, ...] = ()
    prompt: Prompt | None = None
    work: Work | None = None

    @property
    def key(self) -> RequestKey:
        """Request and attempt."""
        return self.request.key

    @property
    def prefill(self) -> PrefillAddress | None:
        """Where its KV comes from; None where this worker computes the prompt itself."""
        return self.request.prefill if isinstance(self.request, Reserve) else None

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second that a fresh prefill of it would go by; 0 where that is not known."""
        return self.request.prefill_rate if isinstance(self.request, Reserve) else 0.0

    @property
    def copying(self) -> bool:
        """Whether its blocks are being copied to or from host memory, dropped or not."""
        copies = (SequenceState.SWAPPING_OUT, SequenceState.SWAPPING_IN)
        return self.tracker.state in copies or (self.tracker.state is SequenceState.LEAVING and bool(self.slots))


def forked(first: Sequence, index: int, next_token: int) -> Sequence:
    """Fork ``index`` of a sequence that has just committed, over the same blocks; it waits, and holds none yet."""
    fork, request = first.request.forks[index], first.request
    return Sequence(
        request=msgspec.structs.replace(request, key=fork.key, sampling=fork.sampling(request.sampling), forks=()),
        router=first.router,
        order=(first.order[0], first.order[1] + 1 + index),
        arrived=first.arrived,
        tracker=SEQUENCES.start(str(fork.key)),
        token_ids=[*first.token_ids[: first.computed], next_token],
        hashes=list(first.hashes),
        produced=request.emitted + 1,
        computed=first.computed,
        committed=first.committed,
        block_table=list(first.block_table),
        passed=first.passed,
        cached_blocks=first.cached_blocks,
    )


def seal_last(sequence: Sequence, pool: BlockPool) -> None:
    """Seal the last block of ``sequence``, if what was computed has just filled it."""
    size, stop = pool.block_size, sequence.computed
    if stop % size:
        return
    parent = sequence.hashes[-1] if sequence.hashes else root_hash(sequence.request.cache_salt.encode())
    sequence.hashes.append(extend(parent, sequence.token_ids[stop - size : stop]))
    pool.seal(sequence.block_table[stop // size - 1], sequence.hashes[-1])
