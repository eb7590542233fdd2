"""Admission on a simulated cluster: what overload costs those who are let in, and whom a heavy tenant hurts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.registry import stream_trace
from cluster.cli import app
from cluster.simulation.figures import Figures, SimulationReport
from cluster.simulation.profile import PROFILES
from cluster.simulation.scenario import Failure, Scenario, parse_loads
from cluster.simulation.simulation import simulate
from cluster.simulation.tenants import Tenants, parse_tenants
from protocol.errors import ConfigError
from router.slo.classes import SLOClass, SLOConfig

FAST = PROFILES["h100-llama8b"]
ADMITTING = SLOConfig(classes=(SLOClass(ttft=FAST.ttft, tpot=FAST.tpot),))


def at(rate: float, slo: SLOConfig = ADMITTING, count: int = 500, **more: object) -> Figures:
    """A prefill and a decode worker, which have work for some 35 such requests a second."""
    scene = Scenario(profile=FAST, prefill=1, decode=1, ttft=FAST.ttft, tpot=FAST.tpot, slo=slo, **more)  # type: ignore[arg-type]
    return simulate(scene, stream_trace(TraceOptions(name="no-reuse", requests=count, rate=rate)), count)


def test_overload_costs_neither_goodput_nor_those_who_are_let_in_nor_a_light_tenant() -> None:
    peak = max((at(rate) for rate in (28.0, 35.0)), key=lambda each: each.goodput)
    over = at(1.5 * peak.rate, tenants={"heavy": 9.0, "light": 1.0})
    assert over.goodput >= 0.9 * peak.goodput
    assert over.refused > 0.1 * over.requests
    assert over.ttft.most <= 2.0 * FAST.ttft
    heavy, light = over.tenants
    assert (heavy.tenant, light.tenant) == ("heavy", "light")
    assert heavy.requests + light.requests == over.requests
    assert light.refused / light.requests < 0.5 * heavy.refused / heavy.requests
    assert light.good > 0.8, "but for prompts that take longer than that by themselves"
    assert heavy.served + light.served == pytest.approx(1.0)
    assert over.goodput > 1.5 * at(1.5 * peak.rate, SLOConfig()).goodput, "without it most come too late"


def test_what_is_let_in_outlives_a_worker_and_the_queue_goes_on() -> None:
    failures = (Failure(1.0, "prefill-0", 1.0), Failure(3.0, "decode-0", 1.0))
    found = at(20.0, count=100, failures=failures)
    assert found.finished + found.refused + found.failed == 100
    assert found.finished > 30
    assert found.retries > 0


def test_conversations_are_dealt_out_by_their_parts() -> None:
    tenants = Tenants(parse_tenants("heavy=9, light=1"), seed=3)
    dealt = [tenants.of(session) for session in range(2000)]
    assert dealt == [Tenants({"heavy": 9.0, "light": 1.0}, seed=3).of(session) for session in range(2000)]
    assert dealt.count("light") == pytest.approx(200, rel=0.2)
    assert Tenants({}, seed=3).of(5) == ""
    for text in ("heavy", "heavy=0", "a=1,a=2", "a b=1", "a=-1"):
        with pytest.raises(ConfigError, match="tenants") as caught:
            parse_tenants(text)
        assert caught.value.field == "tenants"


def test_the_command_runs_each_load_and_tells_of_each_tenant(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ["--requests", "80", "--policy", "cost", "--workers", "1P1D", "--load", "0.5,1.5", "--trace", "no-reuse"]
    run = CliRunner().invoke(
        app, ["simulate", *options, "--admission", "--tenants", "heavy=3,light=1", "--json", str(file)]
    )
    assert run.exit_code == 0, run.output
    assert "light" in run.output
    report = msgspec.json.decode(file.read_bytes(), type=SimulationReport)
    half, over = report.figures
    assert over.rate > 2.5 * half.rate
    assert (report.admission, [each.tenant for each in over.tenants]) == (True, ["heavy", "light"])
    with pytest.raises(ConfigError, match="load must be"):
        parse_loads("0.5,fast")
