"""The prefill side of the handoff: every lease of one prefill worker.

A lease keeps the source blocks of one request alive until its reader, one incarnation of a decode worker, has them.
Life cycle of a key: opened when its prefill begins; granted, before that or at any time after; computed chunk by
chunk, and shipped as it is computed; finished, and handed over as soon as it is granted as well, with the last ship;
then closed, exactly once: settled, cancelled, aborted, expired, failed, or its reader lost. A lease that closes with
ships in flight drains first: its blocks are released when the last of them has reported, never on time alone. A closed
key is remembered, so that what comes late changes nothing.

The book does no I/O and reads no clock: each event takes ``now`` (monotonic seconds) and returns instructions.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.instructions import Failed, Hold, Instruction, Quarantine, Release, Send, StopShips
from kv_transfer.lease_state import LEASE_TABLE, Layers, Lease, LeaseEvent, LeaseState
from kv_transfer.parking import Parked, Parking
from kv_transfer.tombstones import Tombstones
from protocol.errors import (
    IntegrityMismatch,
    InvalidRequest,
    InvariantViolation,
    KVFerryError,
    LeaseExpired,
    LeaseRefused,
    WorkerLost,
)
from protocol.ids import Peer, RequestKey
from protocol.messages import Abort, ErrorInfo, Grant, Refuse, Renew, Settle
from protocol.sampling import TokenId

MAX_TTL = 1e9
"""Longest lease, in seconds; the bound of a duration on the wire."""


class LeaseBook:
    """The leases of one prefill worker, one state machine per key.

    Args:
        parking: where early grants wait; its bounds are the book's.
        tombstones: where ended keys are remembered.
    """

    def __init__(self, parking: Parking | None = None, tombstones: Tombstones | None = None) -> None:
        self._leases: dict[RequestKey, Lease] = {}
        self._parking = Parking() if parking is None else parking
        self._tombstones = Tombstones() if tombstones is None else tombstones
        self._next_ship_id = 0

    @property
    def open_count(self) -> int:
        """Leases that still hold blocks, draining ones included."""
        return len(self._leases)

    def ends(self) -> dict[int, int]:
        """Slots behind the last token of each computed prompt whose blocks are held, by the prompt's last block."""
        return dict(end for lease in self._leases.values() if (end := lease.end) is not None)

    def is_open(self, key: RequestKey) -> bool:
        """Whether ``key`` has a lease that has not closed."""
        return self._find(key) is not None

    def has_ended(self, key: RequestKey, now: float) -> bool:
        """Whether ``key`` had a lease that has closed, or was cancelled before it had one."""
        return self._tombstones.find(key, now) is not None

    def is_granted(self, key: RequestKey) -> bool:
        """Whether the reader of ``key`` has room for its blocks."""
        lease = self._find(key)
        return lease is not None and lease.grant is not None

    def youngest_waiting(self) -> RequestKey | None:
        """The lease opened last of those that are computed, hold blocks, and wait for a grant."""
        waiting = (lease.key for lease in reversed(self._leases.values()) if lease.open and lease.awaits_grant)
        return next(waiting, None)

    def open(
        self,
        key: RequestKey,
        reader: Peer,
        router: bytes | None,
        num_tokens: int,
        block_size: int,
        ttl: float,
        now: float,
    ) -> list[Instruction]:
        """The prefill of ``key`` begins, or waits for its turn; a grant that came earlier is attached.

        A key that has ended stays ended, and nothing is opened: ask :meth:`is_open`.

        Args:
            key: request and attempt.
            reader: the decode worker that will take over.
            router: opaque; comes back with a failure.
            num_tokens: of the prompt, at least 1.
            block_size: tokens per block of this worker's pool.
            ttl: seconds the lease lives without a sign of its reader.
            now: monotonic seconds.

        Raises:
            InvalidRequest: ``num_tokens`` or ``ttl`` is out of range; names the field and the value.
            InvariantViolation: the key is open already.
        """
        if num_tokens < 1:
            raise InvalidRequest(f"num_tokens must be at least 1, got {num_tokens}", field="num_tokens")
        if not 0.0 < ttl <= MAX_TTL:
            raise InvalidRequest(f"ttl must lie in (0, {MAX_TTL:g}], got {ttl!r}", field="ttl")
        if self.is_open(key):
            raise InvariantViolation(f"lease {key} is open already")
        if key in self._leases or self._tombstones.find(key, now) is not None:
            return []
        parked = self._parking.take(key)
        if any(each.sender == reader and isinstance(each.message, Abort) for each in parked):
            self._tombstones.bury(key, _info(LeaseRefused(f"lease {key} was aborted by its reader")), now)
            return _refuse_parked(parked, LeaseRefused(f"lease {key} was aborted"))
        self._leases[key] = Lease(
            key=key,
            reader=reader,
            router=router,
            num_tokens=num_tokens,
            block_size=block_size,
            num_blocks=-(-num_tokens // block_size),
            ttl=ttl,
            tracker=LEASE_TABLE.start(str(key)),
        )
        instructions: list[Instruction] = []
        for each in parked:
            if isinstance(each.message, Grant):
                instructions += self.grant(each.sender, each.message, now)
        return instructions

    def grant(self, sender: Peer, message: Grant, now: float) -> list[Instruction]:
        """The reader wants these blocks; what is computed of them ships at once.

        Refused: of an ended key, by anyone but the lease's reader, a second and different one, one that does not fit
        the prompt, and an early one for which there is no room.
        """
        key = message.key
        lease = self._leases.get(key)
        if lease is None and self._tombstones.find(key, now) is None:
            if self._parking.park(sender, message, now):
                return []
            return [_refuse(sender, key, LeaseRefused(f"lease {key} is not open and there is no room to wait for it"))]
        if lease is None or not lease.open:
            return [self._refuse_ended(sender, key, now)]
        if not self._is_reader(lease, sender):
            return [_refuse(sender, key, LeaseRefused(f"lease {key} is for {lease.reader}, not for {sender}"))]
        if message == lease.grant:
            self._sign_of_reader(lease, message.ttl, now)
            return []
        fault = lease.grant_fault(message)
        if fault is not None:
            return [_refuse(sender, key, fault)]
        lease.tracker.move(LeaseEvent.GRANT)
        lease.grant = message
        lease.next_block = message.first_block
        self._sign_of_reader(lease, message.ttl, now)
        return [*self._ship_computed(lease), *self._hand_over(lease, now)]

    def computed(
        self, key: RequestKey, blocks: Sequence[int], now: float, *, layers: Layers | None = None
    ) -> list[Instruction]:
        """The next logical blocks of ``key`` are complete, or these layers of them: what is so will not change.

        Blocks that were told of by their layers are told of once more, the same ones, when they are complete.

        Raises:
            InvariantViolation: they do not follow what was told before, or are more than the prompt has.
        """
        lease = self._find(key)
        if lease is None or not blocks:
            return []
        fresh = lease.advance(tuple(blocks), layers)
        return [*([Hold(key, fresh)] if fresh else []), *self._ship_computed(lease)]

    def finished(
        self, key: RequestKey, next_token: TokenId, now: float, *, fork_tokens: tuple[TokenId, ...] = ()
    ) -> list[Instruction]:
        """The whole prompt is computed, its last block announced, and the first token drawn, and that of each fork.

        Raises:
            InvariantViolation: blocks of the prompt are missing, or it finished before.
        """
        lease = self._find(key)
        if lease is None:
            return []
        if len(lease.source) != lease.num_blocks:
            raise InvariantViolation(f"lease {key} finished with {len(lease.source)} of {lease.num_blocks} blocks")
        lease.tracker.move(LeaseEvent.FINISH)
        lease.next_token = next_token
        lease.fork_tokens = fork_tokens
        lease.finished_at = now
        if lease.expires is None:
            lease.expires = now + lease.ttl
        return self._hand_over(lease, now)

    def shipped(self, key: RequestKey, ship_id: int, nbytes: int, blocks: int, now: float) -> list[Instruction]:
        """Every byte of a ship was acknowledged by the receiver, which ``blocks`` it finished.

        A report of an unknown ship changes nothing.
        """
        lease, asked = self._take_ship(key, ship_id)
        if lease is None:
            return []
        if not lease.open:
            return self._release_if_drained(lease)
        if blocks != asked:
            error = IntegrityMismatch(f"lease {key}: ship {ship_id} finished {blocks} blocks of {asked}")
            return self._close(lease, error, now, refuse=True, fail=True, ships=True)
        lease.shipped_blocks += blocks
        lease.shipped_bytes += nbytes
        if lease.ships_differ:
            error = IntegrityMismatch(f"lease {key}: its ships wrote {lease.shipped_bytes} bytes, not what was granted")
            return self._close(lease, error, now, refuse=True, fail=True, ships=True)
        return []

    def ship_failed(self, key: RequestKey, ship_id: int, error: KVFerryError, now: float) -> list[Instruction]:
        """A ship ended otherwise, and reads the source no more: the lease fails. An unknown ship changes nothing."""
        lease, _ = self._take_ship(key, ship_id)
        if lease is None:
            return []
        if not lease.open:
            return self._release_if_drained(lease)
        return self._close(lease, error, now, refuse=True, fail=True, ships=True)

    def renew(self, sender: Peer, message: Renew, now: float) -> list[Instruction]:
        """A sign of the reader. While the prompt is not computed it is answered in kind, a sign of ours.

        Without that answer a reader could not tell a long prefill queue from a prefill worker that knows nothing of the
        request; with it after the prompt is computed, a grant or a hand-over that was lost would never be noticed.
        """
        lease = self._find(message.key)
        if lease is None:
            known = message.key in self._leases or self._tombstones.find(message.key, now) is not None
            return [self._refuse_ended(sender, message.key, now)] if known else []
        if not self._is_reader(lease, sender):
            error = LeaseRefused(f"lease {lease.key} is for {lease.reader}, not for {sender}")
            return [_refuse(sender, lease.key, error)]
        self._sign_of_reader(lease, message.ttl, now)
        return [Send(lease.reader, Renew(key=lease.key, ttl=lease.ttl))] if lease.prefilling else []

    def settle(self, sender: Peer, message: Settle, now: float) -> list[Instruction]:
        """The reader has committed what was handed over. Before that it changes nothing.

        It may be faster than the answer to the last ship, whose bytes have then all landed.
        """
        lease = self._find(message.key)
        if lease is None or not self._is_reader(lease, sender) or lease.state is not LeaseState.HANDED_OVER:
            return []
        error = LeaseRefused(f"lease {lease.key} is settled")
        return self._close(lease, error, now, refuse=False, fail=False, stop=False)

    def abort(self, sender: Peer, message: Abort, now: float) -> list[Instruction]:
        """The reader wants nothing any more. May come before :meth:`open`, which then opens nothing."""
        lease = self._leases.get(message.key)
        if lease is None:
            if self._tombstones.find(message.key, now) is None:
                self._parking.park(sender, message, now)
            return []
        if not lease.open or not self._is_reader(lease, sender):
            return []
        error = LeaseRefused(f"lease {lease.key} was aborted by its reader: {message.error.message}")
        return self._close(lease, error, now, refuse=False, fail=False)

    def cancel(self, key: RequestKey, now: float) -> list[Instruction]:
        """The router has ended the attempt. Idempotent; may come before :meth:`open`, which then opens nothing."""
        error = LeaseRefused(f"lease {key} was cancelled")
        lease = self._leases.get(key)
        if lease is None:
            self._tombstones.bury(key, _info(error), now)
            return _refuse_parked(self._parking.take(key), error)
        return self._close(lease, error, now, refuse=True, fail=False) if lease.open else []

    def fail(self, key: RequestKey, error: KVFerryError, now: float) -> list[Instruction]:
        """This worker cannot finish the prompt. The router and the reader are told."""
        lease = self._find(key)
        return [] if lease is None else self._close(lease, error, now, refuse=True, fail=True)

    def reader_lost(self, peer: Peer, now: float) -> list[Instruction]:
        """This incarnation of a decode worker is gone, and with it every lease that it reads."""
        self._parking.drop_sender(peer)
        instructions: list[Instruction] = []
        for lease in [each for each in self._leases.values() if each.open and each.reader == peer]:
            error = WorkerLost(f"lease {lease.key}: its reader {peer} is gone")
            instructions += self._close(lease, error, now, refuse=False, fail=True)
        return instructions

    def tick(self, now: float) -> list[Instruction]:
        """Expire what is due."""
        instructions: list[Instruction] = []
        for parked in self._parking.take_expired(now):
            error = LeaseExpired(f"lease {parked.message.key} was not opened while its grant waited")
            instructions += _refuse_parked([parked], error)
        for lease in [each for each in self._leases.values() if each.expires is not None and now >= each.expires]:
            error = LeaseExpired(f"lease {lease.key} expired: no sign of {lease.reader} for {lease.ttl:g} s")
            instructions += self._close(lease, error, now, refuse=True, fail=True)
        return instructions

    def deadline(self) -> float | None:
        """When :meth:`tick` next has something to do."""
        times = [lease.expires for lease in self._leases.values() if lease.expires is not None]
        parked = self._parking.deadline()
        return min(times if parked is None else [*times, parked], default=None)

    def check_integrity(self) -> None:
        """Raise where the book contradicts itself.

        Raises:
            InvariantViolation: it does; names the key.
        """
        for key, lease in self._leases.items():
            lease.check_integrity()
            if key in self._parking:
                raise InvariantViolation(f"lease {key} has begun, and a message for it is still parked")

    def _find(self, key: RequestKey) -> Lease | None:
        lease = self._leases.get(key)
        return lease if lease is not None and lease.open else None

    def _is_reader(self, lease: Lease, sender: Peer) -> bool:
        return sender == lease.reader

    def _sign_of_reader(self, lease: Lease, ttl: float, now: float) -> None:
        # The router's word bounds the reader's; in this order a ttl that is not a number cannot win.
        lease.expires = now + min(lease.ttl, ttl)

    def _ship_computed(self, lease: Lease) -> list[Instruction]:
        ships: list[Instruction] = []
        while (ship := lease.next_ship(self._next_ship_id)) is not None:
            self._next_ship_id += 1
            ships.append(ship)
        return ships

    def _hand_over(self, lease: Lease, now: float) -> list[Instruction]:
        return [Send(lease.reader, lease.handover(now))] if lease.state is LeaseState.HANDED_OVER else []

    def _take_ship(self, key: RequestKey, ship_id: int) -> tuple[Lease | None, int]:
        lease = self._leases.get(key)
        blocks = None if lease is None else lease.in_flight.pop(ship_id, None)
        return (None, 0) if blocks is None else (lease, blocks)

    def _close(
        self,
        lease: Lease,
        error: KVFerryError,
        now: float,
        *,
        refuse: bool,
        fail: bool,
        stop: bool = True,
        ships: bool = False,
    ) -> list[Instruction]:
        key, info = lease.key, _info(error)
        handed_over = lease.state is LeaseState.HANDED_OVER
        # With the hand-over sent the reader answers for the request, so its end is no longer ours to report. But that
        # its ships failed it may never hear: a link that carries no block carries no refusal either.
        fail = fail and (ships or not handed_over)
        self._tombstones.bury(key, info, now)
        lease.expires = None
        instructions: list[Instruction]
        if lease.in_flight:
            assert lease.grant is not None
            lease.tracker.move(LeaseEvent.CLOSE_IN_FLIGHT)
            instructions = [StopShips(key, lease.grant.ticket)] if stop else []
            instructions.append(Quarantine(key))
        else:
            lease.tracker.move(LeaseEvent.CLOSE)
            del self._leases[key]
            instructions = [Release(key)]
        if refuse:
            instructions.append(Send(lease.reader, Refuse(key=key, error=info)))
        if fail:
            instructions.append(Failed(key, info, lease.router, handed_over))
        return instructions

    def _release_if_drained(self, lease: Lease) -> list[Instruction]:
        if lease.in_flight:
            return []
        lease.tracker.move(LeaseEvent.DRAINED)
        del self._leases[lease.key]
        return [Release(lease.key)]

    def _refuse_ended(self, sender: Peer, key: RequestKey, now: float) -> Send:
        info = self._tombstones.find(key, now)
        return Send(sender, Refuse(key=key, error=info or _info(LeaseRefused(f"lease {key} has ended"))))


def _info(error: KVFerryError) -> ErrorInfo:
    return ErrorInfo.of(error)


def _refuse(peer: Peer, key: RequestKey, error: KVFerryError) -> Send:
    return Send(peer, Refuse(key=key, error=ErrorInfo.of(error)))


def _refuse_parked(parked: list[Parked], error: KVFerryError) -> list[Instruction]:
    return [_refuse(each.sender, each.message.key, error) for each in parked if isinstance(each.message, Grant)]
