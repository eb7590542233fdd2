"""The prefill worker: an event loop around the scheduler, the leases and one engine thread.

Life cycle: made (cheap: no model, no socket) -> :meth:`PrefillWorker.start` loads the model, binds, announces itself
-> serves until :meth:`PrefillWorker.stop`. A fatal error of a loop of ours ends :meth:`PrefillWorker.wait` with it, and
:meth:`PrefillWorker.drain` lets it end once all is finished, as :mod:`protocol.departure` has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import zmq.asyncio

from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.device_pool import DevicePool
from engine.engine import Engine
from engine.first_tokens import FirstTokens
from engine.layer_watch import LayerWatch
from engine.pool_watch import PoolWatch
from engine.prompt import Progress, Work
from engine.step_watch import StepWatch
from kv_transfer.transport import TransportConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.exports import Exports
from prefill_worker.profile import profile_of
from prefill_worker.refusal import refusal
from prefill_worker.ring import Ring
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.trace import watch
from protocol.curve import CurveKeys
from protocol.departure import Leaver
from protocol.errors import KVFerryError, Overloaded, Preempted, ProtocolError, WorkerDraining
from protocol.forks import ForkBook
from protocol.ids import Peer, RequestKey
from protocol.loops import Loops
from protocol.messages import Cancel, ErrorInfo, Failed, Heartbeat, Message, Prefill, WorkerLoad, WorkerProfile
from protocol.prompt_logprobs import PromptLogprobs
from protocol.sockets import Hub
from protocol.transfer_counts import TransferCounts
from protocol.worker_link import WorkerLink

TICK = 0.1
"""Seconds between two looks at what has expired."""

logger = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill process, on ``engine``, or on one that ends with it.

    Attributes:
        me: name and incarnation.
        profile: what it is, once started.
        ready: whether it serves.
    """

    def __init__(self, config: PrefillConfig, engine: Engine | None = None) -> None:
        self.config = config
        self.me = Peer(config.name, config.incarnation or time.time_ns())
        self.ready = False
        self.profile: WorkerProfile | None = None
        self._engine = engine or Engine()
        self._loops = Loops()
        self._wake = asyncio.Event()
        self._routers: dict[RequestKey, Peer] = {}
        self._forks = ForkBook()
        self._prefill_tokens = self._cached_tokens = self._failures = self._preemptions = 0
        self._ring = Ring()

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
        self._stepper = await self._engine.load(self.config.engine, progress, decodes=False)
        resources.callback(self._engine.leave)
        if progress is not None:
            progress("sockets", 0.0)
        runner, settings = self._stepper.runner, self._stepper.runner.config
        self._trace = await resources.enter_async_context(watch(self.config.tracing, self.me, lambda: self._routers))
        self._max_model_len = runner.max_model_len
        self._vocab_size = runner.vocab_size
        self.pool = BlockPool(runner.num_blocks, settings.block_size, prefix_cache=settings.prefix_cache)
        self._watch, self._step_watch = PoolWatch(self.pool), StepWatch(self.config.wedged_after)
        self._scheduler = PrefillScheduler(
            self.pool,
            block_size=settings.block_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
        )
        context = zmq.asyncio.Context()
        resources.callback(context.term)
        keys = CurveKeys.drawn_from(self.config.secret)
        self._hub = Hub(context, self.me, f"tcp://{self.config.bind_host}:0", keys=keys)
        resources.callback(self._hub.close)
        self._exports = Exports(
            self.pool,
            runner.layout,
            runner.cache.memory() if runner.cache.in_host_memory else DevicePool(runner.cache, runner.copies),
            descriptor=runner.cache.descriptor if runner.cache.in_host_memory else None,
            mode=self.config.transport,
            send=self._send_to_reader,
            failed=self._lease_failed,
            closed=self._lease_closed,
            transport=TransportConfig(
                streams=self.config.streams,
                timeout=self.config.transfer_timeout,
                checksum=self.config.transfer_checksum,
                secret=self.config.secret,
                gpudirect=self.config.gpudirect,
                name=str(self.me),
            ),
            staging_bytes=self.config.staging_bytes,
            watch=self._trace,
        )
        resources.push_async_callback(self._exports.close)
        self.profile = profile_of(self.config, runner, self._hub.endpoint)
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
        self._first_tokens = FirstTokens(self._forks, self._link.send)
        self._link.start()
        self._loops.watch(*self._link.tasks, self._leaver.left)
        resources.push_async_callback(self._loops.stop)
        self._loops.start("steps", self._steps())
        self._loops.start("readers", self._readers())
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
        exports, pool = self._exports, self.pool.counts()
        return WorkerLoad(
            pool=pool,
            waiting=self._scheduler.waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            running=self._scheduler.running,
            open_leases=exports.book.open_count,
            steps=self._stepper.steps,
            step_seconds=self._stepper.step_seconds,
            step_age=self._step_watch.age,
            step_fixed=self._stepper.pace.fixed,
            step_per_token=self._stepper.pace.per_token,
            step_mean_tokens=self._stepper.pace.mean_tokens,
            step_gaps=self._stepper.gaps.histogram(),
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            kv_blocks=exports.kv_blocks,
            kv_bytes=exports.kv_bytes,
            kv_seconds=exports.kv_seconds,
            preemptions=self._preemptions,
            failures=self._failures,
            transport_fallbacks=exports.chooser.fallbacks,
            draining=self._leaver.leaving,
            used_slots=pool.used * self.pool.block_size,
            empty_slots=sum((self._scheduler.empty_slots | exports.book.ends()).values()),
        )

    def transfer(self) -> TransferCounts:
        """What it has counted of its handoffs."""
        return self._exports.tally.counts()

    def _heartbeat(self) -> Heartbeat:
        assert self.profile is not None
        return Heartbeat(self.profile, self.load(), self.transfer())

    # --- messages -------------------------------------------------------------------------------------------------

    def _from_router(self, router: Peer, message: Message) -> None:
        match message:
            case Prefill():
                self._accept(router, message)
            case Cancel():
                self._cancel(message.key)
            case _:
                logger.warning("router %s sent a %s to a prefill worker", router, type(message).__name__)

    def _accept(self, router: Peer, request: Prefill) -> None:
        key = request.key
        now = time.monotonic()
        if key in self._routers or self._scheduler.find(key):
            return  # it came twice
        if self._exports.book.has_ended(key, now):
            # Its cancel was faster; whom it was to carry comes again.
            for fork in request.forks:
                self._fail(router, fork.key, ErrorInfo.of(Preempted("the request that carried it was cancelled")))
            return
        newcomers = self._forks.newcomers(key, request.forks, self._routers)
        if len(newcomers) <= len(request.forks):
            for new in newcomers:
                self._fail(router, new, ErrorInfo.of(ProtocolError(f"{key} names a key that is in use")))
            return
        error = refusal(request, self._max_model_len, self._vocab_size)
        error = error or self._stepper.runner.grammars.refusal(request.sampling) or self._leaver.refusal()
        if error is None and self._scheduler.waiting >= self.config.max_waiting:
            error = Overloaded(f"{self._scheduler.waiting} prompts are waiting, {self.config.max_waiting} are allowed")
        self._forks.open(key, request.forks)
        if error is not None:
            self._fail(router, key, ErrorInfo.of(error))
            return
        self._routers[key] = router
        self._scheduler.add(request, router, now)
        if request.handoff is not None:
            self._exports.open(request, request.handoff)
        self._wake.set()

    def _cancel(self, wanted: RequestKey) -> None:
        key = self._forks.first_of(wanted)
        if not self._forks.drop(wanted):
            return  # others go on from the same prompt
        self._forks.close(key)
        self._scheduler.cancel(key)
        self._exports.cancel(key)
        self._routers.pop(key, None)
        self._wake.set()

    def _router_lost(self, router: Peer) -> None:
        for first in [key for key, asked in self._routers.items() if asked == router]:
            for key in self._forks.wanted(first):
                self._cancel(key)

    def _send_to_reader(self, peer: Peer, message: Message) -> bool:
        return self._hub.send(str(peer).encode(), message)

    def _lease_failed(self, key: RequestKey, error: ErrorInfo) -> None:
        router = self._routers.pop(key, None)
        self._scheduler.cancel(key)
        if router is not None:
            self._fail(router, key, error)

    def _lease_closed(self, key: RequestKey) -> None:
        self._routers.pop(key, None)
        self._forks.close(key)
        self._wake.set()

    def _fail(self, router: Peer, first: RequestKey, error: ErrorInfo) -> None:
        for key in self._forks.close(first):
            self._failures += 1
            self._link.send(router, Failed(key=key, error=error))

    async def _readers(self) -> None:
        while True:
            # A frame that is there already is handed over without a pause, so a flood would starve every other task.
            await asyncio.sleep(0)
            try:
                _, envelope = await self._hub.receive()
            except ProtocolError as error:
                logger.warning("refused a frame from a decode worker: %s", error)
                continue
            self._exports.receive(envelope.sender, envelope.body)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._exports.tick()
            self._unblock(time.monotonic())
            now, running = time.monotonic(), self._scheduler.running
            self._watch.look(busy=bool(running or self._scheduler.waiting), now=now)
            self._step_watch.look(busy=bool(running), now=now)
            self._leaver.tick()

    def _unblock(self, now: float) -> None:
        head = self._scheduler.blocked
        ready = head is not None and self._exports.book.is_granted(head.key)
        if self._ring.holds(now, ready=ready) and self._exports.give_back():
            self._preemptions += 1
            self._ring.broken(now)

    def _idle(self) -> bool:
        scheduler = self._scheduler
        return not (scheduler.waiting or scheduler.running or self._exports.book.open_count or self.pool.counts().used)

    def _hand_back(self) -> None:
        error = WorkerDraining(f"{self.me.name} leaves, and its time is up")
        for key in list(self._routers):
            if self._exports.book.is_open(key):
                self._exports.fail(key, error)
            else:
                self._lease_failed(key, ErrorInfo.of(error))
        self._wake.set()

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            for progress in self._scheduler.admit(time.monotonic()):
                self._cached_tokens += progress.prompt.cached_tokens
                self._advance(progress)
            step = self._scheduler.next_step()
            if not step:
                self._stepper.rest()
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                early = self._shipped_by_layers(step)
                with self._step_watch.step():
                    draws = await self._execute(step, early)
            except KVFerryError as error:
                logger.exception("a prefill step failed")
                for prompt in self._scheduler.fail_step():
                    if prompt.request.handoff is not None:
                        self._exports.fail(prompt.key, error)
                    else:
                        self._lease_failed(prompt.key, ErrorInfo.of(error))
                continue
            self._prefill_tokens += sum(work.stop - work.start for work in step)
            for progress in self._scheduler.complete_step(draws):
                self._trace.computed(progress.prompt.key, progress.prompt.computed)
                self._advance(progress, told=progress.prompt.key in early)

    def _shipped_by_layers(self, step: Sequence[Work]) -> dict[RequestKey, tuple[int, ...]]:
        """Blocks that ship while the step computes them: those of last chunks, for nothing computes after these."""
        if not self.config.layers_per_ship or not self._stepper.runner.cache.in_host_memory:
            return {}
        last = (work for work in step if work.last and work.prompt.request.handoff is not None)
        return {work.prompt.key: work.completes(self.pool.block_size) for work in last}

    async def _execute(
        self, step: Sequence[Work], early: Mapping[RequestKey, tuple[int, ...]]
    ) -> Sequence[Draw | None]:
        chunks = [work.chunk for work in step]
        if not early:
            return await self._stepper.execute(chunks)

        def tell(done: int) -> None:
            for key, blocks in early.items():
                self._exports.layers_computed(key, blocks, done)

        return await self._stepper.execute(chunks, LayerWatch(self.config.layers_per_ship, tell))

    def _advance(self, progress: Progress, *, told: bool = False) -> None:
        prompt = progress.prompt
        leased = prompt.request.handoff is not None
        if leased and progress.blocks and not told:
            self._exports.computed(prompt.key, progress.blocks)
        for start, table in prompt.take_tables():
            self._link.send(prompt.router, PromptLogprobs(key=prompt.key, start=start, table=table))
        if progress.draw is None:
            return
        key, draw = prompt.key, progress.draw
        goes_on = self._first_tokens.tell(prompt, draw, time.monotonic())
        if not goes_on:
            self._routers.pop(key, None)
            self._forks.close(key)
        if leased and goes_on:
            self._exports.finished(key, draw.token_id, tuple(fork.token_id for fork in draw.forks))
        elif leased:
            self._exports.cancel(key)
        self._scheduler.release(prompt)
