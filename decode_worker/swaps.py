"""Carries out what the scheduler asks for between pool and host memory, in a thread of its own.

Life cycle: made idle, :meth:`Swaps.save` and :meth:`Swaps.restore` at will, each of which comes back as an event on the
loop; :meth:`Swaps.close` once, which waits for the copies under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from decode_worker.preemption import Preemption, Rates, prefers_swap
from decode_worker.sequence import Sequence
from decode_worker.swap_book import SwapBook
from engine.copy_queue import CopyQueue
from engine.kv_cache import KVCache
from engine.pool_watch import PoolWatch
from engine.swap_space import SwapSpace
from protocol.errors import EngineFailure, KVFerryError

PATIENCE = 20.0
"""Seconds that a sequence stays swapped out: well before its router would take the silence for a fault."""

logger = logging.getLogger(__name__)


class Swaps:
    """See the module.

    Args:
        cache: the pool.
        queue: orders copies after its steps.
        mode: when sequences are swapped out.
        nbytes: of host memory at most.
        done: called on the event loop when a sequence's copy has ended, with the error that ended it, if one did.

    Attributes:
        book: whose the host memory is.
        saved: sequences that have been copied out.
        nbytes, seconds: of all copies that went well.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(
        self,
        cache: KVCache,
        queue: CopyQueue,
        mode: Preemption,
        nbytes: int,
        done: Callable[[Sequence, KVFerryError | None], None],
    ) -> None:
        self._space = SwapSpace(cache, queue, 0 if mode == "recompute" else nbytes)
        self.book = SwapBook(self._space.num_slots)
        self._watch = PoolWatch(self.book.slots)
        self._mode = mode
        self.saved = 0
        self.nbytes = 0
        self.seconds = 0.0
        self._done = done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")
        self._tasks: set[asyncio.Task[None]] = set()

    def prefers(self, sequence: Sequence, ship_rate: float) -> bool:
        """Whether a sequence is better swapped out than prefilled anew; ``ship_rate`` is in bytes per second."""
        copy_rate = self.nbytes / self.seconds if self.seconds else 0.0
        rates = Rates(copy=copy_rate, prefill=sequence.prefill_rate, ship=ship_rate)
        nbytes = (len(sequence.block_table) - sequence.passed) * self._space.block_bytes
        return prefers_swap(self._mode, sequence.computed, nbytes, rates)

    def look(self, *, busy: bool, now: float) -> None:
        """Recount the host memory when it is time to; see :meth:`PoolWatch.look`."""
        self._watch.look(busy=busy, now=now)

    def save(self, sequence: Sequence) -> None:
        """Copy a sequence's blocks to its slots."""
        blocks = tuple(sequence.block_table[sequence.passed : sequence.passed + len(sequence.slots)])
        self._spawn(sequence, self._space.save, blocks, tuple(sequence.slots))
        self.saved += 1

    def restore(self, sequence: Sequence) -> None:
        """Copy a sequence's slots to its blocks, but those that the prefix cache still had."""
        first, slots = sequence.cached_blocks, sequence.slots[sequence.cached_blocks - sequence.passed :]
        self._spawn(sequence, self._space.restore, tuple(slots), tuple(sequence.block_table[first:]))

    async def close(self) -> None:
        """Wait for the copies under way, and end the thread."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._space.close()

    def _spawn(
        self,
        sequence: Sequence,
        copy: Callable[[tuple[int, ...], tuple[int, ...]], None],
        sources: tuple[int, ...],
        targets: tuple[int, ...],
    ) -> None:
        task = asyncio.create_task(self._copy(sequence, copy, sources, targets))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy(
        self,
        sequence: Sequence,
        copy: Callable[[tuple[int, ...], tuple[int, ...]], None],
        sources: tuple[int, ...],
        targets: tuple[int, ...],
    ) -> None:
        def timed() -> float:
            begun = time.monotonic()
            copy(sources, targets)
            return time.monotonic() - begun

        try:
            self.seconds += await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        except Exception as error:
            # Whatever went wrong, the scheduler must hear of it: without a word the blocks would never come free.
            logger.exception("a copy between the pool and host memory failed")
            cause = error if isinstance(error, KVFerryError) else EngineFailure(f"a copy of KV blocks failed: {error}")
            self._done(sequence, cause)
            return
        self.nbytes += len(sources) * self._space.block_bytes
        self._done(sequence, None)
