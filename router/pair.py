"""The pair of a prefill and a decode worker that costs least, where costs are seconds and candidates few."""

from __future__ import annotations

from collections.abc import Sequence


def cheapest(
    here: Sequence[float],
    there: Sequence[float],
    late: Sequence[Sequence[float]] | None,
    tolerance: float,
    turn: int,
) -> tuple[int, int]:
    """Places in ``here`` and ``there`` of the cheapest pair; among equals, the turn decides.

    Args:
        here: cost of each prefill worker.
        there: cost of each decode worker.
        late: what each pair costs more, by the decode worker and then by the prefill worker; None where none does.
        tolerance: share of the less of the two least costs by which an equal may cost more.
        turn: grows by one for each placement.
    """
    least_here, least_there = min(here), min(there)
    slack = tolerance * min(least_here, least_there)
    if late is None:
        return _sums(here, there, least_there + least_here + slack, turn)
    costs = [
        part + cost + more
        for part, beside in zip(there, late, strict=True)
        for cost, more in zip(here, beside, strict=True)
    ]
    bound = min(costs) + slack
    near = [place for place, cost in enumerate(costs) if cost <= bound]
    second, first = divmod(near[turn % len(near)], len(here))
    return first, second


def _sums(here: Sequence[float], there: Sequence[float], bound: float, turn: int) -> tuple[int, int]:
    """Where a pair costs what both do, among those up to a bound."""
    least_here, least_there = min(here), min(there)
    # Sums only grow by what is added to them: who is too dear with the best partner there is no equal of the least.
    left = [place for place, cost in enumerate(here) if least_there + cost <= bound]
    right = [place for place, cost in enumerate(there) if cost + least_here <= bound]
    if len(left) == len(right) == 1:
        return left[0], right[0]
    if max([there[place] for place in right]) + max([here[place] for place in left]) <= bound:
        second, first = divmod(turn % (len(left) * len(right)), len(left))
        return left[first], right[second]
    near = [(first, second) for second in right for first in left if there[second] + here[first] <= bound]
    return near[turn % len(near)]
