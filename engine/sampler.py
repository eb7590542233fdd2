"""Draws the next token of each sequence of a batch.

The draw depends on the row's logits, ``seed`` and output position alone. It inverts the cumulative distribution in
vocabulary order with one uniform number, so a rounding difference between two batches moves the borders between
tokens by as little and almost never changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import EngineFailure
from protocol.sampling import SamplingParams

_CANDIDATES = 1024
"""Most likely tokens that top-p looks at before it sorts the whole vocabulary."""
_LEAST_TEMPERATURE = 1e-30
"""Below this a division of float32 differences overflows to the same infinities."""


def sample(logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token id per row.

    Greedy rows take the first of the highest logits. The others divide by the temperature, keep ``top_k`` (and all
    that tie with the last of these), then the smallest set that reaches ``top_p`` of what is left (and all that tie),
    and draw. Stop tokens are out before ``min_tokens``.

    Args:
        logits: [B, V], any float type.
        sampling: B settings.
        positions: B indices of the drawn tokens in their requests' whole outputs.

    Raises:
        EngineFailure: a row has no finite highest logit.
    """
    scores = logits.float()
    scores = _without_early_stops(scores, sampling, positions)
    highest, greedy_ids = scores.max(dim=-1)
    if not bool(torch.isfinite(highest).all()):
        raise EngineFailure("the model gave logits that are not finite")
    tokens = greedy_ids.tolist()
    rows = [row for row, settings in enumerate(sampling) if not settings.greedy]
    if rows:
        drawn = _draw(
            scores[rows] - highest[rows, None],
            [sampling[row] for row in rows],
            uniforms([sampling[row].seed for row in rows], [positions[row] for row in rows]),
        )
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return [int(token) for token in tokens]


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
    """Unnormalised probabilities, float64 [B, V], 0 for tokens that temperature, top-k and top-p leave out.

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
    return weights


def _without_early_stops(
    scores: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    rows, ids = [], []
    for row, (settings, position) in enumerate(zip(sampling, positions, strict=True)):
        if position < settings.min_tokens:
            known = [token for token in settings.stop_token_ids if token < scores.shape[1]]
            rows += [row] * len(known)
            ids += known
    if not rows:
        return scores
    masked = scores.clone()
    masked[rows, ids] = -torch.inf
    return masked


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
