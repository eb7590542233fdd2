"""Turns what is counted into what happens: rates over the last seconds, and over more of them. Pure.

Life cycle: made empty, told of the router's figures now and then; the second time there is something to tell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscale.figures import RouterFigures, WorkerFigures
from protocol.ids import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """The workers of one role, together.

    Attributes:
        workers: that were heard of.
        busy: seconds in steps, a second.
        tokens: computed (prefill) or generated (decode), a second.
        growth: by which the tokens that wait grow, a second; below 0 where they become fewer.
        waiting_tokens: that were not computed yet at any look: what has come just now does not wait.
        sequences: that ran or waited, in the mean of all looks.
        fixed, per_token: seconds of a step, and of each token in it; 0 where nobody has measured any.
        capacity: tokens that a worker's pool holds, in the mean.
        context: tokens that a sequence holds of a pool, in the mean; 0 where there is none.
        uncached: share of the prompt tokens that no prefix cache had.
        most: sequences that a worker steps side by side at most; infinite where nobody tells.
    """

    workers: int = 0
    busy: float = 0.0
    tokens: float = 0.0
    growth: float = 0.0
    waiting_tokens: int = 0
    sequences: float = 0.0
    fixed: float = 0.0
    per_token: float = 0.0
    capacity: float = 0.0
    context: float = 0.0
    uncached: float = 1.0
    most: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What no worker was sent: it waits in the router, or went away with a refusal.

    Attributes:
        waiting, waiting_tokens: requests, and tokens of their prompts, that waited at any look.
        growth: by which these tokens grow, a second.
        refused, refused_tokens: a second.
    """

    waiting: int = 0
    waiting_tokens: int = 0
    growth: float = 0.0
    refused: float = 0.0
    refused_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What happened in the last seconds.

    Attributes:
        requests: first tokens a second.
        ttft_met, tpot_met: share of what came that was within its target; 1 where nothing came.
        prefill, decode: the workers of each role.
        turned: what did not come to them.
    """

    requests: float
    ttft_met: float
    tpot_met: float
    prefill: RoleLoad
    decode: RoleLoad
    turned: Turned = Turned()

    @property
    def refused_share(self) -> float:
        """Of all that came, what was refused."""
        return self.turned.refused / (self.requests + self.turned.refused) if self.turned.refused > 0 else 0.0

    def of(self, role: Role) -> RoleLoad:
        """The workers of ``role``."""
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Seen:
    """The same load over two times.

    Attributes:
        lately: over a few seconds: what more workers are wanted by.
        steadily: over more: what fewer are enough for, for a few seconds of little say nothing.
    """

    lately: Load
    steadily: Load


class Observer:
    """See the module.

    Args:
        lately, steadily: seconds that rates are taken over, where so much was seen.
    """

    def __init__(self, lately: float, steadily: float) -> None:
        self._lately, self._steadily = lately, max(lately, steadily)
        self._looks: deque[tuple[float, RouterFigures]] = deque()

    def take(self, figures: RouterFigures, now: float) -> Seen | None:
        """The load up to now; None the first time, and when the router has started again."""
        if self._looks and figures.firsts < self._looks[-1][1].firsts:
            self._looks.clear()
        self._looks.append((now, figures))
        while len(self._looks) > 2 and now - self._looks[1][0] >= self._steadily:
            self._looks.popleft()
        if now <= self._looks[0][0]:
            return None
        return Seen(self._over(self._lately), self._over(self._steadily))

    def _over(self, window: float) -> Load:
        now, figures = self._looks[-1]
        first = max((at for at, _ in self._looks if now - at >= window), default=self._looks[0][0])
        looks = [each for at, each in self._looks if at >= first]
        before, seconds = looks[0], now - first
        return Load(
            requests=(figures.firsts - before.firsts) / seconds,
            ttft_met=_share(figures.firsts_met - before.firsts_met, figures.firsts - before.firsts),
            tpot_met=_share(figures.answers_met - before.answers_met, figures.answers - before.answers),
            prefill=_role_load("prefill", looks, seconds),
            decode=_role_load("decode", looks, seconds),
            turned=_turned(looks, seconds),
        )


def _share(met: float, of: float) -> float:
    return met / of if of > 0 else 1.0


def _turned(looks: Sequence[RouterFigures], seconds: float) -> Turned:
    first, last = looks[0].unserved, looks[-1].unserved
    return Turned(
        waiting=min(look.unserved.waiting for look in looks),
        waiting_tokens=min(look.unserved.waiting_tokens for look in looks),
        growth=(last.waiting_tokens - first.waiting_tokens) / seconds,
        refused=(last.refused - first.refused) / seconds,
        refused_tokens=(last.refused_tokens - first.refused_tokens) / seconds,
    )


def _role_load(role: Role, looks: Sequence[RouterFigures], seconds: float) -> RoleLoad:
    before, figures = looks[0], looks[-1]
    workers = [worker for worker in figures.workers if worker.role == role]
    if not workers:
        return RoleLoad()
    earlier = {(worker.name, worker.incarnation): worker for worker in before.workers}
    counter = "prefill_tokens" if role == "prefill" else "decode_tokens"

    def gained(field: str) -> float:
        """By all of them; one that is new began at 0."""
        return sum(
            _counted(worker, field) - _counted(earlier.get((worker.name, worker.incarnation)), field)
            for worker in workers
        )

    paced = [worker.load for worker in workers if worker.load.step_fixed or worker.load.step_per_token]
    held = sum(worker.load.running + worker.load.open_imports for worker in workers)
    loads = [[worker.load for worker in look.workers if worker.role == role] for look in looks]
    waiting = [sum(load.waiting_tokens for load in look) for look in loads]
    computed, cached = gained("prefill_tokens"), gained("cached_tokens")
    told = [worker.max_sequences for worker in workers if worker.max_sequences]
    return RoleLoad(
        workers=len(workers),
        busy=gained("step_seconds") / seconds,
        tokens=gained(counter) / seconds,
        growth=(waiting[-1] - waiting[0]) / seconds,
        waiting_tokens=min(waiting),
        sequences=_mean([sum(load.running + load.waiting for load in look) for look in loads[1:]]),
        fixed=_mean([load.step_fixed for load in paced]),
        per_token=_mean([load.step_per_token for load in paced]),
        capacity=_mean(
            [worker.block_size * (worker.load.pool.total - worker.load.pool.reserved) for worker in workers]
        ),
        context=sum(worker.load.used_slots for worker in workers) / held if held else 0.0,
        uncached=computed / (computed + cached) if computed + cached > 0 else 1.0,
        most=_mean(told) if told else math.inf,
    )


def _counted(worker: WorkerFigures | None, field: str) -> float:
    return 0.0 if worker is None else float(getattr(worker.load, field))


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
