"""The pair of a prefill and a decode worker that costs least, where costs are seconds and candidates few.

A pair's cost is the sum of both, and the time by which the blocks cross for longer than prefill takes to compute them.
"""

from __future__ import annotations

from collections.abc import Sequence


def cheapest(
    here: Sequence[float],
    there: Sequence[float],
    compute: Sequence[float],
    transfer: Sequence[float],
    tolerance: float,
    turn: int,
) -> tuple[int, int]:
    """Places in ``here`` and ``there`` of the cheapest pair; among equals, the turn decides.

    Args:
        here: cost of each prefill worker.
        there: cost of each decode worker.
        compute: what of the prefill workers' hides a transfer.
        transfer: how long blocks take to the decode workers.
        tolerance: share of the less of the two least costs by which an equal may cost more.
        turn: grows by one for each placement.
    """
    least, hides = min(here), min(compute)
    slack = tolerance * min(least, min(there))
    if max(transfer) <= hides:
        return _hidden(here, there, min(there) + least + slack, turn)
    first, hides = here.index(least), max(compute)
    # Sums only grow by what is added to them: who is too dear with the best there could be is no equal of the least.
    known = compute[first]
    bound = slack + min(
        [part + least + (each - known if each > known else 0.0) for part, each in zip(there, transfer, strict=True)]
    )
    right = [
        place
        for place, (part, each) in enumerate(zip(there, transfer, strict=True))
        if part + least + (each - hides if each > hides else 0.0) <= bound
    ]
    part, each = min([there[place] for place in right]), min([transfer[place] for place in right])
    left = [
        place
        for place, (cost, hides) in enumerate(zip(here, compute, strict=True))
        if part + cost + (each - hides if each > hides else 0.0) <= bound
    ]
    found = []
    for second in right:
        part, each = there[second], transfer[second]
        for first in left:
            hides = compute[first]
            found.append((part + here[first] + (each - hides if each > hides else 0.0), first, second))
    bound = min(found)[0] + slack
    near = [pair for pair in found if pair[0] <= bound]
    _, first, second = near[turn % len(near)]
    return first, second


def _hidden(here: Sequence[float], there: Sequence[float], bound: float, turn: int) -> tuple[int, int]:
    """The same where every transfer is over before the prompt is computed, among the pairs up to a bound."""
    least_here, least_there = min(here), min(there)
    left = [place for place, cost in enumerate(here) if least_there + cost <= bound]
    right = [place for place, cost in enumerate(there) if cost + least_here <= bound]
    if max([there[place] for place in right]) + max([here[place] for place in left]) <= bound:
        second, first = divmod(turn % (len(left) * len(right)), len(left))
        return left[first], right[second]
    near = [(first, second) for second in right for first in left if there[second] + here[first] <= bound]
    return near[turn % len(near)]
