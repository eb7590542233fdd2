"""Waiting: how long who comes at random waits for one of several servers, and how many are there at once."""

from __future__ import annotations

import math
from statistics import NormalDist


def erlang_c(servers: int, load: float) -> float:
    """Chance that who comes has to wait (Erlang, 1917), for a load of rate times service time below ``servers``."""
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait(servers: int, rate: float, service: float, percentile: float) -> float:
    """Seconds that all but ``1 - percentile`` wait less than, in one queue before servers that take ``service`` each.

    Waits of who waits are exponential with random service times; with service times that are all alike they are half
    as long (Allen, 1990, after Cunneen). Infinite where more comes than they get through.
    """
    load = rate * service
    if load >= servers:
        return math.inf
    late = erlang_c(servers, load) / (1 - percentile)
    return 0.0 if late <= 1 else math.log(late) * service / (servers - load) / 2


def fewest(rate: float, service: float, limit: float, percentile: float, most: int) -> int:
    """The fewest servers that keep wait and service within ``limit``, which is no less than ``service``.

    More than ``most`` where that many will not do. Found by halving: waits fall with each more.
    """
    low = int(rate * service) + 1
    high = low
    while high <= most and service + wait(high, rate, service, percentile) > limit:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        if service + wait(middle, rate, service, percentile) <= limit:
            high = middle
        else:
            low = middle + 1
    return high


def crowded(mean: float, percentile: float) -> int:
    """What a Poisson number of that mean stays within for a share ``percentile`` of the time; at least 1."""
    return max(math.ceil(mean + NormalDist().inv_cdf(percentile) * math.sqrt(mean)), 1)


def mean_within(most: int, percentile: float) -> float:
    """The mean of a Poisson number that stays within ``most`` for a share ``percentile`` of the time."""
    deviations = NormalDist().inv_cdf(percentile)
    return ((math.sqrt(deviations**2 + 4 * most) - deviations) / 2) ** 2
