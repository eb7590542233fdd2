"""How many requests a second a cluster has work for: where no rate is asked for, one that it can serve."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.bench.traces.request import TraceRequest
from cluster.simulation.scenario import Scenario

SAMPLE = 2000
"""Requests that are looked at."""
FULL = 0.5
"""Share of its largest batch that a decode worker is reckoned with."""


def capacity(scenario: Scenario, sample: Iterable[TraceRequest]) -> float:
    """Requests a second, of the kind of these, that would keep either role busy all the time if nothing were cached."""
    profile = scenario.profile
    prefill = decode = 0.0
    count = 0
    batch = max(1.0, FULL * profile.max_sequences)
    for request in sample:
        count += 1
        length, output = request.prompt_tokens, request.output_tokens
        steps = length / profile.step_tokens
        prefill += steps * profile.prefill_seconds(profile.step_tokens, 0.5 * profile.step_tokens * length)
        context = length + 0.5 * output
        fits = profile.num_blocks * profile.layout.block_size / (length + output)
        together = max(1.0, min(batch, fits))
        step = profile.decode_fixed + together * (profile.decode_per_sequence + profile.decode_per_context * context)
        decode += (output - 1) * step / together
    return count / max(prefill / scenario.prefill, decode / scenario.decode, 1e-9)
