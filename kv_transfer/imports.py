"""The decode side of the handoff: every import of one decode worker.

An import brings the blocks of one request from one incarnation of a prefill worker into blocks reserved here. Life
cycle of a key: it may wait for its reservation, and renews the lease meanwhile; it opens with the blocks, which are
outstanding from then on; blocks land and the hand-over comes, in any order; when both agree with what was granted the
window closes, and once it is quiesced the import commits and the lease is settled. Whatever else ends it closes the
window too, and the blocks stay in quarantine until that is quiesced. Each opened key ends in exactly one of Commit and
FreeBlocks.

The book does no I/O and reads no clock: each event takes ``now`` (monotonic seconds) and returns instructions.
"""

from __future__ import annotations

from kv_transfer.import_state import Import, ImportEvent, ImportState
from kv_transfer.instructions import (
    CloseWindow,
    Commit,
    Failed,
    FreeBlocks,
    Instruction,
    OpenWindow,
    Quarantine,
    Send,
)
from kv_transfer.tombstones import Tombstones
from protocol.errors import (
    ChannelLost,
    ImportExpired,
    InvalidRequest,
    InvariantViolation,
    KVFerryError,
    RequestCancelled,
    TransferError,
    WorkerLost,
)
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Abort, ErrorInfo, Grant, Handover, Message, PrefillAddress, Refuse, Renew, Settle
from protocol.wire_layout import WireDtype

MAX_TTL = 1e9
"""Longest import, in seconds; the bound of a duration on the wire."""
RENEWALS_PER_TTL = 3
"""A lease outlives the loss of all but one of these."""


