"""How many workers of a role a load needs, by what they were seen to do and what ``kvferry plan`` knows of queues."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.autoscale.observer import Load, Turned
from cluster.scale_section import MAX_REPLICAS, AutoSection
from cluster.sizing.queue import fewest, mean_within
from protocol.ids import Role

BUSIEST = 0.9
"""Share of the time in which workers may be in steps where no number of them keeps the target."""
LEAST_BUSY = 0.01
"""Worker-seconds a second below which what they computed tells nothing of what they can."""
FULL = 0.8
"""Share of what workers can do at once, from which on a role is what others wait for."""
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
    seen, turned = load.prefill, load.turned if _prefill_lacks(load, auto) else Turned()
    pace = _prefill_pace(load)
    refused = turned.refused_tokens * seen.uncached
    waiting = seen.waiting_tokens + turned.waiting_tokens * seen.uncached
    growing = max(0.0, seen.growth) + max(0.0, turned.growth) * seen.uncached
    offered = max(0.0, seen.tokens + refused + growing) * times
    if not offered and not waiting:
        return Need(1, "no prompt came")
    if not pace:
        return Need(max(1, seen.workers), "no worker has told yet how fast it is")
    busy = offered / pace
    requests = load.requests + turned.refused
    tokens = (seen.tokens + refused) / requests if requests else offered
    service = tokens / pace
    rate = offered / tokens if tokens else 0.0
    said = f"{offered:,.0f} prompt tokens/s at {pace:,.0f} a worker{_turned_away(turned)}"
    if service < auto.ttft:
        count = fewest(rate, service, auto.ttft, auto.percentile, MAX_REPLICAS)
        said += f", {service:.2g} s a prompt, first token within {auto.ttft:g} s"
    else:
        count = math.ceil(busy / BUSIEST)
        said += f", {service:.2g} s a prompt: longer than {auto.ttft:g} s to the first token, whatever their number"
    # What waits already is to be worked off within the target, beside what comes.
    behind = math.ceil(busy + waiting / pace / auto.ttft)
    if behind > count:
        return Need(behind, f"{said}; {waiting:,.0f} tokens wait")
    return Need(max(1, count), said)


def _turned_away(turned: Turned) -> str:
    said = f", {turned.waiting} requests wait in the router" if turned.waiting else ""
    return said + (f", {turned.refused:.2g} a second are refused" if turned.refused > 0 else "")


def _prefill_lacks(load: Load, auto: AutoSection) -> bool:
    """Whether what waits in the router waits for prefill: it does unless decode alone has no room."""
    seen = load.prefill
    return not _decode_lacks(load, auto) or seen.busy >= FULL * seen.workers


def _decode_lacks(load: Load, auto: AutoSection) -> bool:
    """Whether it waits for decode."""
    seen = load.decode
    batch, _ = _batch(load, auto)
    return bool(seen.workers) and math.isfinite(batch) and seen.sequences >= FULL * batch * seen.workers


def _prefill_pace(load: Load) -> float:
    """Tokens that a worker computes in a second of steps; 0 where nobody knows."""
    seen = load.prefill
    if seen.busy >= LEAST_BUSY and seen.tokens:
        return seen.tokens / seen.busy
    step = seen.fixed + IN_A_STEP * seen.per_token
    return IN_A_STEP / step if step else 0.0


def _decode(load: Load, auto: AutoSection, times: float) -> Need:
    seen, turned = load.decode, load.turned if _decode_lacks(load, auto) else Turned()
    if not seen.sequences and not seen.tokens:
        return Need(1, "no sequence ran")
    if not seen.per_token and not seen.fixed:
        return Need(max(1, seen.workers), "no worker has told yet how fast it is")
    batch, bound = _batch(load, auto)
    said = f"{seen.tokens:,.0f} tokens/s, {seen.sequences:.0f} sequences{_turned_away(turned)}; {bound}"
    if math.isinf(batch):
        return Need(1, said)
    rate = batch / (seen.fixed + batch * seen.per_token)
    count = max(seen.tokens / rate, seen.sequences / batch) * times
    # Those that were refused would have been so many more of the same; who waits wants a step beside the others.
    more = turned.refused / load.requests if load.requests else 0.0
    count = count * (1 + more) + turned.waiting / batch
    return Need(max(1, math.ceil(count - 1e-9)), f"{said}, {batch:.1f} in the mean")


def _batch(load: Load, auto: AutoSection) -> tuple[float, str]:
    """Sequences that a worker steps in the mean where it keeps the target, and what bounds them; infinite: nothing."""
    seen = load.decode
    widest = (auto.tpot - seen.fixed) / seen.per_token if seen.per_token else math.inf
    bound = f"{widest:.0f} fit a step of {auto.tpot:g} s" if math.isfinite(widest) else "any number fits a step"
    if widest < 1:
        widest = max(1.0, seen.sequences / max(1, seen.workers))
        bound = f"a step takes longer than {auto.tpot:g} s, whatever their number"
    room = seen.capacity / seen.context if seen.context else math.inf
    if room < widest:
        widest, bound = max(1.0, room), f"{room:.0f} of {seen.context:,.0f} tokens fit a pool"
    if seen.most < widest:
        widest, bound = seen.most, f"{seen.most:.0f} are stepped side by side at most"
    if math.isinf(widest):
        return widest, bound
    return max(1.0, mean_within(math.floor(widest), auto.percentile)), bound
