"""What the autoscaler would do to a cluster, watched from a command and never done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.autoscale.autoscaler import exchangeable
from cluster.autoscale.figures import RouterFigures
from cluster.autoscale.observer import Observer
from cluster.autoscale.planner import ROLES, Plan, Planner, Staying
from cluster.autoscale.router_view import RouterView
from cluster.config import ClusterConfig
from protocol.errors import ClusterError

if TYPE_CHECKING:
    from cluster.operations import Operator
    from cluster.supervisor import SupervisorReport

CALL_SECONDS = 10.0


def rehearse(asked: Operator, ray: Any, config: ClusterConfig, seconds: float, told: Callable[[Plan], None]) -> None:
    """Decide again and again for so long, and tell of each decision.

    Nothing is done, so the same is decided again as long as the load asks for it; a worker would leave only once the
    cluster was watched for ``scale.auto.down_after``.

    Args:
        asked: of the cluster.
        ray: connected to it.
        config: with the section to go by.
        seconds: to watch.
        told: of each decision.

    Raises:
        ClusterError: the router or the supervisor does not answer.
    """
    auto = config.scale.auto
    planner, observer = Planner(auto, exchangeable=exchangeable(config)), Observer(auto.window, auto.cooldown)
    end = time.monotonic() + seconds
    while True:
        report = asked.report()
        figures = _figures(ray, _router(report), config)
        now = time.monotonic()
        seen = observer.take(figures, now)
        if seen is not None:
            told(planner.plan(_staying(report, figures), seen, now))
        if now + auto.interval > end and seen is not None:
            return
        time.sleep(auto.interval)


def _router(report: SupervisorReport) -> str:
    """The one that began last of those that serve."""
    serving = [member for member in report.members if member.role == "router" and member.state == "ready"]
    if not serving:
        raise ClusterError("there is no router that serves; see: kvferry status")
    return max(serving, key=lambda member: member.incarnation).name


def _figures(ray: Any, router: str, config: ClusterConfig) -> RouterFigures:
    try:
        answer = ray.get(ray.get_actor(router).view.remote(), timeout=CALL_SECONDS)
    except (ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(f"{router} does not answer: {error}") from error
    return msgspec.json.decode(answer, type=RouterView).figures(config.scale.auto)


def _staying(report: SupervisorReport, figures: RouterFigures) -> list[Staying]:
    work = {worker.name: worker.work for worker in figures.workers}
    return [
        Staying(member.name, role, member.state == "ready", work.get(member.name, 0.0))
        for role in ROLES
        for member in report.members
        if member.role == role and member.state != "draining"
    ]