class ImportBook:
    """The imports of one decode worker, one state machine per key.

    Args:
        tombstones: where ended keys are remembered.
    """

    def __init__(self, tombstones: Tombstones | None = None) -> None:
        self._imports: dict[RequestKey, Import] = {}
        self._by_ticket: dict[bytes, Import] = {}
        self._tombstones = Tombstones() if tombstones is None else tombstones

    @property
    def open_count(self) -> int:
        """Imports that wait, run, or still hold blocks."""
        return len(self._imports)

    def is_open(self, key: RequestKey) -> bool:
        """Whether ``key`` has an import that may still commit."""
        return self._find(key) is not None

    def has_ended(self, key: RequestKey, now: float) -> bool:
        """Whether ``key`` had an import that has ended, or was cancelled before it had one."""
        return self._tombstones.find(key, now) is not None

    def waiting(
        self, key: RequestKey, prefill: PrefillAddress, ttl: float, now: float, *, router: bytes | None = None
    ) -> list[Instruction]:
        """The request waits for a reservation; the lease is renewed until it has one.

        A key that has ended stays ended: ask :meth:`is_open`.

        Args:
            key: request and attempt.
            prefill: the worker that holds, or will hold, the lease.
            ttl: seconds the lease lives without a sign of ours.
            now: monotonic seconds.
            router: opaque; comes back with a failure.

        Raises:
            InvalidRequest: ``ttl`` is out of range; names the field and the value.
            InvariantViolation: the key waits, or is open, already.
        """
        _check_ttl(ttl)
        if self.is_open(key):
            raise InvariantViolation(f"import {key} has begun already")
        if key in self._imports or self._tombstones.find(key, now) is not None:
            return []
        item = Import(key=key, prefill=prefill, router=router, ttl=ttl)
        self._imports[key] = item
        return [self._renewal(item, now)]

    def open(
        self,
        key: RequestKey,
        prefill: PrefillAddress,
        first_block: int,
        blocks: tuple[int, ...],
        generations: tuple[int, ...],
        num_tokens: int,
        layout: KVLayout,
        addresses: tuple[str, ...],
        ticket: bytes,
        ttl: float,
        now: float,
        *,
        router: bytes | None = None,
        wire_dtype: WireDtype | None = None,
        forks: int = 0,
        vocab_size: int | None = None,
    ) -> list[Instruction]:
        """The blocks are reserved; open the window and send the grant. May follow :meth:`waiting`.

        A key that has ended gives its blocks back at once.

        Args:
            key: request and attempt.
            prefill: the worker that computes the prompt.
            first_block: logical index of the first block that is not here already.
            blocks: destination ids of logical blocks ``first_block ...``, reserved for this key.
            generations: of these blocks.
            num_tokens: of the prompt.
            layout: of this worker's pool.
            addresses: of this worker's receiver.
            ticket: fresh, 16 bytes.
            ttl: seconds without a sign of the prefill worker that end the import.
            now: monotonic seconds.
            router: opaque; comes back with a failure.
            wire_dtype: in which the blocks shall cross; None is the pool's own.
            forks: further continuations of the prompt, whose first tokens the hand-over must bring.
            vocab_size: these tokens and the prompt's own are below it; None where any will do.

        Raises:
            InvalidRequest: ``ttl`` is out of range; names the field and the value.
            InvariantViolation: the key is open already, the ticket is in use, or the blocks do not fit the prompt.
        """
        _check_ttl(ttl)
        if first_block + len(blocks) != layout.blocks_for(num_tokens) or len(generations) != len(blocks):
            counts = f"{len(blocks)} blocks from {first_block} and {len(generations)} generations"
            raise InvariantViolation(f"import {key}: {counts} for {num_tokens} tokens")
        if ticket in self._by_ticket:
            raise InvariantViolation(f"import {key}: its ticket is in use")
        item = self._imports.get(key)
        if item is None and self._tombstones.find(key, now) is None:
            item = Import(key=key, prefill=prefill, router=router, ttl=ttl)
            self._imports[key] = item
        if item is None:
            return [FreeBlocks(key)]
        if item.prefill != prefill:
            raise InvariantViolation(f"import {key} waits for {item.prefill.peer}, opened for {prefill.peer}")
        item.tracker.move(ImportEvent.OPEN)
        item.ttl = ttl
        item.num_tokens = num_tokens
        item.forks = forks
        item.vocab_size = vocab_size
        item.grant = Grant(
            key=key,
            first_block=first_block,
            blocks=blocks,
            generations=generations,
            layout=layout,
            addresses=addresses,
            ticket=ticket,
            ttl=ttl,
            wire_dtype=wire_dtype,
        )
        item.expires = now + ttl
        item.renew_at = now + ttl / RENEWALS_PER_TTL
        self._by_ticket[ticket] = item
        return [OpenWindow(key, ticket, blocks, generations, prefill.peer), _send(item, item.grant)]

    def landed(
        self, ticket: bytes, blocks: int, nbytes: int, now: float, *, seconds: float = 0.0, transport: str = ""
    ) -> list[Instruction]:
        """So many blocks were written whole under ``ticket``. After the end of an import it changes nothing.

        Args:
            ticket: of the grant.
            blocks: that are whole now.
            nbytes: that were written.
            now: monotonic seconds.
            seconds: that the transport spent on it.
            transport: URI scheme that it came by.
        """
        item = self._by_ticket.get(ticket)
        if item is None or not item.open:
            return []
        item.landed_blocks += blocks
        item.landed_bytes += nbytes
        item.landing_seconds += seconds
        item.transport = transport or item.transport
        return self._judge(item, now)

    def broken(self, ticket: bytes, error: TransferError, now: float) -> list[Instruction]:
        """A write under ``ticket`` ended half done. With everything landed before, it changes nothing."""
        item = self._by_ticket.get(ticket)
        if item is None or item.state is not ImportState.IMPORTING:
            return []
        return self._drop(item, error, now)

    def handover(self, sender: Peer, message: Handover, now: float) -> list[Instruction]:
        """Prefill has written everything, or is about to. What it says must agree with the grant and what lands."""
        item = self._find(message.key)
        if item is None or item.grant is None or sender != item.prefill.peer or message.ticket != item.grant.ticket:
            return []
        if item.handover is not None:
            return []
        item.handover = message
        return self._judge(item, now)

    def quiesced(self, ticket: bytes, now: float) -> list[Instruction]:
        """The window of ``ticket`` is closed; no byte changes under it any more."""
        item = self._by_ticket.get(ticket)
        if item is None:
            return []
        end = item.tracker.move(ImportEvent.QUIESCED)
        del self._by_ticket[ticket]
        del self._imports[item.key]
        if end is ImportState.DROPPED:
            return [FreeBlocks(item.key)]
        assert item.handover is not None
        self._tombstones.bury(item.key, ErrorInfo.of(TransferError(f"import {item.key} is committed")), now)
        commit = Commit(item.key, item.handover, item.landing_seconds, item.transport)
        return [commit, _send(item, Settle(key=item.key))]

    def renew(self, sender: Peer, message: Renew, now: float) -> list[Instruction]:
        """The prefill worker still computes the prompt: the import lives on."""
        item = self._find(message.key)
        if item is not None and sender == item.prefill.peer and item.handover is None:
            self._sign_of_prefill(item, now)
        return []

    def refuse(self, sender: Peer, message: Refuse, now: float) -> list[Instruction]:
        """There is no such lease, or no more: the attempt fails."""
        item = self._find(message.key)
        if item is None or sender != item.prefill.peer:
            return []
        return self._drop(item, message.error.to_error(), now)

    def cancel(self, key: RequestKey, now: float) -> list[Instruction]:
        """The router has ended the attempt. Idempotent; may come before :meth:`waiting` and :meth:`open`."""
        error = RequestCancelled(f"import {key} was cancelled")
        if key not in self._imports:
            self._tombstones.bury(key, ErrorInfo.of(error), now)
            return []
        item = self._find(key)
        return [] if item is None else self._drop(item, error, now, fail=False)

    def fail(self, key: RequestKey, error: KVFerryError, now: float) -> list[Instruction]:
        """This worker cannot take the request over. The router and the prefill worker are told."""
        item = self._find(key)
        return [] if item is None else self._drop(item, error, now)

    def prefill_lost(self, peer: Peer, now: float) -> list[Instruction]:
        """This incarnation of a prefill worker is gone. An import that has everything commits all the same."""
        instructions: list[Instruction] = []
        states = (ImportState.WAITING, ImportState.IMPORTING)
        for item in [each for each in self._imports.values() if each.prefill.peer == peer and each.state in states]:
            error = WorkerLost(f"import {item.key}: its prefill worker {peer} is gone")
            instructions += self._drop(item, error, now, abort=False)
        return instructions

    def reconnected(self, endpoint: str, now: float) -> list[Instruction]:
        """A connection to a prefill worker was lost, and is there again: so may be the grant, or the hand-over.

        What only waits says so again and again. An import that has everything commits all the same.
        """
        instructions: list[Instruction] = []
        for item in list(self._imports.values()):
            if item.prefill.endpoint == endpoint and item.state is ImportState.IMPORTING:
                lost = (
                    f"import {item.key}: the connection to {item.prefill.peer} ended, and what was on its way is lost"
                )
                instructions += self._drop(item, ChannelLost(lost), now)
        return instructions

    def tick(self, now: float) -> list[Instruction]:
        """Expire and renew what is due."""
        instructions: list[Instruction] = []
        for item in list(self._imports.values()):
            if item.expires is not None and now >= item.expires:
                instructions += self._drop(item, _expiry(item), now)
            elif item.renew_at is not None and now >= item.renew_at:
                instructions.append(self._renewal(item, now))
        return instructions

    def deadline(self) -> float | None:
        """When :meth:`tick` next has something to do."""
        items = self._imports.values()
        times = [time for item in items for time in (item.renew_at, item.expires) if time is not None]
        return min(times, default=None)

    def check_integrity(self) -> None:
        """Raise where the book contradicts itself.

        Raises:
            InvariantViolation: it does; names the key.
        """
        for item in self._imports.values():
            item.check_integrity()
        opened = {item.grant.ticket for item in self._imports.values() if item.grant is not None}
        if opened != set(self._by_ticket):
            raise InvariantViolation(f"{len(opened)} imports are open, {len(self._by_ticket)} tickets are known")

    def _find(self, key: RequestKey) -> Import | None:
        item = self._imports.get(key)
        return item if item is not None and item.open else None

    def _judge(self, item: Import, now: float) -> list[Instruction]:
        fault = item.fault()
        if fault is not None:
            return self._drop(item, fault, now)
        self._sign_of_prefill(item, now)
        if not item.complete:
            return []
        assert item.grant is not None
        item.tracker.move(ImportEvent.COMPLETE)
        item.expires = None
        return [CloseWindow(item.key, item.grant.ticket)]

    def _sign_of_prefill(self, item: Import, now: float) -> None:
        if item.expires is not None:
            item.expires = now + item.ttl

    def _renewal(self, item: Import, now: float) -> Send:
        item.renew_at = now + item.ttl / RENEWALS_PER_TTL
        return _send(item, Renew(key=item.key, ttl=item.ttl))

    def _drop(
        self, item: Import, error: KVFerryError, now: float, *, fail: bool = True, abort: bool = True
    ) -> list[Instruction]:
        key, info = item.key, ErrorInfo.of(error)
        self._tombstones.bury(key, info, now)
        # A window that is closing for a commit is not closed twice.
        close = item.state is ImportState.IMPORTING
        item.tracker.move(ImportEvent.DROP)
        item.expires = None
        item.renew_at = None
        instructions: list[Instruction] = []
        if item.grant is None:
            del self._imports[key]
        else:
            if close:
                instructions.append(CloseWindow(key, item.grant.ticket))
            instructions.append(Quarantine(key))
        if abort:
            instructions.append(_send(item, Abort(key=key, error=info)))
        if fail:
            instructions.append(Failed(key, info, item.router))
        return instructions


def _send(item: Import, message: Message) -> Send:
    return Send(item.prefill.peer, message, item.prefill.endpoint)


def _check_ttl(ttl: float) -> None:
    if not 0.0 < ttl <= MAX_TTL:
        raise InvalidRequest(f"ttl must lie in (0, {MAX_TTL:g}], got {ttl!r}", field="ttl")


def _expiry(item: Import) -> ImportExpired:
    landed = f"{item.landed_blocks} of {item.granted_blocks} blocks landed"
    handed = "not handed over" if item.handover is None else "handed over"
    return ImportExpired(f"import {item.key} expired: {handed}, {landed}")
