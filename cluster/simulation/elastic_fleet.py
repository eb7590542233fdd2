"""Workers that come, go and change their role by load: the real planner, and what the supervisor would do for it.

Life cycle of a worker here: starting, ready, and then leaving until it is gone, or switching until it is ready in its
other role. Whoever leaves or switches finishes what it has before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.autoscale.figures import RouterFigures, WorkerFigures
from cluster.autoscale.observer import Observer
from cluster.autoscale.planner import Action, Grow, Leave, Plan, Planner, Provide, Staying, Switch
from cluster.simulation.agenda import Agenda
from cluster.simulation.elasticity import Elasticity
from cluster.simulation.record import Records, Request
from cluster.simulation.simulated_worker import SimulatedWorker
from protocol.departure import QUIET
from protocol.ids import Role
from router.overview import Unserved

LOOK = 0.1
"""Seconds between two looks at whether a worker has finished."""


@dataclass(slots=True)
class _Place:
    """One name."""

    role: Role
    incarnation: int = 1
    ready: bool = True
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One decision that did something.

    Attributes:
        at: when.
        plan: the decision.
    """

    at: float
    plan: Plan


class ElasticFleet:
    """See the module.

    Args:
        elasticity: how.
        names: of the workers that there are from the beginning.
        agenda: of the run.
        records: of its requests.
        workers: the present life of each worker, by name.
        queue: gives the requests that wait in routers.
        start: begins a life: name, incarnation, role.
        stop: ends a life that has nothing to do any more.

    Attributes:
        steps: what was done, in order.
        seconds: that workers were there, or on their way, by role.
        most: how many of each role there were at once.
    """

    def __init__(
        self,
        elasticity: Elasticity,
        names: Iterable[str],
        agenda: Agenda,
        records: Records,
        workers: Mapping[str, SimulatedWorker],
        queue: Callable[[], Sequence[Request]],
        start: Callable[[str, int, Role], None],
        stop: Callable[[str], None],
    ) -> None:
        self._elasticity, self._auto = elasticity, elasticity.auto
        self._agenda, self._records, self._workers = agenda, records, workers
        self._queue, self._start, self._stop = queue, start, stop
        self._places = {name: _Place("prefill" if name.startswith("prefill") else "decode") for name in names}
        self._planner, self._observer = Planner(self._auto), Observer(self._auto.window, self._auto.cooldown)
        self._lives = 1
        self._counted = agenda.now
        self.steps: list[Step] = []
        self.seconds: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self.most: dict[Role, int] = {"prefill": 0, "decode": 0}

    def tick(self) -> None:
        """Look, decide and do, and again and again."""
        now = self._agenda.now
        self._count(now)
        seen = self._observer.take(self._figures(), now)
        if seen is not None:
            plan = self._planner.plan(self._staying(), seen, now)
            if any(not isinstance(action, Provide) for action in plan.actions):
                self.steps.append(Step(now, plan))
            for action in plan.actions:
                self._carry_out(action)
        self._agenda.after(self._auto.interval, self.tick)

    def counts(self) -> dict[Role, int]:
        """Workers that are there or on their way, those that leave included, by role."""
        found: dict[Role, int] = {"prefill": 0, "decode": 0}
        for place in self._places.values():
            found[place.role] += 1
        return found

    def _count(self, now: float) -> None:
        for role, count in self.counts().items():
            self.seconds[role] += count * (now - self._counted)
            self.most[role] = max(self.most[role], count)
        self._counted = now

    def _figures(self) -> RouterFigures:
        ttft, tpot = self._records.ttft, self._records.tpot
        waiting = self._queue()
        return RouterFigures(
            firsts=float(np.count_nonzero(~np.isnan(ttft))),
            firsts_met=float(np.count_nonzero(ttft <= self._auto.ttft)),
            answers=float(np.count_nonzero(~np.isnan(tpot))),
            answers_met=float(np.count_nonzero(tpot <= self._auto.tpot)),
            workers=tuple(self._told(name, worker) for name, worker in self._workers.items() if worker.alive),
            unserved=Unserved(
                waiting=len(waiting),
                waiting_tokens=sum(each.trace.prompt_tokens for each in waiting),
                refused=self._records.refused,
                refused_tokens=self._records.refused_tokens,
            ),
        )

    @staticmethod
    def _told(name: str, worker: SimulatedWorker) -> WorkerFigures:
        size = worker.layout.block_size
        return WorkerFigures(
            name=name,
            incarnation=worker.peer.incarnation,
            role=worker.role,
            block_size=size,
            max_sequences=worker.profile.max_sequences,
            load=worker.load(),
        )

    def _staying(self) -> list[Staying]:
        return [
            Staying(name, place.role, place.ready, self._work(name))
            for name, place in self._places.items()
            if not place.leaving
        ]

    def _work(self, name: str) -> float:
        worker = self._workers.get(name)
        return 0.0 if worker is None or not worker.alive else self._told(name, worker).work

    def _carry_out(self, action: Action) -> None:
        match action:
            case Provide():
                return  # the machine's part of a start is within its time
            case Grow(role, workers, _):
                there = sum(place.role == role and not place.leaving for place in self._places.values())
                for _ in range(workers - there):
                    self._come(role)
            case Leave(worker, _, _):
                place = self._places[worker]
                place.leaving, place.ready = True, False
                self._workers[worker].drain()
                self._agenda.after(LOOK, self._look, worker, self._agenda.now, self._gone)
            case Switch(worker, role, _):
                place = self._places[worker]
                place.role, place.ready = role, False
                self._workers[worker].drain()
                self._agenda.after(LOOK, self._look, worker, self._agenda.now, self._changed)

    def _come(self, role: Role) -> None:
        index = next(number for number in range(len(self._places) + 1) if f"{role}-{number}" not in self._places)
        name = f"{role}-{index}"
        self._lives += 1
        self._places[name] = _Place(role, self._lives, ready=False)
        self._agenda.after(self._elasticity.startup, self._begin, name)

    def _begin(self, name: str) -> None:
        place = self._places[name]
        self._start(name, place.incarnation, place.role)
        place.ready = True

    def _look(self, name: str, busy: float, then: Callable[[str], None]) -> None:
        now = self._agenda.now
        if not self._workers[name].idle:
            busy = now
        if now - busy < QUIET:
            self._agenda.after(LOOK, self._look, name, busy, then)
            return
        self._stop(name)
        then(name)

    def _gone(self, name: str) -> None:
        self._count(self._agenda.now)
        del self._places[name]

    def _changed(self, name: str) -> None:
        self._lives += 1
        self._places[name].incarnation = self._lives
        self._agenda.after(self._elasticity.change, self._begin, name)


def fleet_line(policy: str, fleet: ElasticFleet) -> str:
    """What became of the workers of a run, in a line."""
    hours = sum(fleet.seconds.values()) / 3600
    most = f"up to {fleet.most['prefill']} prefill and {fleet.most['decode']} decode workers"
    return f"{policy}: {most}, {hours:.3g} worker hours, {len(fleet.steps)} changes of their numbers"
