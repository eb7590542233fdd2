"""How a sequence makes room when the pool is full: into host memory and back, or by a fresh prefill. Pure.

Either way the sequence then waits for room; what differs is what it takes to have its KV in the pool again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Preemption = Literal["auto", "swap", "recompute"]
"""``swap`` where there is host memory left, ``recompute`` always, or ``auto``: what is predicted to cost less."""

PREEMPTIONS: tuple[str, ...] = get_args(Preemption)

UNMEASURED_COPY_RATE = 1e9
"""Bytes per second between pool and host memory that are counted on before the first copy: slower than any bus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What has been measured so far; 0 is not known yet.

    Attributes:
        copy: bytes per second between pool and host memory.
        prefill: prompt tokens per second of the sequence's prefill worker.
        ship: bytes per second from prefill workers into the pool.
    """

    copy: float = 0.0
    prefill: float = 0.0
    ship: float = 0.0


def swap_seconds(nbytes: int, rates: Rates) -> float:
    """Seconds to copy ``nbytes`` out and back."""
    return 2 * nbytes / (rates.copy or UNMEASURED_COPY_RATE)


def recompute_seconds(tokens: int, nbytes: int, rates: Rates) -> float:
    """Seconds to prefill ``tokens`` anew and to ship them; infinite while no prefill rate is known."""
    if not rates.prefill:
        return math.inf
    return tokens / rates.prefill + (nbytes / rates.ship if rates.ship else 0.0)


def prefers_swap(mode: Preemption, tokens: int, nbytes: int, rates: Rates) -> bool:
    """Whether a sequence of ``tokens`` in ``nbytes`` of KV is better swapped out than prefilled anew."""
    if mode == "auto":
        return swap_seconds(nbytes, rates) <= recompute_seconds(tokens, nbytes, rates)
    return mode == "swap"
