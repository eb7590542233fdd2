"""Draws the next token of each sequence of a batch.

The draw depends on the row's logits, the tokens before it, ``seed`` and output position alone. It inverts the
cumulative distribution in vocabulary order with one uniform number, so a rounding difference between two batches moves
the borders between tokens by as little and almost never changes the text.

A step waits for the device once, for the tokens. Where ``top_p`` is asked of a large vocabulary it waits once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Draw
from engine.host_link import fetch, upload
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
    highest, chosen = ruled.max(dim=-1)
    drawing = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if drawing:
        drawn = _draw(
            _of_rows(ruled, drawing) - _of_rows(highest, drawing)[:, None],
            [rows[index].sampling for index in drawing],
            uniforms([rows[index].sampling.seed for index in drawing], [rows[index].position for index in drawing]),
        )
        chosen[upload(drawing, torch.int64, chosen.device)] = drawn
    wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    counts = [rows[index].sampling.logprobs or 0 for index in wanted]
    told = _logprobs(_of_rows(scores, wanted), _of_rows(chosen, wanted), max(counts)) if wanted else ()
    finite, tokens, *values = fetch(torch.isfinite(highest), chosen, *told)
    if not all(finite):
        raise EngineFailure("the model gave logits that are not finite")
    found = dict(zip(wanted, _lines(counts, *values), strict=True)) if wanted else {}
    return [Draw(token, found.get(index)) for index, token in enumerate(tokens)]


def _logprobs(scores: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ``tokens`` [R], and ids and values of the ``most`` likely in each row of ``scores`` [R, V]."""
    normalised = torch.log_softmax(scores, dim=-1)
    best = torch.topk(normalised, min(most, scores.shape[1]))
    return normalised.gather(1, tokens[:, None])[:, 0], best.indices, best.values


def _lines(
    counts: Sequence[int], own: list[float], ids: list[list[int]], values: list[list[float]]
) -> list[TokenLogprobs]:
    """What was fetched of :func:`_logprobs`, ``counts[r]`` of the most likely in a row."""
    lines = zip(own, counts, ids, values, strict=True)
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
    weights.div_(upload(temperatures, torch.float64, shifted.device)[:, None])
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
        shares = upload([sampling[row].min_p for row in limited], weights.dtype, weights.device)
        _drop_below(weights, limited, shares * _of_rows(weights, limited).max(dim=-1).values)
    return weights


def _of_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``rows``, ascending, of ``values``, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[upload(rows, torch.int64, values.device)]


def _drop_below(weights: torch.Tensor, rows: Sequence[int], floor: torch.Tensor) -> None:
    """Zero what is less than ``floor`` [R] in ``rows`` of ``weights`` [B, V]; all that tie with it stay."""
    floors = weights.new_zeros(weights.shape[0])
    floors[upload(rows, torch.int64, weights.device)] = floor
    weights.masked_fill_(weights < floors[:, None], 0.0)


def _top_k_floor(weights: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The ``sizes[r]``-th highest of each row of ``weights`` [R, V]."""
    last = upload(sizes, torch.int64, weights.device)[:, None] - 1
    return torch.topk(weights, max(sizes)).values.gather(1, last)[:, 0]


def _top_p_floor(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """The least of the smallest set of the highest in each row of ``weights`` [R, V] that has its share of the sum."""
    wanted = weights.sum(dim=-1, keepdim=True)
    wanted *= upload(shares, weights.dtype, weights.device)[:, None]
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


def _draw(shifted: torch.Tensor, sampling: Sequence[SamplingParams], numbers: NDArray[np.float64]) -> torch.Tensor:
    cumulative = torch.cumsum(kept_weights(shifted, sampling), dim=-1)
    total = cumulative[:, -1:]
    target = upload(numbers, torch.float64, shifted.device)[:, None] * total
    # Rounding may carry the product up to the total itself, beyond every token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # Of logits that are not finite, which are found out later, it may come to none: it must be a token all the same.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=shifted.shape[1] - 1)
