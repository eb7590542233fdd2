"""What changes a row's logits before a token is drawn: penalties, biases, grammars, stop tokens that come too early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.host_link import upload
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch's logits.

    Attributes:
        sampling: how its token is drawn.
        position: index of that token in the request's whole output.
        history: all tokens of the request before it, the last ``position`` of them output; may be empty where
            ``sampling`` does not look back.
        allowed: [V], the tokens that its grammar leaves; None leaves all.
    """

    sampling: SamplingParams
    position: int
    history: Sequence[int] = ()
    allowed: NDArray[np.bool_] | None = None


def apply_rules(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """``scores`` [B, V], float32, under each row's rules; itself where there is none, otherwise a changed copy.

    Biases come first, as in transformers, then the repetition penalty, then presence and frequency. An output that by
    its grammar can only end does so, whatever ``min_tokens`` says.
    """
    ruled = [index for index, row in enumerate(rows) if _has_rule(row)]
    if not ruled:
        return scores
    changed = scores.clone()
    for index in ruled:
        row, line = rows[index], changed[index]
        if row.sampling.logit_bias:
            _add_bias(line, row.sampling)
        if row.sampling.penalises:
            _penalise(line, row)
        early = _early_stops(row, line.shape[0])
        if row.allowed is not None:
            line.masked_fill_(upload(~row.allowed, torch.bool, line.device), -torch.inf)
        if early and (row.allowed is None or row.allowed.sum() > row.allowed[early].sum()):
            line[upload(early, torch.int64, line.device)] = -torch.inf
    return changed


def _has_rule(row: Row) -> bool:
    sampling = row.sampling
    early = row.position < sampling.min_tokens and bool(sampling.stop_token_ids)
    return early or sampling.penalises or bool(sampling.logit_bias) or row.allowed is not None


def _early_stops(row: Row, vocab_size: int) -> list[int]:
    """Tokens that would end the output before it is long enough, each once."""
    if row.position >= row.sampling.min_tokens:
        return []
    return [token for token in dict.fromkeys(row.sampling.stop_token_ids) if token < vocab_size]


def _penalise(line: torch.Tensor, row: Row) -> None:
    sampling = row.sampling
    history = np.fromiter(row.history, np.int64, len(row.history))
    if sampling.repetition_penalty != 1.0:
        seen = _on(np.unique(history), line)
        found = line[seen]
        penalty = sampling.repetition_penalty
        line[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if row.position and (sampling.presence_penalty or sampling.frequency_penalty):
        output, counts = np.unique(history[-row.position :], return_counts=True)
        taken = sampling.presence_penalty + sampling.frequency_penalty * counts
        line[_on(output, line)] -= upload(taken, line.dtype, line.device)


def _add_bias(line: torch.Tensor, sampling: SamplingParams) -> None:
    known = [(token, bias) for token, bias in sampling.logit_bias if token < line.shape[0]]
    if known:
        tokens, biases = zip(*known, strict=True)
        line[upload(tokens, torch.int64, line.device)] += upload(biases, line.dtype, line.device)


def _on(ids: NDArray[np.int64], line: torch.Tensor) -> torch.Tensor:
    return upload(ids, torch.int64, line.device)
