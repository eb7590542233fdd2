"""Strided copies between two pools, and the contiguous runs that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Runs = npt.NDArray[np.int64]
"""``[n, 3]``: source, target and length of each run, in elements."""

_SOURCE, _TARGET, _LENGTH = range(3)


@dataclass(frozen=True, slots=True)
class Move:
    """Copies the element at ``source + sum(index * source_strides)`` to ``target + sum(index * target_strides)``.

    Attributes:
        source, target: of the first element, in elements.
        shape: the indices run over it.
        source_strides, target_strides: in elements, one per dimension.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


def joined(moves: Sequence[Move]) -> tuple[Move, ...]:
    """The same copies in fewer moves: those that follow one another at equal distances upwards become a dimension."""
    found: list[Move] = []
    first = 0
    while first < len(moves):
        count, steps = _progression(moves, first)
        head = moves[first]
        if count > 1:
            head = Move(
                head.source,
                head.target,
                (count, *head.shape),
                (steps[0], *head.source_strides),
                (steps[1], *head.target_strides),
            )
        found.append(head)
        first += count
    return tuple(found)


def _progression(moves: Sequence[Move], first: int) -> tuple[int, tuple[int, int]]:
    """How many moves from ``first`` on differ in their offsets alone and by equal steps; and the steps."""
    head = moves[first]
    form = (head.shape, head.source_strides, head.target_strides)
    steps = (0, 0)
    last = first
    while last + 1 < len(moves):
        here, there = moves[last], moves[last + 1]
        step = (there.source - here.source, there.target - here.target)
        alike = (there.shape, there.source_strides, there.target_strides) == form and min(step) >= 0
        if not alike or (last > first and step != steps):
            break
        steps = step
        last += 1
    return last - first + 1, steps


def runs_of(moves: Sequence[Move]) -> Runs:
    """The fewest runs that copy what ``moves`` copy, in the order of their targets."""
    parts = [_runs(move) for move in moves]
    if not parts:
        return np.empty((0, 3), np.int64)
    runs = np.concatenate(parts)
    runs = runs[np.argsort(runs[:, _TARGET], kind="stable")]
    ends = runs[:-1, :_LENGTH] + runs[:-1, _LENGTH:]
    begins = np.flatnonzero(np.concatenate(([True], (ends != runs[1:, :_LENGTH]).any(axis=1))))
    lengths = np.add.reduceat(runs[:, _LENGTH], begins)
    return np.concatenate((runs[begins, :_LENGTH], lengths[:, None]), axis=1)


def _runs(move: Move) -> Runs:
    source, target = np.array([move.source]), np.array([move.target])
    length, growing = 1, True
    for size, source_stride, target_stride in zip(
        reversed(move.shape), reversed(move.source_strides), reversed(move.target_strides), strict=True
    ):
        if size == 1:
            continue
        if growing and source_stride == target_stride == length:
            length *= size
            continue
        growing = False
        index = np.arange(size)[:, None]
        source, target = (source + index * source_stride).ravel(), (target + index * target_stride).ravel()
    return np.stack((source, target, np.full(source.shape, length)), axis=1).astype(np.int64)
