"""Prompts that a decode worker computes itself, in chunks beside its decode steps. Pure bookkeeping.

A step takes the running sequences first; what its budget of tokens leaves goes to prompts, the senior first (chunked
prefill, as in Sarathi-Serve, Agrawal et al., 2024). So no token waits for a whole prompt, and none for its own turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from decode_worker.sequence import Sequence, SequenceState
from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.prompt import pack


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step did for a prompt that this worker computes itself.

    Attributes:
        sequence: whose.
        tokens: of it, computed in the step.
        draw: the first token, when the whole prompt is computed.
    """

    sequence: Sequence
    tokens: int
    draw: Draw | None


class Prompts:
    """The shares of prompts in steps.

    Args:
        pool: holds the blocks.
        step_tokens: of a step that computes prompts at most, those of running sequences included; where these leave
            less than a block, the senior prompt still gets on by one.
    """

    def __init__(self, pool: BlockPool, step_tokens: int) -> None:
        self._pool = pool
        self._step_tokens = step_tokens
        self._computed: list[Computed] = []

    def share(self, live: Iterable[Sequence], rows: int) -> tuple[Sequence, ...]:
        """Give prompts what a step's budget leaves beside ``rows``; returns the sequences that they are of."""
        being_computed = [each for each in live if each.tracker.state is SequenceState.PREFILLING]
        if not being_computed:
            return ()
        by_key = {each.key: each for each in sorted(being_computed, key=attrgetter("order"))}
        budget = max(self._step_tokens - rows, self._pool.block_size)
        works = pack([each.prompt for each in by_key.values() if each.prompt], budget, self._pool.block_size)
        for work in works:
            by_key[work.prompt.key].work = work
        return tuple(by_key[work.prompt.key] for work in works)

    def complete(self, sequence: Sequence, draw: Draw | None) -> None:
        """The step that computed a share of the sequence's prompt has ended well."""
        work = sequence.work
        assert work is not None, "it took part in the step by its prompt"
        work.complete(self._pool)
        sequence.computed = work.stop
        self._computed.append(Computed(sequence, work.stop - work.start, draw))

    def take(self) -> Seq[Computed]:
        """What was completed since the last call."""
        computed, self._computed = self._computed, []
        return computed
