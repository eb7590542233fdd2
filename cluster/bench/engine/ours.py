"""Our engine as the workers drive it: their schedulers on the event loop, their stepper's thread, no sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Self

from cluster.bench.engine.case import EngineCase
from cluster.bench.engine.figures import OURS
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import chunks_of
from engine.block_pool import BlockPool
from engine.stepper import Stepper
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import PoolExhausted
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill, PrefillAddress, Reserve
from protocol.sampling import SamplingParams

TOKEN = 5
"""All prompts are made of it."""
_ROUTER = Peer("router-0", 1)
_PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")


class Ours:
    """See the module.

    Args:
        stepper: loaded, and warm.
        now: a clock, in seconds.
    """

    name = OURS

    def __init__(self, stepper: Stepper, now: Callable[[], float] = time.perf_counter) -> None:
        self._stepper = stepper
        self._now = now
        self._ids = itertools.count()

    @classmethod
    async def made(cls, stepper: Stepper, now: Callable[[], float] = time.perf_counter) -> Self:
        """Ours, with something in every block: what K and V hold does not matter, but that they are there does."""
        cache = stepper.runner.cache.tensor

        def fill() -> None:
            cache[0].copy_(cache[0].float().normal_())
            cache[1:] = cache[0]

        await stepper.call(fill)
        return cls(stepper, now)

    async def call(self, work: Callable[[], float]) -> float:
        """What ``work`` gives, in the engine's thread; see :meth:`Stepper.call`."""
        return await self._stepper.call(work)

    async def turn(self, case: EngineCase, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of a decode, or of the one prefill; raises as these."""
        if case.kind == "decode":
            return await self.decode(case.batch, case.context, steps)
        return await self.prefill(case.batch, case.context)

    async def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of ``batch`` sequences; the first sees ``context`` tokens of each.

        One step before them does not count. Prompts are committed as if they had just been handed over.

        Raises:
            PoolExhausted: they do not fit.
            EngineFailure: a step failed.
        """
        runner = self._stepper.runner
        scheduler = DecodeScheduler(
            self._pool(),
            block_size=runner.layout.block_size,
            max_sequences=runner.config.max_sequences,
            window=runner.model_config.reach,
        )
        for _ in range(batch):
            key = self._key()
            prompt = (TOKEN,) * (context - 2)
            sampling = SamplingParams(temperature=0.0, max_tokens=steps + 2)
            request = Reserve(key=key, token_ids=prompt, sampling=sampling, prefill=_PREFILL, cache_salt=key.request_id)
            scheduler.add(request, _ROUTER, 0.0)
        for sequence in scheduler.admit():
            scheduler.commit(sequence.key, TOKEN, 0.0)
        seconds = []
        for _ in range(1 + steps):
            began = self._now()
            stepping = scheduler.next_step().sequences
            if len(stepping) != batch:
                raise PoolExhausted(f"{batch} sequences of {context} tokens do not fit, {len(stepping)} do")
            scheduler.complete_step(await self._stepper.execute(chunks_of(stepping)))
            seconds.append(self._now() - began)
        return seconds[1:]

    async def prefill(self, batch: int, context: int) -> list[float]:
        """Seconds from ``batch`` prompts of ``context`` tokens to the first token of each, as one number.

        Raises:
            PoolExhausted: they do not fit.
            EngineFailure: a step failed.
        """
        settings = self._stepper.runner.config
        scheduler = PrefillScheduler(
            self._pool(),
            block_size=settings.block_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
        )
        sampling = SamplingParams(temperature=0.0)
        began = self._now()
        for _ in range(batch):
            key = self._key()
            request = Prefill(
                key=key, token_ids=(TOKEN,) * context, sampling=sampling, handoff=None, cache_salt=key.request_id
            )
            scheduler.add(request, _ROUTER, 0.0)
        left = batch
        while left:
            scheduler.admit(0.0)
            work = scheduler.next_step()
            if not work:
                raise PoolExhausted(f"{batch} prompts of {context} tokens do not fit, {left} of them are left")
            gained = scheduler.complete_step(await self._stepper.execute([piece.chunk for piece in work]))
            left -= sum(progress.draw is not None for progress in gained)
        return [self._now() - began]

    def _pool(self) -> BlockPool:
        runner = self._stepper.runner
        return BlockPool(runner.num_blocks, runner.layout.block_size, prefix_cache=runner.config.prefix_cache)

    def _key(self) -> RequestKey:
        return RequestKey(f"bench-{next(self._ids)}", 0)
