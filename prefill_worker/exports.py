"""Carries out what the lease book decides: holds on blocks, ships, messages to decode workers.

Life cycle: made with an empty book, every event goes through a method here, :meth:`Exports.close` once all leases are
to end. One event loop; ships run as tasks and come back as events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from engine.block_pool import BlockPool, HolderKind, Owner
from engine.device_pool import DevicePool
from kv_transfer.choice import Chooser
from kv_transfer.instructions import (
    Failed,
    Hold,
    Instruction,
    Quarantine,
    Release,
    Send,
    Ship,
    StopShips,
)
from kv_transfer.lease import LeaseBook
from kv_transfer.lease_state import Layers
from kv_transfer.tally import Tally
from kv_transfer.transport import TransportConfig, scheme_of
from prefill_worker.shipping import Shipping
from protocol.errors import ChannelLost, KVFerryError, Preempted, TransferError, TransportRefused, VersionMismatch
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Abort, ErrorInfo, Grant, Handover, Message, Prefill, Renew, Settle
from protocol.transfer_counts import Outcome
from protocol.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)


def lease_owner(key: RequestKey) -> Owner:
    """Holds the blocks that a reader may still want."""
    return Owner(HolderKind.LEASE, str(key))


def quarantine_owner(key: RequestKey) -> Owner:
    """Holds blocks of a closed lease that the transport may still read."""
    return Owner(HolderKind.QUARANTINE, str(key))


class Exports:
    """The leases of one prefill worker.

    Args:
        pool: whose blocks are leased.
        layout: of the pool.
        memory: the pool's bytes, or the pool where it is on a device.
        descriptor: of the pool's memory where that can be shared.
        mode: which transport to use, as :mod:`kv_transfer.choice` names it.
        send: sends a message to a decode worker.
        failed: tells the worker that a lease ended badly.
        closed: tells the worker that a lease has given back its blocks.
        transport: settings of the transports.
        staging_bytes: memory in which blocks are made that cannot go straight from the pool.
        watch: sees what goes by; nobody does by default.

    Attributes:
        kv_blocks, kv_bytes, kv_seconds: shipped and acknowledged so far.
        tally: counts what the leases come to.
        chooser: picks the transport for each decode worker.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        memory: memoryview | DevicePool,
        *,
        descriptor: int | None,
        mode: str,
        send: Callable[[Peer, Message], bool],
        failed: Callable[[RequestKey, ErrorInfo], None],
        closed: Callable[[RequestKey], None],
        transport: TransportConfig,
        staging_bytes: int,
        watch: WorkerWatch | None = None,
    ) -> None:
        self.book = LeaseBook()
        self.tally = Tally()
        self.kv_blocks = 0
        self.kv_bytes = 0
        self.kv_seconds = 0.0
        self._pool = pool
        self._layout = layout
        self._shipping = Shipping(layout, memory, descriptor, transport, staging_bytes, mode)
        self.chooser = Chooser(mode, self._shipping.unusable)
        self._send = send
        self._failed = failed
        self._closed = closed
        self._watch = watch or WorkerWatch()
        self._readers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, request: Prefill, reader: Peer) -> None:
        """Open the lease of a prompt that ``reader`` will take over."""
        # A worker that started again reads nothing that its former life was to read.
        former = self._readers.get(reader.name)
        self._readers[reader.name] = reader
        if former is not None and former.incarnation < reader.incarnation:
            self._carry_out(self.book.reader_lost(former, time.monotonic()), "lost")
        now = time.monotonic()
        instructions = self.book.open(
            request.key,
            reader,
            None,
            num_tokens=len(request.token_ids),
            block_size=self._layout.block_size,
            ttl=request.lease_ttl,
            now=now,
        )
        if self.book.is_open(request.key):
            self.tally.opened(request.key, now)
            self._look_for_grant(request.key, now)
        self._carry_out(instructions)

    def computed(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """The next logical blocks are complete."""
        self._carry_out(self.book.computed(key, blocks, time.monotonic()))

    def layers_computed(self, key: RequestKey, blocks: Sequence[int], done: int) -> None:
        """The first ``done`` layers of the next logical blocks are computed; with all of them these are complete."""
        layers = Layers(done, self._layout) if done < self._layout.num_layers else None
        self._carry_out(self.book.computed(key, blocks, time.monotonic(), layers=layers))

    def finished(self, key: RequestKey, next_token: int, fork_tokens: tuple[int, ...] = ()) -> None:
        """The whole prompt is computed and its first token drawn, and that of each fork."""
        self._carry_out(self.book.finished(key, next_token, time.monotonic(), fork_tokens=fork_tokens))

    def cancel(self, key: RequestKey) -> None:
        """The router ended the attempt."""
        self._carry_out(self.book.cancel(key, time.monotonic()), "cancelled")

    def fail(self, key: RequestKey, error: KVFerryError) -> None:
        """This worker cannot finish the prompt: its reader and the router are told."""
        self._carry_out(self.book.fail(key, error, time.monotonic()), "failed")

    def give_back(self) -> bool:
        """End the youngest lease whose reader has no room yet, so that its blocks serve another; False if none does.

        The router lets the request come again, and finds most of it in the prefix cache.
        """
        key = self.book.youngest_waiting()
        if key is not None:
            self.fail(key, Preempted("its blocks were wanted by a request whose reader waits for them"))
        return key is not None

    def receive(self, sender: Peer, message: Message) -> None:
        """A message of a decode worker; what a decode worker does not send changes nothing."""
        now = time.monotonic()
        self._watch.received(sender, message)
        match message:
            case Grant():
                instructions = self.book.grant(sender, message, now)
                self._look_for_grant(message.key, now)
                self._carry_out(instructions)
            case Renew():
                self._carry_out(self.book.renew(sender, message, now))
            case Settle():
                self._carry_out(self.book.settle(sender, message, now), "settled")
            case Abort():
                self._carry_out(self.book.abort(sender, message, now), "aborted")
            case _:
                logger.warning("decode worker %s sent a %s", sender, type(message).__name__)

    def tick(self) -> None:
        """Let what is due expire."""
        self._carry_out(self.book.tick(time.monotonic()), "expired")
        self._watch.tick()

    async def close(self) -> None:
        """Stop every ship and the transports under them."""
        await self._shipping.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look_for_grant(self, key: RequestKey, now: float) -> None:
        if self.book.is_granted(key):
            self.tally.granted(key, now)

    def _carry_out(self, instructions: list[Instruction], outcome: Outcome = "broken") -> None:
        """Do what the book asks; a lease that closes by it is counted under ``outcome``."""
        self.tally.asked(instructions, outcome, time.monotonic())
        closed: list[RequestKey] = []
        for instruction in instructions:
            match instruction:
                case Hold(key, blocks):
                    self._pool.share(lease_owner(key), blocks)
                case Ship():
                    self._spawn(self._ship(instruction))
                case Send(peer, Handover() as message):
                    # After the last ship's frame, which sets out in a turn of its own and has the longer way.
                    asyncio.get_running_loop().call_soon(self._tell, peer, message)
                case Send(peer, message):
                    self._tell(peer, message)
                case StopShips(_, ticket):
                    self._spawn(self._shipping.abort(ticket))
                case Quarantine(key):
                    self._pool.move_all(lease_owner(key), quarantine_owner(key))
                case Release(key):
                    self._pool.release_all(lease_owner(key))
                    self._pool.release_all(quarantine_owner(key))
                    closed.append(key)
                case Failed(key, error):
                    self._failed(key, error)
        # Last: the worker forgets the request with its lease, and could not report a failure after that.
        for key in closed:
            self._closed(key)

    def _tell(self, peer: Peer, message: Message) -> None:
        self._watch.sent(peer, message)
        self._send(peer, message)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ship(self, order: Ship) -> None:
        address, offered = "", order.addresses
        try:
            offered = self._shipping.ways(order)
            address = self.chooser.choose(offered)
            self.tally.ships_by(order.key, scheme_of(address))
            report = await self._shipping.ship(address, order)
        except Exception as error:
            # Whatever went wrong, the book must hear of it: without a report the blocks would drain for ever.
            if isinstance(error, ChannelLost):
                self.chooser.forget(offered)
            elif isinstance(error, (TransportRefused, VersionMismatch)):
                self.chooser.avoid(address, error.message)
            cause = error if isinstance(error, KVFerryError) else TransferError(f"ship {order.ship_id} failed: {error}")
            if isinstance(error, VersionMismatch):
                # Two releases in one pool: by another transport, or between two others, the request can be served.
                cause = TransportRefused(error.message)
            if cause is not error:
                logger.exception("ship %d of %s failed", order.ship_id, order.key)
            self.tally.ship_broke(order.key, address.partition("://")[0], cause.code)
            self._carry_out(self.book.ship_failed(order.key, order.ship_id, cause, time.monotonic()))
            return
        self.kv_blocks += order.finishes
        self.kv_bytes += report.nbytes
        self.kv_seconds += report.seconds
        self.tally.shipped(scheme_of(address), report)
        self._watch.shipped(order.key, scheme_of(address), report.nbytes, report.seconds)
        now = time.monotonic()
        self._carry_out(self.book.shipped(order.key, order.ship_id, report.nbytes, order.finishes, now))
