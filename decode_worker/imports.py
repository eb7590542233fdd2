"""Carries out what the import book decides: windows on the pool, grants, commits.

Life cycle: made with an empty book, every event goes through a method here, :meth:`Imports.close` at the end. One event
loop; closing a window takes a moment, so it runs as a task and comes back as an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from decode_worker.sequence import Sequence, import_owner, quarantine_owner
from engine.block_pool import BlockPool
from kv_transfer.imports import ImportBook
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
from kv_transfer.tally import Tally
from kv_transfer.transport import Landed, Receiver, Window
from protocol.errors import TransferError
from protocol.ids import Peer, RequestKey, new_ticket
from protocol.messages import ErrorInfo, Handover, Message, PrefillAddress, Refuse, Renew
from protocol.transfer_counts import Outcome
from protocol.wire_layout import WireLayout
from protocol.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)


class Imports:
    """The imports of one decode worker.

    Args:
        pool: whose blocks are granted.
        wire: the form in which the pool's blocks cross.
        receiver: writes into the pool what prefill workers ship.
        vocab_size: of the model that the tokens handed over go to.
        send: sends a message to a prefill worker.
        commit: called when every block is there and its window is closed, with what came and the seconds from the end
            of prefill's last chunk to now.
        failed: called when an import ended badly.
        freed: called when blocks of a failed import came free.
        watch: sees what goes by; nobody does by default.

    Attributes:
        kv_blocks, kv_bytes, kv_seconds: landed so far.
        tally: counts what the imports come to.
    """

    def __init__(
        self,
        pool: BlockPool,
        wire: WireLayout,
        receiver: Receiver,
        *,
        vocab_size: int,
        send: Callable[[PrefillAddress, Message], bool],
        commit: Callable[[Commit, float], None],
        failed: Callable[[RequestKey, ErrorInfo], None],
        freed: Callable[[], None],
        watch: WorkerWatch | None = None,
    ) -> None:
        self.book = ImportBook()
        self.tally = Tally()
        self.kv_blocks = 0
        self.kv_bytes = 0
        self.kv_seconds = 0.0
        self._pool = pool
        self._wire = wire
        self._receiver = receiver
        self._vocab_size = vocab_size
        self._send = send
        self._commit = commit
        self._failed = failed
        self._freed = freed
        self._watch = watch or WorkerWatch()
        self._handed_over: dict[RequestKey, float] = {}
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def rate(self) -> float:
        """Bytes per second at which blocks have landed; 0 before the first."""
        return self.kv_bytes / self.kv_seconds if self.kv_seconds else 0.0

    def wait(self, sequence: Sequence) -> None:
        """A request waits for a reservation: keep its lease alive meanwhile."""
        request, prefill = sequence.request, sequence.prefill
        assert prefill is not None, "what is computed here has no lease"
        self._meet(prefill.peer)
        now = time.monotonic()
        instructions = self.book.waiting(request.key, prefill, request.lease_ttl, now)
        self._look_for_opening(request.key, now)
        self._carry_out(instructions)

    def open(self, sequence: Sequence) -> None:
        """A sequence has its blocks: grant them."""
        request, prefill = sequence.request, sequence.prefill
        assert prefill is not None, "what is computed here is not imported"
        self._meet(prefill.peer)
        blocks = tuple(sequence.block_table[sequence.cached_blocks :])
        now = time.monotonic()
        instructions = self.book.open(
            request.key,
            prefill,
            first_block=sequence.cached_blocks,
            blocks=blocks,
            generations=tuple(self._pool.generation(block) for block in blocks),
            num_tokens=len(request.token_ids),
            layout=self._wire.layout,
            addresses=self._receiver.addresses,
            ticket=new_ticket(),
            ttl=request.lease_ttl,
            now=now,
            wire_dtype=self._wire.dtype,
            forks=len(request.forks),
            vocab_size=self._vocab_size,
        )
        self._look_for_opening(request.key, now)
        self._carry_out(instructions)

    def cancel(self, key: RequestKey) -> None:
        """The attempt is over, for whatever reason of this side's or the router's."""
        self._handed_over.pop(key, None)
        self._carry_out(self.book.cancel(key, time.monotonic()), "cancelled")

    def receive(self, sender: Peer, message: Message) -> None:
        """A message of a prefill worker; what a prefill worker does not send changes nothing."""
        now = time.monotonic()
        self._watch.received(sender, message)
        match message:
            case Handover():
                if self.book.is_open(message.key):
                    self._handed_over.setdefault(message.key, now)
                self._carry_out(self.book.handover(sender, message, now))
            case Renew():
                self._carry_out(self.book.renew(sender, message, now))
            case Refuse():
                self._carry_out(self.book.refuse(sender, message, now), "refused")
            case _:
                logger.warning("prefill worker %s sent a %s", sender, type(message).__name__)

    def reconnected(self, endpoint: str) -> None:
        """The connection to the prefill worker there was lost, and made again."""
        self._carry_out(self.book.reconnected(endpoint, time.monotonic()), "lost")

    def tick(self) -> None:
        """Renew leases, and let what is due expire."""
        self._carry_out(self.book.tick(time.monotonic()), "expired")
        self._watch.tick()

    async def close(self) -> None:
        """Close the receiver; not a byte of the pool changes after this."""
        await self._receiver.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look_for_opening(self, key: RequestKey, now: float) -> None:
        if self.book.is_open(key):
            self.tally.opened(key, now)

    def _carry_out(self, instructions: list[Instruction], outcome: Outcome = "broken") -> None:
        """Do what the book asks; an import that ends by it is counted under ``outcome``."""
        self.tally.asked(instructions, outcome, time.monotonic())
        for instruction in instructions:
            match instruction:
                case OpenWindow(_, ticket, blocks, generations, sender):
                    window = Window(ticket, blocks, generations, self._wire.block_bytes, sender=str(sender))
                    self._receiver.open(window, self._landed, self._broken)
                case Send(peer, message, endpoint):
                    self._watch.sent(peer, message)
                    self._send(PrefillAddress(peer=peer, endpoint=endpoint), message)
                case CloseWindow(_, ticket):
                    self._spawn(self._close_window(ticket))
                case Quarantine(key):
                    self._pool.move_all(import_owner(key), quarantine_owner(key))
                case FreeBlocks(key):
                    self._pool.release_all(import_owner(key))
                    self._pool.release_all(quarantine_owner(key))
                    self._freed()
                case Commit(key, handover):
                    arrived = self._handed_over.pop(key)
                    self._commit(instruction, handover.tail + time.monotonic() - arrived)
                case Failed(key, error):
                    self._handed_over.pop(key, None)
                    self._failed(key, error)

    def _meet(self, peer: Peer) -> None:
        # A worker that started again has lost whatever its former life was to send.
        former = self._peers.get(peer.name)
        self._peers[peer.name] = peer
        if former is not None and former.incarnation < peer.incarnation:
            self._carry_out(self.book.prefill_lost(former, time.monotonic()), "lost")

    def _landed(self, landed: Landed) -> None:
        self.kv_blocks += len(landed.blocks)
        self.kv_bytes += landed.nbytes
        self.kv_seconds += landed.seconds
        self._carry_out(
            self.book.landed(
                landed.ticket,
                len(landed.blocks),
                landed.nbytes,
                time.monotonic(),
                seconds=landed.seconds,
                transport=landed.transport,
            )
        )

    def _broken(self, ticket: bytes, error: TransferError) -> None:
        self.tally.landing_broke(error.code)
        self._carry_out(self.book.broken(ticket, error, time.monotonic()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_window(self, ticket: bytes) -> None:
        await self._receiver.close_window(ticket)
        self._carry_out(self.book.quiesced(ticket, time.monotonic()), "settled")
