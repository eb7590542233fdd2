"""Batch sizes that steps of decodes are captured for: a step is padded to the next of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MOST = 512
"""Largest batch that is captured: a GPU computes longer than this one's launches take."""
_STEPS = ((64, 8), (256, 16), (MOST, 32))
"""Up to the first number the sizes rise by the second: padding wastes less than a quarter, above 8 rows."""


def default_batches(most: int, limit: int = MOST, every: int = 0) -> tuple[int, ...]:
    """Powers of two up to 8, then growing steps, up to ``most`` sequences, itself included, and ``limit``.

    Args:
        most: sequences of a step.
        limit: largest batch that is worth it.
        every: up to here no size is left out.
    """
    limit = min(most, limit)
    found = [1, 2, 4, *range(1, every + 1)]
    size = 8
    for border, step in _STEPS:
        while size <= border:
            found.append(size)
            size += step
    return tuple(sorted({size for size in found if size < limit} | {limit}))


def batch_for(batches: Sequence[int], rows: int) -> int | None:
    """The least of ascending ``batches`` that holds ``rows``; None where none does."""
    index = bisect_left(batches, rows)
    return batches[index] if index < len(batches) else None
