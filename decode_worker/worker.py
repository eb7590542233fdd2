"""The decode worker: an event loop around the scheduler, the imports and one engine thread.

Life cycle: made (cheap: no model, no socket) -> :meth:`DecodeWorker.start` loads the model, binds, announces itself
-> serves until :meth:`DecodeWorker.stop`. A fatal error of a loop of ours ends :meth:`DecodeWorker.wait` with it, and
:meth:`DecodeWorker.drain` lets it end once all is finished, as :mod:`protocol.departure` has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

import msgspec
import zmq.asyncio

from decode_worker.config import DecodeConfig
from decode_worker.counters import Counters
from decode_worker.imports import Imports
from decode_worker.local_prefill import LocalPrefill
from decode_worker.outbox import Outbox
from decode_worker.peers import PrefillPeers
from decode_worker.profile import profile_of
from decode_worker.reception import Reception
from decode_worker.refusal import prefill_refusal, refusal
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState
from decode_worker.speculator import Speculator
from decode_worker.step import chunks_of
from decode_worker.swaps import PATIENCE, Swaps
from decode_worker.trace import watch
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.pool_watch import PoolWatch
from engine.step_watch import StepWatch
from kv_transfer.instructions import Commit
from protocol.curve import CurveKeys
from protocol.departure import Leaver
from protocol.errors import KVFerryError, Overloaded, Preempted, ProtocolError, WorkerDraining, WorkerError
from protocol.forks import Fork, ForkBook
from protocol.ids import Peer, RequestKey
from protocol.loops import Loops
from protocol.messages import (
    Cancel,
    ErrorInfo,
    Failed,
    Heartbeat,
    Message,
    Prefill,
    Reserve,
    StageTimes,
    WorkerLoad,
    WorkerProfile,
)
from protocol.transfer_counts import TransferCounts
from protocol.wire_layout import WireLayout
from protocol.worker_link import WorkerLink

TICK = 0.1
"""Seconds between two looks at what has expired."""
POOL_IS_FULL = Preempted("the block pool is full; older requests go first")

logger = logging.getLogger(__name__)


class DecodeWorker:
    """One decode process, on ``engine``, or on one that ends with it.

    Attributes:
        me: name and incarnation.
        profile: what it is, once started.
        ready: whether it serves.
    """

    def __init__(self, config: DecodeConfig, engine: Engine | None = None) -> None:
        self.config = config
        self.me = Peer(config.name, config.incarnation or time.time_ns())
        self.ready = False
        self.profile: WorkerProfile | None = None
        self._engine = engine or Engine()
        self._loops = Loops()
        self._forks = ForkBook()
        self._wake = asyncio.Event()
        self._counters = Counters()

    async def start(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Load the model, bind the sockets, and begin to serve.

        Args:
            progress: called with a stage's name and the fraction done, from the loading thread.

        Raises:
            ModelError, ConfigError: the model cannot be loaded so. After any error nothing is left of the attempt.
        """
        async with AsyncExitStack() as resources:
            await self._acquire(resources, progress)
            self._resources = resources.pop_all()
        self.ready = True

    async def _acquire(self, resources: AsyncExitStack, progress: Callable[[str, float], None] | None) -> None:
        self._stepper = await self._engine.load(self.config.engine, progress)
        resources.callback(self._engine.leave)
        if progress is not None:
            progress("sockets", 0.0)
        runner, settings = self._stepper.runner, self._stepper.runner.config
        self._max_model_len = runner.max_model_len
        self.pool = BlockPool(runner.num_blocks, settings.block_size, prefix_cache=settings.prefix_cache)
        self._watch, self._step_watch = PoolWatch(self.pool), StepWatch(self.config.wedged_after)
        self._swaps = Swaps(runner.cache, runner.copies, self.config.preemption, self.config.swap_bytes, self._copied)
        resources.push_async_callback(self._swaps.close)
        guesses, rows = self.config.speculation, settings.max_sequences
        self._speculator = (
            None if guesses is None else Speculator(guesses, self.pool, block_size=settings.block_size, max_rows=rows)
        )
        self._scheduler = DecodeScheduler(
            self.pool,
            block_size=settings.block_size,
            max_sequences=settings.max_sequences,
            swaps=self._swaps.book,
            prefers_swap=lambda sequence: self._swaps.prefers(sequence, self._imports.rate),
            window=runner.model_config.reach,
            speculator=self._speculator,
            step_tokens=self.config.step_tokens or settings.max_batch_tokens,
        )
        self._trace = await resources.enter_async_context(watch(self.config.tracing, self.me, self._scheduler.keys))
        context = zmq.asyncio.Context()
        resources.callback(context.term)
        wire, config = WireLayout(runner.layout, self.config.wire_dtype), self.config.transfer(str(self.me))
        reception = Reception(runner.cache, runner.copies, wire, self.config.transport, self.config.bind_host, config)
        resources.push_async_callback(reception.close)
        keys = CurveKeys.drawn_from(self.config.secret)
        self._peers = PrefillPeers(
            context,
            self.me,
            receive=lambda sender, message: self._imports.receive(sender, message),
            refused=lambda error: logger.warning("of a prefill worker: %s", error),
            renewed=lambda endpoint: self._imports.reconnected(endpoint),
            keys=keys,
        )
        resources.push_async_callback(self._peers.close)
        self._imports = Imports(
            self.pool,
            wire,
            reception.receiver,
            vocab_size=runner.vocab_size,
            send=self._peers.send,
            commit=self._commit,
            failed=self._import_failed,
            freed=self._wake.set,
            watch=self._trace,
        )
        resources.push_async_callback(self._imports.close)
        self.profile = profile_of(self.config, runner, reception.receiver.addresses)
        self._link = WorkerLink(
            context,
            self.me,
            self.config.routers,
            heartbeat=self._heartbeat,
            on_message=self._from_router,
            on_router_lost=self._router_lost,
            publisher=self.pool.publisher(),
            keys=keys,
            watch=self._trace,
        )
        resources.push_async_callback(self._link.close)
        self._leaver = Leaver(self.config.name, self._idle, self._hand_back, self._link.announce)
        self._outbox = Outbox(self._link.send)
        self._local_prefill = LocalPrefill(self._scheduler, self._forks, self._link.send, self._fork, self._trace)
        self._link.start()
        self._loops.watch(*self._link.tasks, self._peers.broken, self._leaver.left)
        resources.push_async_callback(self._loops.stop)
        self._loops.start("steps", self._steps())
        self._loops.start("ticks", self._ticks())

    async def wait(self) -> None:
        """Return once stopped, or drained; raise what ended a loop of ours before that."""
        await self._loops.wait()

    def drain(self, timeout: float) -> None:
        """Take no new work, finish what there is within ``timeout`` seconds, and hand back the rest."""
        self._leaver.begin(timeout)

    async def stop(self) -> None:
        """Stop serving; every block, thread and socket is given back."""
        if not self.ready:
            return
        self.ready = False
        await self._resources.aclose()

    def load(self) -> WorkerLoad:
        """What it is doing now."""
        parts = (self.pool, self._stepper, self._step_watch, self._scheduler, self._imports, self._swaps)
        more = (self._speculator, self._outbox, self._local_prefill)
        return self._counters.load(*parts, *more, draining=self._leaver.leaving)

    def transfer(self) -> TransferCounts:
        """What it has counted of its handoffs."""
        return self._imports.tally.counts()

    def _heartbeat(self) -> Heartbeat:
        assert self.profile is not None
        return Heartbeat(self.profile, self.load(), self.transfer())

    # --- messages -------------------------------------------------------------------------------------------------

    def _from_router(self, router: Peer, message: Message) -> None:
        match message:
            case Reserve() | Prefill():
                self._accept(router, message)
            case Cancel():
                self._drop(message.key)
            case _:
                logger.warning("router %s sent a %s to a decode worker", router, type(message).__name__)

    def _accept(self, router: Peer, request: Reserve | Prefill) -> None:
        if self._scheduler.find(request.key) is not None or self._imports.book.has_ended(request.key, time.monotonic()):
            # It came twice, or its cancel was faster; then whom it was to carry comes again.
            lost = [fork for fork in request.forks if self._forks.first_of(fork.key) == fork.key]
            lost = [fork for fork in lost if self._scheduler.find(fork.key) is None]
            self._send_back(router, lost, "the request that carried it was cancelled")
            return
        known = self._scheduler.keys() if request.forks else ()
        newcomers = self._forks.newcomers(request.key, request.forks, known)
        if len(newcomers) <= len(request.forks):
            for key in newcomers:
                self._fail(router, key, ErrorInfo.of(ProtocolError(f"{request.key} names a key that is in use")))
            return
        runner = self._stepper.runner
        error = refusal(request, self._max_model_len, runner.vocab_size) or runner.grammars.refusal(request.sampling)
        error = error or self._leaver.refusal()
        if error is None and isinstance(request, Prefill):
            error = prefill_refusal(request, self.me, able=self.config.local_prefill)
        if error is None and self._scheduler.waiting >= self.config.max_waiting:
            error = Overloaded(f"{self._scheduler.waiting} requests wait, {self.config.max_waiting} are allowed")
        self._forks.open(request.key, request.forks)
        if error is not None:
            self._fail(router, request.key, ErrorInfo.of(error))
            return
        # Those that could never run beside the others: the cached prompt serves them.
        most = self.config.engine.max_sequences
        self._send_back(router, request.forks[most - 1 :], f"{most} sequences run side by side at most")
        sequence = self._scheduler.add(request, router, time.monotonic())
        sequence.lanes = len(self._forks.wanted(request.key))
        self._admit()
        if sequence.prefill is not None and not sequence.block_table:
            self._imports.wait(sequence)

    def _send_back(self, router: Peer, forks: Iterable[Fork], why: str) -> None:
        for fork in forks:
            self._forks.drop(fork.key)
            self._fail(router, fork.key, ErrorInfo.of(Preempted(why)))

    def _admit(self) -> None:
        now = time.monotonic()
        for sequence in self._scheduler.admit():
            if sequence.tracker.state is SequenceState.SWAPPING_IN:
                self._swaps.restore(sequence)
                continue
            self._counters.cached_tokens += sequence.cached_blocks * self.pool.block_size
            if sequence.prompt is not None:
                sequence.prompt.started = now
                self._wake.set()
                continue
            sequence.times = StageTimes(
                reserve_wait=now - sequence.arrived, decode_cached_blocks=sequence.cached_blocks
            )
            self._imports.open(sequence)

    def _drop(self, wanted: RequestKey) -> None:
        key = self._forks.first_of(wanted)
        if not self._forks.drop(wanted):
            # Others wait for the same blocks.
            waiting = self._scheduler.find(key)
            assert waiting is not None, "the book is closed when the sequence commits or ends"
            waiting.lanes = len(self._forks.wanted(key))
            return
        self._forks.close(key)
        self._scheduler.drop(key)
        self._imports.cancel(key)
        self._wake.set()

    def _router_lost(self, router: Peer) -> None:
        for first in self._scheduler.asked_by(router):
            for key in self._forks.wanted(first):
                self._drop(key)

    def _commit(self, commit: Commit, handoff: float) -> None:
        now, handover = time.monotonic(), commit.handover
        sequence = self._scheduler.commit(commit.key, handover.next_token, now)
        assert sequence.times is not None, "set when the reservation was made"
        times = msgspec.structs.replace(
            sequence.times, ship=commit.seconds, handoff=handoff, transport=commit.transport
        )
        # What crossed is counted once, with the first.
        sequence.times = msgspec.structs.replace(times, kv_blocks=handover.blocks, kv_bytes=handover.nbytes)
        if sequence.request.forks:
            self._fork(sequence, handover.fork_tokens, times)
        self._wake.set()

    def _fork(self, first: Sequence, tokens: tuple[int, ...], times: StageTimes) -> None:
        request, wanted = first.request, self._forks.close(first.key)
        for index, (fork, token) in enumerate(zip(request.forks, tokens, strict=True)):
            if fork.key in wanted and request.sampling.finish_reason(token, request.emitted + 1) is None:
                self._scheduler.fork(first, index, token).times = times
        if first.key not in wanted or request.sampling.finish_reason(first.token_ids[-1], first.produced) is not None:
            self._scheduler.drop(first.key)

    def _import_failed(self, key: RequestKey, error: ErrorInfo) -> None:
        sequence = self._scheduler.drop(key)
        if sequence is not None:
            self._fail(sequence.router, key, error)
        self._wake.set()

    def _fail(self, router: Peer, first: RequestKey, error: ErrorInfo) -> None:
        for key in self._forks.close(first):
            self._counters.failures += 1
            self._link.send(router, Failed(key=key, error=error))

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._imports.tick()
            self._peers.tick(self._scheduler.prefill_endpoints())
            now = time.monotonic()
            for sequence in self._scheduler.give_up(now - PATIENCE):
                self._preempt(sequence)
                self._wake.set()  # what it had kept from others, at the head of the queue, they may have now
            self._watch.look(busy=not self._scheduler.idle, now=now)
            self._step_watch.look(busy=bool(self._scheduler.running), now=now)
            self._swaps.look(busy=not self._scheduler.idle, now=now)
            self._leaver.tick()

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            self._wake.clear()
            step = self._scheduler.next_step()
            if step.preempted or step.swapped_out or not step.sequences:
                self._outbox.send()
            for sequence in step.preempted:
                self._preempt(sequence)
            for sequence in step.swapped_out:
                self._swaps.save(sequence)
            self._admit()
            if not step.sequences:
                self._stepper.rest()
                await self._wake.wait()
                continue
            try:
                with self._step_watch.step():
                    draws = await self._stepper.execute(chunks_of(step.sequences), begun=self._outbox.send)
            except KVFerryError as error:
                logger.exception("a decode step failed")
                for sequence in self._scheduler.fail_step():
                    self._fail(sequence.router, sequence.key, ErrorInfo.of(error))
                continue
            self._outbox.put(self._scheduler.complete_step(draws))
            for computed in self._scheduler.take_computed():
                self._local_prefill.advance(computed, time.monotonic())

    def _copied(self, sequence: Sequence, error: KVFerryError | None) -> None:
        if error is None:
            self._scheduler.copied(sequence, time.monotonic())
        elif self._scheduler.copy_failed(sequence):
            self._preempt(sequence)
        self._wake.set()

    def _preempt(self, sequence: Sequence, error: WorkerError = POOL_IS_FULL) -> None:
        self._counters.preemptions += 1
        self._imports.cancel(sequence.key)
        for key in self._forks.close(sequence.key):
            self._link.send(sequence.router, Failed(key=key, error=ErrorInfo.of(error)))

    def _idle(self) -> bool:
        scheduler = self._scheduler
        return scheduler.idle and not (scheduler.waiting or self._imports.book.open_count or self.pool.counts().used)

    def _hand_back(self) -> None:
        self._outbox.send()
        for key in sorted(self._scheduler.keys()):
            sequence = self._scheduler.drop(key)
            if sequence is not None:
                self._preempt(sequence, WorkerDraining(f"{self.me.name} leaves, and its time is up"))
        self._wake.set()
