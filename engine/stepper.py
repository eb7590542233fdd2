"""One thread that runs forward steps, awaited from the event loop.

Life cycle: :meth:`Stepper.load`, :meth:`Stepper.execute` one call at a time, and either :meth:`Stepper.close` once, or
another one is loaded that takes over its thread and its weights. Block tables, pools and queues stay with the event
loop's thread; only tensors are touched here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.batch import Chunk, Draw
from engine.checkpoint import Progress
from engine.config import EngineConfig
from engine.layer_watch import LayerWatch
from engine.runner import ModelRunner
from engine.step_pace import StepPace
from protocol.histogram import SECONDS, Observations

T = TypeVar("T")


class Stepper:
    """Runs a :class:`ModelRunner` in its own thread and keeps the time.

    Attributes:
        steps: forward steps finished.
        step_seconds: time spent in them.
        pace: what they take lately; of an engine that decodes, those that compute no prompt: a token of a prompt adds
            to a step little of what a further sequence does.
        gaps: from the end of a step to the begin of the next, in the engine's thread, where :meth:`rest` was not called
            in between. The model stands still meanwhile.
    """

    def __init__(self, runner: ModelRunner, executor: ThreadPoolExecutor, *, decodes: bool = True) -> None:
        self.runner = runner
        self._decodes = decodes
        self.steps = 0
        self.step_seconds = 0.0
        self.pace = StepPace()
        self._executor = executor
        self.gaps = Observations(SECONDS)
        self._left: float | None = None

    @classmethod
    async def load(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        decodes: bool = True,
        former: Stepper | None = None,
    ) -> Stepper:
        """Load and warm up a model, in the thread that will run its steps.

        Args:
            config: of the engine.
            progress: called with a stage's name and the fraction done; from that thread, or from here while it rests.
            decodes: whether there will be steps of decodes alone; see :meth:`ModelRunner.warm_up`.
            former: whose thread is taken over, and of whose model what serves ``config``; void from then on.

        Raises:
            ModelError, ConfigError, EngineFailure: as :meth:`ModelRunner.load`.
        """
        loop = asyncio.get_running_loop()
        executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") if former is None else former._executor
        )
        try:
            runner = None
            if former is not None:
                runner = await loop.run_in_executor(executor, former.runner.adapted, config, progress)
            if runner is None:
                runner = await loop.run_in_executor(executor, ModelRunner.load, config, progress)
            if progress is not None:
                progress("warm-up", 0.0)
            await loop.run_in_executor(executor, partial(runner.warm_up, decodes=decodes))
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(runner, executor, decodes=decodes)

    async def execute(
        self,
        chunks: Sequence[Chunk],
        watch: LayerWatch | None = None,
        begun: Callable[[], object] | None = None,
    ) -> list[Draw | None]:
        """One forward step of the whole batch; see :meth:`ModelRunner.execute`.

        Args:
            chunks: the work.
            watch: called on the event loop, each time before this returns or raises.
            begun: called on the event loop once, before this returns or raises, when the engine's thread has begun:
                what the loop does any earlier keeps the interpreter from it.

        Raises:
            EngineFailure: the step raised.
        """
        entered = time.monotonic()
        loop = asyncio.get_running_loop()
        if watch is not None:
            watch = LayerWatch(watch.every, partial(_tell_on, loop, watch.tell))
        try:
            tell = None if begun is None else partial(loop.call_soon_threadsafe, begun)
            draws = await loop.run_in_executor(self._executor, self._step, chunks, watch, tell)
            tokens = sum(len(chunk.token_ids) for chunk in chunks)
            if not self._decodes or tokens == len(chunks):
                self.pace.add(tokens, time.monotonic() - entered)
            return draws
        finally:
            self.steps += 1
            self.step_seconds += time.monotonic() - entered

    async def call(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, in the engine's thread, between its steps.

        All that computes with several threads belongs there. libgomp keeps a team for each thread that does, and once a
        process has more members than cores they sleep after a moment instead of waiting: each of a step's hundreds of
        parallel regions then takes as long as waking them, some 70 us.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def rest(self) -> None:
        """There is nothing to compute: what passes from now on is no gap. Not while a step runs."""
        self._left = None

    def _step(
        self, chunks: Sequence[Chunk], watch: LayerWatch | None, begun: Callable[[], object] | None
    ) -> list[Draw | None]:
        if self._left is not None:
            self.gaps.add(time.monotonic() - self._left)
        if begun is not None:
            begun()
        try:
            return self.runner.execute(chunks, watch)
        finally:
            self._left = time.monotonic()

    def finish(self) -> None:
        """Wait for the step under way."""
        self._executor.submit(int).result()

    def close(self) -> None:
        """Wait for the step under way and end the thread."""
        self._executor.shutdown(wait=True)


def _tell_on(loop: asyncio.AbstractEventLoop, tell: Callable[[int], object], done: int) -> None:
    loop.call_soon_threadsafe(tell, done)
