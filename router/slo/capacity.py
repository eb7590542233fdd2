"""What there is room for now, and how soon there will be more: pure arithmetic over the fleet's columns.

Of a decode worker these are counted: the sequences that it steps side by side, fewer where a target for the time per
token allows fewer, and the tokens that its pool has room for. What it has promised is off: prompts that wait there or
were just sent, and what its running sequences are still to say. One that has nothing takes whatever comes, so that a
wrong measurement can be put right.

Paces are those that workers measure in their steps, without the corrections that placement makes of whole requests'
times: those hold waits too, and a request that waits says nothing of what there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.ids import Peer
from router.columns import Bools, Floats, Rows
from router.fleet import Fleet

TPOT_HEADROOM = 0.9
"""Share of a target for the time per token that a step may take: contexts grow, and tokens wait for more than steps."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked of the workers.

    Attributes:
        backlog: seconds of prompts that a prefill worker is sent ahead.
        tpot: seconds that a token may take on decode workers; 0 for no bound.
        output: tokens of an answer, in the mean.
        residual: that one which is under way will still have.
        per_sequence: tokens of a prompt and its answer, in the mean.
    """

    backlog: float
    tpot: float
    output: float
    residual: float
    per_sequence: float


class Capacity:
    """Of the whole fleet at one moment.

    Args:
        fleet: the workers.
        prompts: rows of those that compute prompts.
        terms: what is asked of them.

    Attributes:
        prompts_open: whether a worker computes prompts and has less than the backlog ahead.
        prompt_rate: tokens a second that all of them compute.
        leaving: answers a second that end.
    """

    def __init__(self, fleet: Fleet, prompts: Rows, terms: Terms) -> None:
        columns = fleet.columns
        pace = columns.pace[prompts]
        ahead = columns.ahead[prompts] * pace
        self.prompts_open = bool((ahead <= terms.backlog).any())
        self.prompt_rate = float((1.0 / pace).sum())
        rows = fleet.able("decode")
        self._fleet = fleet
        self._rows = rows
        self._per_sequence = terms.per_sequence
        held = columns.sequences[rows]
        fixed, per_token = columns.fixed[rows], columns.per_token[rows]
        most = columns.slots[rows]
        if terms.tpot:
            allowed = (TPOT_HEADROOM * terms.tpot - fixed) / np.maximum(per_token, 1e-12)
            # What was never measured forbids nothing.
            most = np.where(columns.paced[rows] > 0, np.minimum(most, allowed), most)
        self._idle: Bools = held < 1.0
        self._free: Floats = np.maximum(np.floor(most - held), 0.0)
        growth = np.maximum(held * terms.residual - columns.empty[rows], 0.0)
        self._room: Floats = np.maximum(
            columns.room[rows] - columns.waiting[rows] - columns.claimed[rows] - growth, 0.0
        )
        self.leaving = float((held / np.maximum(fixed + per_token * held, 1e-9)).sum()) / terms.output

    @property
    def staffed(self) -> bool:
        """Whether there are workers of either kind."""
        return self.prompt_rate > 0 and len(self._rows) > 0

    def open(self, tokens: float, sequences: int, *, decodes: bool) -> bool:
        """Whether something of so many tokens can start now."""
        return self.prompts_open and (not decodes or bool(self._fitting(tokens, sequences).any()))

    def full(self, tokens: float, sequences: int) -> frozenset[Peer]:
        """Decode workers that have no room for it."""
        rows = self._rows[~self._fitting(tokens, sequences)]
        workers = (self._fleet.workers[row] for row in rows.tolist())
        return frozenset(worker.peer for worker in workers if worker is not None)

    def wait(self, prompt: float, tokens: float, sequences: float) -> float:
        """Seconds until so much more can start: prompt tokens to compute, tokens to hold, sequences to step."""
        computed = prompt / self.prompt_rate if self.prompt_rate else 0.0
        lacking = max(
            sequences - float(np.minimum(self._free, 1e9).sum()),
            (tokens - float(self._room.sum())) / self._per_sequence,
        )
        if lacking <= 0.0:
            return computed
        # Nothing leaves only where all are idle, and then they take it at once.
        return max(computed, lacking / self.leaving) if self.leaving else computed

    def _fitting(self, tokens: float, sequences: int) -> Bools:
        fitting: Bools = self._idle | ((self._free >= sequences) & (self._room >= tokens))
        return fitting
