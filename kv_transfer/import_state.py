"""One import of a decode worker: its states, and what has landed of what was granted.

::

    WAITING - open -> IMPORTING - complete -> CLOSING - quiesced -> COMMITTED

WAITING drops to DROPPED. IMPORTING and CLOSING drop to DRAINING, and that goes to DROPPED once the window is quiesced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.errors import IntegrityMismatch, InvariantViolation
from protocol.ids import RequestKey
from protocol.messages import Grant, Handover, PrefillAddress
from protocol.transitions import Tracker, TransitionTable


class ImportState(Enum):
    """Where an import stands."""

    WAITING = auto()
    IMPORTING = auto()
    CLOSING = auto()
    DRAINING = auto()
    COMMITTED = auto()
    DROPPED = auto()


class ImportEvent(Enum):
    """What moves an import."""

    OPEN = auto()
    COMPLETE = auto()
    DROP = auto()
    QUIESCED = auto()


IMPORT_TABLE: TransitionTable[ImportState, ImportEvent] = TransitionTable(
    "import",
    ImportState.WAITING,
    {
        (ImportState.WAITING, ImportEvent.OPEN): ImportState.IMPORTING,
        (ImportState.WAITING, ImportEvent.DROP): ImportState.DROPPED,
        (ImportState.IMPORTING, ImportEvent.COMPLETE): ImportState.CLOSING,
        (ImportState.IMPORTING, ImportEvent.DROP): ImportState.DRAINING,
        (ImportState.CLOSING, ImportEvent.DROP): ImportState.DRAINING,
        (ImportState.CLOSING, ImportEvent.QUIESCED): ImportState.COMMITTED,
        (ImportState.DRAINING, ImportEvent.QUIESCED): ImportState.DROPPED,
    },
)
"""How an import moves; anything else is illegal."""


@dataclass(slots=True, kw_only=True)
class Import:
    """What an import book knows of one key.

    Attributes:
        key: request and attempt.
        prefill: whom the blocks come from.
        router: opaque to the book; returned with a failure.
        ttl: seconds without a sign of the prefill worker that end an opened import.
        tracker: the state.
        grant: what was granted, once the blocks are reserved.
        num_tokens: of the prompt; 0 before that.
        forks: further continuations of it that the hand-over begins.
        vocab_size: tokens that the hand-over brings are below this; None where any will do.
        landed_blocks, landed_bytes: written so far.
        landing_seconds: that the transport spent on them.
        transport: URI scheme that they came by.
        handover: the record, once it is there.
        renew_at: when the next renewal is due; None when no more is.
        expires: when the import ends by itself; None while nothing counts.
    """

    key: RequestKey
    prefill: PrefillAddress
    router: bytes | None
    ttl: float
    tracker: Tracker[ImportState, ImportEvent] = field(init=False)
    grant: Grant | None = None
    num_tokens: int = 0
    forks: int = 0
    vocab_size: int | None = None
    landed_blocks: int = 0
    landed_bytes: int = 0
    landing_seconds: float = 0.0
    transport: str = ""
    handover: Handover | None = None
    renew_at: float | None = None
    expires: float | None = None

    def __post_init__(self) -> None:
        self.tracker = IMPORT_TABLE.start(str(self.key))

    @property
    def state(self) -> ImportState:
        """Where the import stands."""
        return self.tracker.state

    @property
    def open(self) -> bool:
        """Whether the import may still commit."""
        return self.state in (ImportState.WAITING, ImportState.IMPORTING, ImportState.CLOSING)

    @property
    def granted_blocks(self) -> int:
        """Blocks that the prefill worker was asked to write."""
        return 0 if self.grant is None else len(self.grant.blocks)

    @property
    def granted_bytes(self) -> int:
        """Bytes of these blocks on the wire."""
        return 0 if self.grant is None else self.grant.nbytes

    @property
    def complete(self) -> bool:
        """Whether the hand-over is there, and all that was granted has landed."""
        landed = (self.landed_blocks, self.landed_bytes) == (self.granted_blocks, self.granted_bytes)
        return self.state is ImportState.IMPORTING and self.handover is not None and landed

    def fault(self) -> IntegrityMismatch | None:
        """How what has landed, or the hand-over, contradicts what was granted; None when it does not (yet)."""
        granted = (self.granted_blocks, self.granted_bytes)
        blocks, nbytes = self.landed_blocks, self.landed_bytes
        short = blocks < granted[0] and nbytes < granted[1]
        if not short and (blocks, nbytes) != granted:
            return IntegrityMismatch(
                f"import {self.key}: {granted} blocks and bytes granted, {(blocks, nbytes)} landed"
            )
        if self.handover is None:
            return None
        told = (self.handover.blocks, self.handover.nbytes)
        if told != granted:
            return IntegrityMismatch(f"import {self.key}: {granted} blocks and bytes granted, {told} handed over")
        if self.handover.num_tokens != self.num_tokens:
            tokens = f"{self.num_tokens} tokens asked for, {self.handover.num_tokens} handed over"
            return IntegrityMismatch(f"import {self.key}: {tokens}")
        if len(self.handover.fork_tokens) != self.forks:
            forks = f"{self.forks} forks asked for, {len(self.handover.fork_tokens)} handed over"
            return IntegrityMismatch(f"import {self.key}: {forks}")
        token = max((self.handover.next_token, *self.handover.fork_tokens))
        if self.vocab_size is not None and token >= self.vocab_size:
            outside = f"token id {token} was handed over, outside the vocabulary of {self.vocab_size}"
            return IntegrityMismatch(f"import {self.key}: {outside}")
        return None

    def check_integrity(self) -> None:
        """Raise where the parts contradict each other.

        Raises:
            InvariantViolation: they do; names the import.
        """
        waiting, importing = self.state is ImportState.WAITING, self.state is ImportState.IMPORTING
        checks = (
            (not self.tracker.final, "has ended and is still kept"),
            (waiting == (self.grant is None), f"is {self.state.name} and has grant {self.grant}"),
            (importing == (self.expires is not None), f"is {self.state.name} and expires at {self.expires}"),
            (self.open == (self.renew_at is not None), f"is {self.state.name} and renews at {self.renew_at}"),
            (not self.complete, "is complete and its window stays open"),
            (not importing or self.fault() is None, "goes on with what was not granted"),
        )
        for holds, complaint in checks:
            if not holds:
                raise InvariantViolation(f"import {self.key} {complaint}")
