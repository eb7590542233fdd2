"""What a worker has counted over all of its incarnations, so that a counter never falls when a worker starts again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from protocol.histogram import Histogram
from protocol.messages import WorkerLoad
from protocol.transfer_counts import TransferCounts

COUNTERS = (
    "steps",
    "step_seconds",
    "prefill_tokens",
    "cached_tokens",
    "decode_tokens",
    "kv_blocks",
    "kv_bytes",
    "kv_seconds",
    "preemptions",
    "failures",
    "transport_fallbacks",
    "swaps",
    "decode_turns",
    "draft_tokens",
    "accepted_tokens",
    "spans_exported",
    "spans_dropped",
)
"""The fields of ``WorkerLoad`` that only grow."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over incarnations.

    Attributes:
        counters: by field of ``WorkerLoad``.
        transfer: of the handoffs.
        step_gaps: between steps.
    """

    counters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType(dict.fromkeys(COUNTERS, 0)))
    transfer: TransferCounts = field(default_factory=TransferCounts)
    step_gaps: Histogram = field(default_factory=Histogram)

    def plus(self, load: WorkerLoad, transfer: TransferCounts) -> Totals:
        """With what a later incarnation says."""
        counters = {name: before + getattr(load, name) for name, before in self.counters.items()}
        gaps = self.step_gaps.plus(load.step_gaps)
        return Totals(MappingProxyType(counters), self.transfer.plus(transfer), gaps)
