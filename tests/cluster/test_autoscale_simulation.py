"""The planner, judged where time is cheap: in the simulator, on the shipped traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from cluster.autoscale.planner import Grow, Leave, Switch
from cluster.bench.traces.registry import make_trace
from cluster.bench.traces.request import TraceRequest
from cluster.scale_section import AutoSection, RoleBounds
from cluster.simulation.elasticity import Elasticity
from cluster.simulation.figures import Figures
from cluster.simulation.profile import PROFILES
from cluster.simulation.scenario import Scenario
from cluster.simulation.simulation import Simulation
from router.slo.classes import SLOClass, SLOConfig

PROFILE = PROFILES["smollm2-cpu"]
AUTO = AutoSection(
    enabled=True,
    ttft=PROFILE.ttft,
    tpot=PROFILE.tpot,
    prefill=RoleBounds(min=1, max=8),
    decode=RoleBounds(min=1, max=8),
    down_after=100.0,
    cooldown=20.0,
)
"""Patience is short, so that a run is."""


def phases(kind: str, *rates: tuple[float, float]) -> list[TraceRequest]:
    """A trace of a kind whose rate changes: requests a second, and for how many seconds."""

    def parts() -> Iterator[TraceRequest]:
        begun = 0.0
        for seed, (rate, seconds) in enumerate(rates):
            for request in make_trace(kind, requests=max(1, int(rate * seconds)), rate=rate, seed=seed):
                if request.at <= seconds:
                    yield dataclasses.replace(request, at=begun + request.at, session=1000 * seed + request.session)
            begun += seconds

    return list(parts())


def run(
    trace: list[TraceRequest], auto: AutoSection | None = AUTO, *, prefill: int = 1, decode: int = 1
) -> tuple[Simulation, Figures]:
    scenario = Scenario(
        profile=PROFILE,
        prefill=prefill,
        decode=decode,
        ttft=PROFILE.ttft,
        tpot=PROFILE.tpot,
        elasticity=None if auto is None else Elasticity(auto=auto, startup=10.0),
    )
    simulation = Simulation(scenario, trace, len(trace))
    return simulation, simulation.run()


@pytest.mark.parametrize("kind", ["bursts", "multi-turn", "no-reuse"])
def test_it_follows_a_burst_and_lets_go_of_what_it_took(kind: str) -> None:
    rate = 2.0 if kind == "no-reuse" else 5.0
    trace = phases(kind, (0.2, 30.0), (rate, 90.0), (0.2, 300.0))
    simulation, found = run(trace)
    fleet = simulation.fleet
    assert fleet is not None
    assert (found.finished, found.failed, found.retries) == (len(trace), 0, 0), "who leaves has finished before"
    assert max(fleet.most.values()) >= 2, "it has followed"
    assert sum(fleet.counts().values()) <= 3, "and gone back"
    _, small = run(trace, None)
    assert found.good > small.good
    assert sum(fleet.seconds.values()) < 0.75 * sum(fleet.most.values()) * found.simulated


def test_it_sees_what_admission_holds_back_and_refuses() -> None:
    """Workers that are sent only what they can begin with have no queue of their own to tell of."""
    fast = PROFILES["h100-llama8b"]
    slo = SLOConfig(classes=(SLOClass(ttft=fast.ttft, tpot=fast.tpot),))
    bounds = RoleBounds(min=1, max=4)
    auto = msgspec.structs.replace(AUTO, ttft=fast.ttft, tpot=fast.tpot, prefill=bounds, decode=bounds, interval=1.0)
    auto = msgspec.structs.replace(auto, window=5.0)
    trace = list(make_trace("no-reuse", requests=2500, rate=90.0))
    found = {}
    for elasticity in (None, Elasticity(auto=auto, startup=2.0)):
        scene = Scenario(
            profile=fast, prefill=1, decode=1, ttft=fast.ttft, tpot=fast.tpot, slo=slo, elasticity=elasticity
        )
        simulation = Simulation(scene, trace, len(trace))
        found[elasticity is not None] = simulation.run()
    assert simulation.fleet is not None
    reasons = [action.why for step in simulation.fleet.steps for action in step.plan.actions]
    assert any("refused" in why for why in reasons), reasons
    assert sum(simulation.fleet.most.values()) > 2
    assert found[True].refused < 0.6 * found[False].refused
    assert found[True].good > 1.3 * found[False].good


def test_it_does_not_flap_on_a_steady_load() -> None:
    simulation, _ = run(phases("multi-turn", (2.5, 300.0)))
    fleet = simulation.fleet
    assert fleet is not None
    ways: dict[str, list[int]] = {"prefill": [], "decode": []}
    for step in fleet.steps:
        for action in step.plan.actions:
            if isinstance(action, Grow):
                ways[action.role].append(1)
            if isinstance(action, Leave):
                ways[action.role].append(-1)
            if isinstance(action, Switch):
                ways[action.role].append(1)
                ways["decode" if action.role == "prefill" else "prefill"].append(-1)
    for role, way in ways.items():
        turns = sum(before != after for before, after in pairwise(way))
        assert turns <= 1, (role, way)


def test_it_stays_within_its_limits_and_changes_roles_before_it_takes_machines() -> None:
    bounds = RoleBounds(min=1, max=5)
    auto = msgspec.structs.replace(AUTO, prefill=bounds, decode=bounds, max_workers=4)
    long_answers = phases("sharegpt", (1.5, 90.0))
    long_prompts = phases("no-reuse", (2.0, 90.0))
    trace = long_answers + [
        dataclasses.replace(each, at=130.0 + each.at, session=10**6 + each.session) for each in long_prompts
    ]
    simulation, found = run(trace, auto)
    fleet = simulation.fleet
    assert fleet is not None
    assert (found.failed, found.retries) == (0, 0)
    for step in fleet.steps:
        assert sum(step.plan.workers.values()) <= 4
        kinds = [type(action) for action in step.plan.actions if isinstance(action, Grow | Switch)]
        assert kinds == sorted(kinds, key=lambda kind: kind is Grow), "first who is there already"
    switched = [each for step in fleet.steps for each in step.plan.actions if isinstance(each, Switch)]
    assert [each.role for each in switched if each.role == "prefill"], "decode's workers computed prompts in the end"
