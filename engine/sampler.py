"""Draws the next token of each sequence of a batch.

The draw depends on the row's logits, the tokens before it, ``seed`` and output position alone. It inverts the
cumulative distribution in vocabulary order with one uniform number, so a rounding difference between two batches moves
the borders between tokens by as little and almost never changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Draw
from engine.logit_rules import Row, apply_rules
from protocol.errors import EngineFailure
from protocol.sampling import SamplingParams, TokenLogprobs

_CANDIDATES = 1024
"""Most likely tokens that top-p looks at before it sorts the whole vocabulary."""
_LEAST_TEMPERATURE = 1e-30
"""Below this a division of float32 differences overflows to the same infinities."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Draw]:
    """One token per row.

    Greedy rows take the first of the highest logits. The others divide by the temperature, keep ``top_k`` (and all
    that tie with the last of these), then the smallest set that reaches ``top_p`` of what is left (and all that tie),
    then what reaches ``min_p`` of the most likely, and draw. Penalties, biases and stop tokens before ``min_tokens``
    have changed the logits by then.

    Args:
        logits: [B, V], any float type.
        rows: B settings, positions and histories.

    Raises:
        EngineFailure: a row has no finite highest logit.
    """
    scores = logits.float()
    ruled = apply_rules(scores, rows)
    highest, greedy_ids = ruled.max(dim=-1)
    if not bool(torch.isfinite(highest).all()):
        raise EngineFailure("the model gave logits that are not finite")
    tokens = [int(token) for token in greedy_ids.tolist()]
    drawing = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if drawing:
        drawn = _draw(
            ruled[drawing] - highest[drawing, None],
            [rows[index].sampling for index in drawing],
            uniforms([rows[index].sampling.seed for index in drawing], [rows[index].position for index in drawing]),
        )
        for index, token in zip(drawing, drawn, strict=True):
            tokens[index] = token
    wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    found: dict[int, TokenLogprobs] = {}
    if wanted:
        counts = [rows[index].sampling.logprobs or 0 for index in wanted]
        told = _logprobs(scores[wanted], [tokens[index] for index in wanted], counts)
        found = dict(zip(wanted, told, strict=True))
    return [Draw(token, found.get(index)) for index, token in enumerate(tokens)]


def _logprobs(scores: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of ``tokens`` and of the ``counts[r]`` most likely in each row of ``scores`` [R, V]."""
    normalised = torch.log_softmax(scores, dim=-1)
    own = normalised.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    best = torch.topk(normalised, min(max(counts), scores.shape[1]))
    lines = zip(own, counts, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, count, ids, values in lines
    ]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) per ``(seed, position)``: two rounds of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = _mix(np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    state = _mix(state + (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def kept_weights(shifted: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities, float64 [B, V], 0 for tokens that temperature, top-k, top-p and min-p leave out.

    Args:
        shifted: float32 [B, V], logits less their row's highest.
        sampling: B settings, none greedy.
    """
    temperatures = [max(settings.temperature, _LEAST_TEMPERATURE) for settings in sampling]
    weights = shifted.double()
    weights.div_(torch.tensor(temperatures, dtype=torch.float64, device=shifted.device)[:, None])
    weights.exp_()
    limited = [row for row, settings in enumerate(sampling) if 0 < settings.top_k < shifted.shape[1]]
    if limited:
        _drop_below(
            weights, limited, _top_k_floor(_of_rows(weights, limited), [sampling[row].top_k for row in limited])
        )
    limited = [row for row, settings in enumerate(sampling) if settings.top_p < 1.0]
    if limited:
        _drop_below(
            weights, limited, _top_p_floor(_of_rows(weights, limited), [sampling[row].top_p for row in limited])
        )
    limited = [row for row, settings in enumerate(sampling) if settings.min_p > 0.0]
    if limited:
        shares = torch.tensor([sampling[row].min_p for row in limited], dtype=weights.dtype, device=weights.device)
        _drop_below(weights, limited, shares * _of_rows(weights, limited).max(dim=-1).values)
    return weights


def _of_rows(weights: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``rows`` of ``weights``, without a copy where that is all of them."""
    return weights if len(rows) == weights.shape[0] else weights[rows]


def _drop_below(weights: torch.Tensor, rows: Sequence[int], floor: torch.Tensor) -> None:
    """Zero what is less than ``floor`` [R] in ``rows`` of ``weights`` [B, V]; all that tie with it stay."""
    floors = weights.new_zeros(weights.shape[0])
    floors[rows] = floor
    weights.masked_fill_(weights < floors[:, None], 0.0)


def _top_k_floor(weights: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The ``sizes[r]``-th highest of each row of ``weights`` [R, V]."""
    last = torch.tensor(sizes, device=weights.device)[:, None] - 1
    return torch.topk(weights, max(sizes)).values.gather(1, last)[:, 0]


def _top_p_floor(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """The least of the smallest set of the highest in each row of ``weights`` [R, V] that has its share of the sum."""
    wanted = weights.sum(dim=-1, keepdim=True)
    wanted *= torch.tensor(shares, dtype=weights.dtype, device=weights.device)[:, None]
    width = min(_CANDIDATES, weights.shape[1])
    ordered = torch.topk(weights, width).values
    floor = _floor_of(ordered, wanted)
    flat = torch.nonzero(ordered.sum(dim=-1) < wanted[:, 0])[:, 0].tolist() if width < weights.shape[1] else []
    if flat:  # so flat a distribution that the candidates do not reach the share
        floor[flat] = _floor_of(torch.sort(weights[flat], descending=True).values, wanted[flat])
    return floor


def _floor_of(ordered: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where the running sum of each row of ``ordered`` [R, N], highest first, reaches ``wanted`` [R, 1]."""
    before = torch.cumsum(ordered, dim=-1) - ordered
    count = (before < wanted).sum(dim=-1, keepdim=True)
    return ordered.gather(1, (count - 1).clamp_(min=0))[:, 0]


def _draw(shifted: torch.Tensor, sampling: Sequence[SamplingParams], numbers: NDArray[np.float64]) -> list[int]:
    cumulative = torch.cumsum(kept_weights(shifted, sampling), dim=-1)
    total = cumulative[:, -1:]
    target = torch.from_numpy(numbers).to(shifted.device)[:, None] * total
    # Rounding may carry the product up to the total itself, beyond every token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return [int(token) for token in torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()]
