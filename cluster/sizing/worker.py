"""One worker: a model on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.bench.roofline import floor
from cluster.sizing.accelerator import Accelerator
from cluster.sizing.model import ServedModel

ROUNDS, SETTLED = 200, 0.5
"""Of the fixed point between batch and time of a step, and how near it is looked for."""
RESERVED = 0.1
"""Share of a device's memory that activations, graphs and libraries take."""


@dataclass(frozen=True, slots=True)
class SizedWorker:
    """How long a worker's steps take and what fits it, by the roofline of its device.

    Attributes:
        model: that it serves.
        device: that it runs on.
        chunk: prompt tokens that a prefill step computes.
    """

    model: ServedModel
    device: Accelerator
    chunk: int

    @property
    def room(self) -> int:
        """Bytes for KV, beside the weights; negative where these do not fit."""
        return int(self.device.memory * (1 - RESERVED)) - self.model.weight_bytes

    def concurrency(self, tokens: int) -> int:
        """Requests of so many tokens that fit at once."""
        return max(self.room, 0) // self.model.request_bytes(tokens)

    def step(self, *, batch: int = 0, context: int = 0, chunk: int = 0, cached: int = 0) -> float:
        """Seconds of a step; see :meth:`ServedModel.work`."""
        parts = self.model.work(batch=batch, context=context, chunk=chunk, cached=cached)
        return sum(floor(part, self.device.rates)[0] for part in parts)

    def prefill(self, tokens: int) -> float:
        """Seconds of a whole prompt, chunk by chunk, with nothing beside it."""
        return sum(
            self.step(chunk=min(self.chunk, tokens - first), cached=first) for first in range(0, tokens, self.chunk)
        )

    def crowd(self, context: int, tokens_per_second: float) -> float:
        """Sequences in a step, in the mean, where so many tokens are asked for; infinite where it never makes them."""
        batch = 0.0
        for _ in range(ROUNDS):
            before, batch = batch, tokens_per_second * self.step(batch=max(round(batch), 1), context=context)
            if abs(batch - before) < SETTLED:
                return batch
        return math.inf

    def widest(self, context: int, tokens: int, limit: float) -> int:
        """The largest batch whose step stays within ``limit`` seconds and that fits; 0 where not even one does."""
        low, high = 0, self.concurrency(tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.step(batch=middle, context=context) <= limit:
                low = middle
            else:
                high = middle - 1
        return low
