"""Ray's hands for :mod:`cluster.autoscale.planner`: asks the router, and has done what the planner says.

Life cycle: made by the supervisor's thread, which calls :meth:`Autoscaler.turn` again and again. While the cluster's
file does not want it, it does nothing. A supervisor that Ray has restarted makes a new one, which has seen nothing yet,
and so lets nobody go before it has seen enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.autoscale.figures import RouterFigures
from cluster.autoscale.observer import Observer
from cluster.autoscale.planner import Action, Grow, Leave, Plan, Planner, Provide, Staying, Switch
from cluster.autoscale.report import AutoscaleReport, Change, roles_of, spelled
from cluster.autoscale.router_view import RouterView
from cluster.config import ClusterConfig
from cluster.scale_section import AutoSection
from cluster.supervision import Supervision
from protocol.errors import KVFerryError
from protocol.ids import Role

KEPT = 20
"""Changes that are told of."""


class Autoscaler:
    """See the module.

    Args:
        ray: connected to the cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._auto: AutoSection | None = None
        self._planner: Planner | None = None
        self._observer: Observer | None = None
        self._asked: Any = None
        self._due = 0.0
        self._plan: Plan | None = None
        self._changes: deque[tuple[float, Change]] = deque(maxlen=KEPT)
        self._error = ""

    def turn(self, supervision: Supervision, now: float) -> None:
        """Ask, or hear, or do; never waits."""
        config = supervision.record.config
        auto = config.scale.auto
        if auto != self._auto:
            self._begin(config)
        if not auto.enabled:
            return
        if self._asked is None and now >= self._due:
            self._due = now + auto.interval
            self._ask(supervision)
        if self._asked is None or not self._ray.wait([self._asked], timeout=0)[0]:
            return
        call, self._asked = self._asked, None
        try:
            figures = msgspec.json.decode(self._ray.get(call), type=RouterView).figures(auto)
        except (self._ray.exceptions.RayError, msgspec.MsgspecError, ValueError) as error:
            self._error = str(error).splitlines()[0]
            return
        self._error = ""
        assert self._observer is not None, "made with the section"
        assert self._planner is not None, "made with the section"
        seen = self._observer.take(figures, now)
        if seen is None:
            return
        self._plan = self._planner.plan(_staying(supervision, figures), seen, now)
        for action in self._plan.actions:
            self._carry_out(action, supervision, now)

    def report(self, config: ClusterConfig, now: float) -> AutoscaleReport:
        """How it is."""
        return AutoscaleReport(
            auto=config.scale.auto,
            roles={} if self._plan is None else roles_of(self._plan),
            held="" if self._plan is None else self._plan.held,
            changes=tuple(msgspec.structs.replace(change, seconds_ago=now - at) for at, change in self._changes),
            error=self._error,
        )

    def _begin(self, config: ClusterConfig) -> None:
        before, self._auto = self._auto, config.scale.auto
        if before is not None and before.enabled and not self._auto.enabled:
            withdraw(config)
        self._planner = Planner(self._auto, exchangeable=exchangeable(config))
        self._observer = Observer(self._auto.window, self._auto.cooldown)
        self._plan, self._asked, self._due, self._error = None, None, 0.0, ""

    def _ask(self, supervision: Supervision) -> None:
        router = supervision.newest_router
        try:
            self._asked = None if router is None else self._ray.get_actor(router).view.remote()
        except ValueError:
            router = None
        if router is None:
            self._error = "there is no router"

    def _carry_out(self, action: Action, supervision: Supervision, now: float) -> None:
        config, error = supervision.record.config, ""
        limit = config.scale.drain_timeout
        try:
            match action:
                case Provide(prefill, decode, _):
                    if config.ray.address is None:
                        return  # the node is our own: there is nobody to ask
                    error = request(config, {"prefill": prefill, "decode": decode})
                case Switch(worker, role, _):
                    supervision.switch(worker, role, limit)
                case Grow(role, workers, _):
                    supervision.scale({role: workers})
                case Leave(worker, _, _):
                    supervision.drain(worker, limit)
        except KVFerryError as refused:
            error = refused.message
        self._changes.append((now, Change(what=spelled(action), why=action.why, error=error)))


def exchangeable(config: ClusterConfig) -> bool:
    """Whether what Ray sets aside for a worker of one role does for one of the other."""
    prefill, decode = config.prefill, config.decode
    return (prefill.cpus, prefill.gpus, prefill.resources) == (decode.cpus, decode.gpus, decode.resources)


def request(config: ClusterConfig, workers: Mapping[Role, int]) -> str:
    """Have Ray's autoscaler keep machines for so many workers, beside what they ask for themselves.

    So a node comes while its worker is not there yet, and is not given back while its worker is replaced. The calling
    process is connected to Ray. Gives why that could not be asked for, or "".
    """
    from ray.autoscaler.sdk import request_resources

    bundles: list[dict[str, float]] = []
    for role, count in workers.items():
        bundle = config.section(role).reserved
        bundles += [bundle] * count if bundle else []
    try:
        request_resources(bundles=bundles)
    except Exception as error:  # whatever Ray raises: what there is goes on without
        return f"{type(error).__name__}: {error}"
    return ""


def withdraw(config: ClusterConfig) -> None:
    """Let Ray's autoscaler have what machines the workers that there are ask for, and no others."""
    if config.ray.address is not None:
        request(config, {})


def _staying(supervision: Supervision, figures: RouterFigures) -> list[Staying]:
    work = {worker.name: worker.work for worker in figures.workers}
    return [
        Staying(member.record.name, member.record.role, member.serves, work.get(member.record.name, 0.0))
        for member in supervision.members
        if member.record.role != "router" and not member.record.leaving
    ]
