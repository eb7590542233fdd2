"""All lanes as arrays, a column for each number, by row: for who looks at many workers at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from router.lane import Lane

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.int64]

FIRST_ROWS = 32
NAMES = tuple(field.name for field in fields(Lane) if field.name != "account")
_NUMBERS = attrgetter(*NAMES)


class Columns:
    """See :class:`~router.lane.Lane` for each of them.

    Args:
        rows: that there is room for.

    Attributes:
        zeros, ones: what is the same for all; nobody writes them.
    """

    ahead: Floats
    sequences: Floats
    backlog: Floats
    since: Floats
    head: Floats
    fixed: Floats
    per_token: Floats
    pace: Floats
    step: Floats
    step_tokens: Floats
    beside: Floats
    room: Floats
    block_size: Floats
    joined: Floats
    waiting: Floats
    slots: Floats
    empty: Floats
    claimed: Floats
    paced: Floats
    correction: Floats

    def __init__(self, rows: int = FIRST_ROWS) -> None:
        self._table = np.ones((len(NAMES), rows))
        self.zeros, self.ones = np.zeros(rows), np.ones(rows)
        for name, column in zip(NAMES, self._table, strict=True):
            setattr(self, name, column)

    def __len__(self) -> int:
        return self._table.shape[1]

    def write(self, lanes: Sequence[Lane], rows: Iterable[int]) -> None:
        """Take over what some lanes have now."""
        chosen = list(rows)
        self._table[:, chosen] = np.array([_NUMBERS(lanes[row]) for row in chosen]).T
