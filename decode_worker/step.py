"""What the scheduler decides for one step, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from decode_worker.sequence import Sequence
from engine.batch import Chunk, Draw
from protocol.messages import Tokens
from protocol.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """What one sequence got out of a step.

    Attributes:
        sequence: whose.
        start: index of the first token in the request's whole output.
        draws: the tokens: one, and one for each token of a draft that was right.
        finish_reason: set with the last token.
    """

    sequence: Sequence
    start: int
    draws: tuple[Draw, ...]
    finish_reason: FinishReason | None

    def message(self, now: float) -> Tokens:
        """What the router hears of it; with the first tokens, how long the handoff and this step took."""
        times = self.sequence.times
        if times is not None:
            times = msgspec.structs.replace(times, decode_step=now - self.sequence.committed)
        return Tokens(
            key=self.sequence.key,
            start=self.start,
            token_ids=tuple(draw.token_id for draw in self.draws),
            finish_reason=self.finish_reason,
            logprobs=tuple(draw.logprobs for draw in self.draws if draw.logprobs is not None),
            times=times,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What the next step computes, and who had to make room for it.

    Attributes:
        sequences: one token each, and their drafts; then those whose prompts it goes on with.
        preempted: already dropped; their imports are still to be closed, and the router to be told.
        swapped_out: still to be copied to their slots; their blocks come free when that is done.
    """

    sequences: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    swapped_out: tuple[Sequence, ...] = ()


def chunks_of(sequences: Seq[Sequence]) -> list[Chunk]:
    """The engine's view of a step, in the order of its sequences: the tokens of each, or a piece of its prompt."""
    return [chunk for sequence in sequences for chunk in _chunks(sequence)]


def _chunks(sequence: Sequence) -> Iterator[Chunk]:
    """The last token of a sequence, then each of its draft's, as if it had come; or its share of prompt.

    One chunk per token, over the same blocks: attention computes each as a decode, just as in a step of its own.
    """
    if sequence.work is not None:
        yield sequence.work.chunk
        return
    for ahead, token in enumerate((sequence.token_ids[-1], *sequence.draft)):
        yield Chunk(
            token_ids=(token,),
            start=sequence.computed + ahead,
            block_table=sequence.block_table,
            sampling=sequence.request.sampling,
            position=sequence.produced + ahead,
            history=_history(sequence, ahead),
            copied=None if ahead else sequence.copied,
        )


def _history(sequence: Sequence, ahead: int) -> Seq[int]:
    """The tokens before the draw of a sequence's row, ``ahead`` of its draft among them, where it looks back."""
    if not sequence.request.sampling.looks_back:
        return ()
    return [*sequence.token_ids, *sequence.draft[:ahead]] if ahead else sequence.token_ids
