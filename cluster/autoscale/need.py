"""How many workers of a role a load needs, by what they were seen to do and what ``kvferry plan`` knows of queues."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.autoscale.observer import Load
from cluster.scale_section import MAX_REPLICAS, AutoSection
from cluster.sizing.queue import fewest, mean_within
from protocol.ids import Role

BUSIEST = 0.9
"""Share of the time in which workers may be in steps where no number of them keeps the target."""
LEAST_BUSY = 0.01
"""Worker-seconds a second below which what they computed tells nothing of what they can."""
IN_A_STEP = 512
"""Prompt tokens of a step, where only the pace of steps is known."""


@dataclass(frozen=True, slots=True)
class Need:
    """So many workers.

    Attributes:
        workers: at least 1.
        why: for a person.
    """

    workers: int
    why: str


def needed(role: Role, load: Load, auto: AutoSection, *, more: float = 0.0) -> Need:
    """The fewest workers of ``role`` that keep the target of that role.

    Args:
        role: "prefill" or "decode".
        load: what was seen.
        auto: the targets.
        more: share by which the load is taken to be higher.
    """
    return _prefill(load, auto, 1 + more) if role == "prefill" else _decode(load, auto, 1 + more)


def _prefill(load: Load, auto: AutoSection, times: float) -> Need:
    seen = load.prefill
    pace = _prefill_pace(load)
    offered = max(0.0, seen.tokens + max(0.0, seen.growth)) * times
    if not offered and not seen.waiting_tokens:
        return Need(1, "no prompt came")
    if not pace:
        return Need(max(1, seen.workers), "no worker has told yet how fast it is")
    busy = offered / pace
    tokens = seen.tokens / load.requests if load.requests else offered
    service = tokens / pace
    rate = offered / tokens if tokens else 0.0
    said = f"{offered:,.0f} prompt tokens/s at {pace:,.0f} a worker"
    if service < auto.ttft:
        count = fewest(rate, service, auto.ttft, auto.percentile, MAX_REPLICAS)
        said += f", {service:.2g} s a prompt, first token within {auto.ttft:g} s"
    else:
        count = math.ceil(busy / BUSIEST)
        said += f", {service:.2g} s a prompt: longer than {auto.ttft:g} s to the first token, whatever their number"
    # What waits already is to be worked off within the target, beside what comes.
    behind = math.ceil(busy + seen.waiting_tokens / pace / auto.ttft)
    if behind > count:
        return Need(behind, f"{said}; {seen.waiting_tokens:,} tokens wait")
    return Need(max(1, count), said)


def _prefill_pace(load: Load) -> float:
    """Tokens that a worker computes in a second of steps; 0 where nobody knows."""
    seen = load.prefill
    if seen.busy >= LEAST_BUSY and seen.tokens:
        return seen.tokens / seen.busy
    step = seen.fixed + IN_A_STEP * seen.per_token
    return IN_A_STEP / step if step else 0.0


def _decode(load: Load, auto: AutoSection, times: float) -> Need:
    seen = load.decode
    if not seen.sequences and not seen.tokens:
        return Need(1, "no sequence ran")
    if not seen.per_token and not seen.fixed:
        return Need(max(1, seen.workers), "no worker has told yet how fast it is")
    widest = (auto.tpot - seen.fixed) / seen.per_token if seen.per_token else math.inf
    said = f"{seen.tokens:,.0f} tokens/s, {seen.sequences:.0f} sequences"
    bound = f"{widest:.0f} fit a step of {auto.tpot:g} s" if math.isfinite(widest) else "any number fits a step"
    if widest < 1:
        widest = max(1.0, seen.sequences / max(1, seen.workers))
        bound = f"a step takes longer than {auto.tpot:g} s, whatever their number"
    room = seen.capacity / seen.context if seen.context else math.inf
    if room < widest:
        widest, bound = max(1.0, room), f"{room:.0f} of {seen.context:,.0f} tokens fit a pool"
    if math.isinf(widest):
        return Need(1, f"{said}; {bound}")
    batch = max(1.0, mean_within(math.floor(widest), auto.percentile))
    rate = batch / (seen.fixed + batch * seen.per_token)
    count = max(seen.tokens / rate, seen.sequences / batch) * times
    return Need(max(1, math.ceil(count - 1e-9)), f"{said}; {bound}, {batch:.1f} in the mean")
