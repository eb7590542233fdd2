"""Block ids as runs of neighbours, which one copy can serve."""

from __future__ import annotations

from collections.abc import Iterable


def block_runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """``(first, count)`` of each run of adjacent ids, upwards."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and block == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
