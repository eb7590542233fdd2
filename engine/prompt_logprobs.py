"""Log-probabilities of a prompt's own tokens, for the requests that ask: a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protocol.errors import EngineFailure, InvariantViolation
from protocol.prompt_logprobs import MAX_POSITIONS, LogprobTable

_MOST_LOGITS = 1 << 23
"""Logits that are in memory at a time, whatever the chunk's length and the vocabulary's."""
_CACHED_LOGITS = 1 << 21
"""Of these, as many as a CPU's cache holds in float32 are looked at together: that takes half the time."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens that a step shall tell of: those that follow tokens of its chunk.

    Attributes:
        first: index in the chunk of the token that the first of them follows.
        targets: them, in order; at least one.
        alternatives: how many of the most likely tokens are told beside each.
        tell: called from within the step, once for each table, in order.

    Raises:
        InvariantViolation: there are no targets.
    """

    first: int
    targets: Sequence[int]
    alternatives: int
    tell: Callable[[LogprobTable], object]

    def __post_init__(self) -> None:
        if not self.targets or self.first < 0:
            raise InvariantViolation(f"{len(self.targets)} targets from {self.first} on: there is nothing to tell")


def tell(
    spans: Sequence[tuple[int, PromptSpan]],
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> None:
    """Tell of every span of a batch.

    Args:
        spans: ``(row of the chunk's first token in hidden, span)``.
        hidden: [T, hidden], of all tokens of the batch.
        head: gives logits [N, vocab] of hidden states [N, hidden].
        vocab_size: V.

    Raises:
        EngineFailure: logits are not finite.
    """
    rows = max(1, min(MAX_POSITIONS, _MOST_LOGITS // vocab_size))
    for offset, span in spans:
        for at, targets in _pieces(span.targets, rows):
            first = offset + span.first + at
            span.tell(_table(head(hidden[first : first + len(targets)]), targets, span.alternatives))


def _pieces(targets: Sequence[int], rows: int) -> Iterator[tuple[int, Sequence[int]]]:
    for at in range(0, len(targets), rows):
        yield at, targets[at : at + rows]


def _table(logits: torch.Tensor, targets: Sequence[int], alternatives: int) -> LogprobTable:
    rows = max(1, _CACHED_LOGITS // logits.shape[1])
    width = min(alternatives, logits.shape[1])
    parts = [
        _columns(logits[at : at + len(piece)].float(), torch.tensor(piece, device=logits.device), width)
        for at, piece in _pieces(targets, rows)
    ]
    return LogprobTable(width, *(b"".join(column) for column in zip(*parts, strict=True)))


def _columns(scores: torch.Tensor, targets: torch.Tensor, width: int) -> tuple[bytes, bytes, bytes, bytes]:
    if not bool(torch.isfinite(scores.amax(dim=-1)).all()):
        raise EngineFailure("the model gave logits that are not finite")
    normalised = torch.log_softmax(scores, dim=-1)
    own = normalised.gather(1, targets[:, None])
    ranks = (normalised > own).sum(dim=-1, dtype=torch.int32) + 1
    best = torch.topk(normalised, width)
    return _packed(own, "<f4"), _packed(ranks, "<u4"), _packed(best.indices, "<u4"), _packed(best.values, "<f4")


def _packed(values: torch.Tensor, kind: str) -> bytes:
    return values.cpu().numpy().astype(np.dtype(kind)).tobytes()
