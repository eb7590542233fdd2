"""Recounts a pool when its worker has been idle for a while: once in each idle spell, since a large pool takes time.

Life cycle: made with the pool, :meth:`PoolWatch.look` at every tick of the worker.
"""

from __future__ import annotations

import math

from engine.block_pool import BlockPool

IDLE_BEFORE_CHECK = 1.0
"""Seconds without work before the pool is recounted."""


class PoolWatch:
    """Decides when to check a pool's integrity; pure, but for the check itself."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._check_at = math.inf

    def look(self, *, busy: bool, now: float) -> bool:
        """Check the pool if it is time to; returns whether it was.

        Raises:
            InvariantViolation: the pool does not add up; names the block and its holders.
        """
        if busy:
            self._check_at = now + IDLE_BEFORE_CHECK
        elif now >= self._check_at:
            self._check_at = math.inf
            self._pool.check_integrity()
            return True
        return False
