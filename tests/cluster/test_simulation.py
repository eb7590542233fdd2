from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.bench.traces.registry import make_trace
from cluster.bench.traces.request import TraceRequest, blocks_for
from cluster.cli import app
from cluster.simulation.block_cache import keys_apart
from cluster.simulation.figures import Figures, SimulationReport
from cluster.simulation.link import Link
from cluster.simulation.profile import PROFILES, EngineProfile, profile_of
from cluster.simulation.prompt import Prompts
from cluster.simulation.scenario import (
    Failure,
    Scenario,
    parse_failures,
    parse_local_prefill,
    parse_policies,
    parse_slo,
    parse_workers,
)
from cluster.simulation.simulation import Simulation, simulate
from protocol.errors import ConfigError

FAST = PROFILES["h100-llama8b"]


def scenario(**changed: object) -> Scenario:
    given = {"profile": FAST, "prefill": 2, "decode": 2, "ttft": 1.0, "tpot": 0.05, **changed}
    return Scenario(**given)  # type: ignore[arg-type]


def turns(requests: int, rate: float = 40.0, seed: int = 0) -> list[TraceRequest]:
    return make_trace("multi-turn", requests=requests, rate=rate, seed=seed)


def told(figures: Figures) -> Figures:
    return msgspec.structs.replace(figures, cpu_seconds=0.0)


def alone(prompt: int, output: int, at: float = 0.0, first: int = 0, session: int = 0) -> TraceRequest:
    blocks = tuple(range(first, first + blocks_for(prompt)))
    return TraceRequest(at=at, blocks=blocks, prompt_tokens=prompt, output_tokens=output, session=session)


def test_the_same_seed_gives_the_same_run() -> None:
    trace = turns(200)
    first, again = (told(simulate(scenario(), trace, 200)) for _ in range(2))
    assert first == again
    assert first.finished == first.requests == 200
    assert told(simulate(scenario(seed=1), trace, 200)) != first


def test_a_request_alone_takes_what_its_steps_and_messages_take() -> None:
    scene, prompt, output = scenario(prefill=1, decode=1, latency=1e-3), 1000, 20
    found = simulate(scene, [alone(prompt, output)], 1)
    step = FAST.prefill_seconds(prompt, 0.5 * prompt * prompt)
    assert found.ttft.mean == pytest.approx(step + 2e-3, rel=1e-6)
    steps = [
        FAST.decode_fixed + FAST.decode_per_sequence + FAST.decode_per_context * (prompt + 1 + done)
        for done in range(output - 1)
    ]
    shipped = prompt * FAST.token_bytes / scene.link
    last = prompt * FAST.token_bytes / FAST.layout.num_layers / scene.link
    # Decode's room was there from the beginning, so blocks went while they were computed.
    landed = step + max(shipped - step + 1e-3, last) + 1e-3
    assert found.e2e.mean == pytest.approx(1e-3 + landed + sum(steps) + 1e-3, rel=1e-3)


def test_a_later_turn_finds_what_was_asked_and_what_was_answered() -> None:
    first = alone(320, 160, session=7)
    blocks = (*first.blocks, *range(900, 900 + blocks_for(560) - len(first.blocks)))
    second = TraceRequest(at=20.0, blocks=blocks, prompt_tokens=560, output_tokens=16, session=7)
    run = Simulation(scenario(prefill=1, decode=1), [first, second], 2)
    found = run.run()
    assert found.cached == pytest.approx(320 / (320 + 560))
    prompts = Prompts(16)
    asked, later = prompts.of(first), prompts.of(second)
    assert later.blocks[: len(asked.blocks)] == asked.blocks


def test_prompts_share_keys_as_far_as_they_are_equal() -> None:
    prompts = Prompts(16)
    one, other = (prompts.of(alone(64, 1, first=first, session=first)) for first in (0, 100))
    assert not {*keys_apart(one.blocks)} & {*keys_apart(other.blocks)}
    request = TraceRequest(at=0.0, blocks=(0, 1, 9, 3), prompt_tokens=64, output_tokens=1, session=5)
    both = zip(keys_apart(one.blocks), keys_apart(prompts.of(request).blocks), strict=True)
    assert [a == b for a, b in both] == [True, True, False, False]
    (keys,) = one.keys(16)
    assert len(keys) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_outlive_a_worker_that_dies(role: str) -> None:
    failures = (Failure(1.0, f"{role}-0", 1.0),)
    found = simulate(scenario(failures=failures), turns(200), 200)
    assert found.finished == 200
    assert found.retries > 0


def test_without_a_worker_of_a_role_new_requests_fail() -> None:
    failures = tuple(Failure(1.0, f"prefill-{number}") for number in range(2))
    found = simulate(scenario(failures=failures, local_prefill="never"), turns(200), 200)
    assert found.failed > 0
    assert found.finished + found.failed == 200


def test_without_prefill_workers_decode_workers_compute_prompts() -> None:
    failures = tuple(Failure(1.0, f"prefill-{number}") for number in range(2))
    found = simulate(scenario(failures=failures), turns(200), 200)
    assert found.finished == 200
    assert 0.0 < found.local < 1.0


def test_a_prompt_computed_on_decode_takes_shares_of_its_steps() -> None:
    scene, prompt, output = scenario(prefill=1, decode=1, latency=1e-3, local_prefill="always"), 1000, 20
    found = simulate(scene, [alone(prompt, output)], 1)
    shares = (512, 488)
    pairs = [512 * 256.0, 488 * (512 + 244.0)]
    steps = [FAST.prefill_seconds(tokens, pair) for tokens, pair in zip(shares, pairs, strict=True)]
    assert found.ttft.mean == pytest.approx(sum(steps) + 2e-3, rel=1e-6)
    further = [
        FAST.decode_fixed + FAST.decode_per_sequence + FAST.decode_per_context * (prompt + 1 + done)
        for done in range(output - 1)
    ]
    assert found.e2e.mean == pytest.approx(sum(steps) + sum(further) + 2e-3, rel=1e-6)
    assert found.local == 1.0


def test_who_decodes_waits_for_the_shares_of_a_prompt_beside_it() -> None:
    trace = [alone(16, 400), alone(4096, 1, at=0.5, first=1000, session=1)]
    apart, mixed = (
        simulate(scenario(prefill=1, decode=1, local_prefill=mode), trace, 2) for mode in ("never", "always")
    )
    longer = FAST.prefill_per_token * 4096 + FAST.prefill_per_pair * 4096 * 2048
    assert mixed.tpot.mean - apart.tpot.mean == pytest.approx(longer / 399, rel=0.02)


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_prompts_on_decode_outlive_a_worker_that_dies(mode: str) -> None:
    failures = (Failure(1.0, "decode-0", 1.0), Failure(2.5, "prefill-0", 1.0))
    found = simulate(scenario(failures=failures, local_prefill=mode), turns(200), 200)
    assert found.finished == 200
    assert found.local > 0.0


@pytest.mark.parametrize(
    ("prompt", "output", "gbps", "rate"),
    [
        (64, 128, 100.0, 15.0),
        (2048, 16, 100.0, 8.0),
        (2048, 256, 100.0, 6.0),
        # Half of what both roles could do. By a link so slow hundreds would have gone before any had come.
        (64, 16, 1.0, 470.0),
        (512, 16, 1.0, 52.0),
        # Steps that computed a part of a prompt, as well, once made decode workers look fast.
        (8192, 128, 100.0, 3.3),
    ],
)
def test_auto_is_hardly_worse_than_the_better_way(prompt: int, output: int, gbps: float, rate: float) -> None:
    """Apart where that pays, on the decode worker where it does not: mean time of a whole request."""
    count = 75 if prompt > 2048 else 150
    trace = make_trace("poisson", requests=count, rate=rate, seed=0, prompt_tokens=prompt, output_tokens=output)
    apart, alone, chosen = (
        simulate(scenario(link=gbps * 1e9 / 8, local_prefill=mode), trace, count).e2e.mean
        for mode in ("never", "always", "auto")
    )
    assert chosen <= 1.05 * min(apart, alone)


def test_a_target_that_cannot_be_met_is_refused_and_what_is_let_in_meets_it() -> None:
    trace = make_trace("no-reuse", requests=400, rate=400.0, seed=0)
    free = simulate(scenario(prefill=1, decode=3), trace, 400)
    bound = simulate(scenario(prefill=1, decode=3, ttft_target=0.5), trace, 400)
    assert free.refused == 0
    assert bound.refused > 0
    assert bound.ttft.p99 < 1.0 < free.ttft.p99


def test_the_index_of_each_router_is_what_the_workers_have() -> None:
    run = Simulation(scenario(routers=2), turns(150), 150)
    run.run()
    run.settle(2.0)
    for router in run.routers:
        index = router.placer.index
        held = [{*keys_apart(worker.cached_keys())} for worker in run.workers]
        assert index.holdings == sum(map(len, held))
        assert index.blocks == len(set().union(*held))


def test_what_no_pool_has_room_for_is_refused() -> None:
    small = msgspec.structs.replace(FAST, num_blocks=8)
    found = simulate(scenario(profile=small), [alone(200, 1), alone(64, 8, at=0.1)], 2)
    assert (found.refused, found.finished) == (1, 1)


def test_where_prompts_come_again_cost_is_far_ahead_of_policies_that_know_less_and_even() -> None:
    """64 workers, conversations of several turns."""
    requests = 1400
    scene, trace = scenario(profile=PROFILES["smollm2-cpu"], prefill=32, decode=32), turns(requests, rate=25.0)
    cost, turn, prefix = (
        simulate(replace(scene, policy=policy), trace, requests) for policy in ("cost", "round_robin", "prefix_aware")
    )
    assert cost.ttft.mean <= 0.5 * turn.ttft.mean
    assert cost.ttft.mean <= 0.9 * prefix.ttft.mean
    # Some forty requests each: a few are more by chance.
    assert cost.prefill_load < 1.75 < prefix.prefill_load
    assert cost.decode_load < 1.25


def test_where_nothing_comes_again_cost_does_not_lose() -> None:
    trace = make_trace("no-reuse", requests=600, rate=170.0, seed=0)
    scene = scenario(prefill=8, decode=8)
    cost, *others = (
        simulate(replace(scene, policy=policy), trace, 600)
        for policy in ("cost", "least_loaded", "prefix_aware", "power_of_two")
    )
    assert cost.ttft.mean <= 1.02 * min(other.ttft.mean for other in others)
    assert cost.good >= 0.998 * max(other.good for other in others)
    assert max(cost.prefill_load, cost.decode_load) < 1.25


def test_a_link_carries_one_after_the_other() -> None:
    here, there, other = Link(100.0), Link(50.0), Link(100.0)
    assert here.carry(there, 100, 1.0) == 3.0
    assert here.carry(other, 100, 0.0) == 4.0
    assert there.carry(other, 50, 9.0) == 10.0


def test_every_profile_is_a_machine_that_could_be() -> None:
    for name, profile in PROFILES.items():
        assert 0 < profile.prefill_seconds(512, 512 * 256) < 1.0, name
        assert profile.num_blocks > 1000, name


def test_a_profile_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(FAST))
    assert profile_of(str(file)) == FAST
    file.write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        profile_of(str(file))
    with pytest.raises(ConfigError, match="neither a file nor one of: smollm2-cpu"):
        profile_of("b200")


def test_what_is_asked_for_is_read_or_refused_by_name() -> None:
    assert parse_workers("32P8d") == (32, 8)
    assert parse_policies("cost, round-robin") == ("cost", "round_robin")
    assert parse_failures("decode-3@20+10,prefill-0@1.5") == (
        Failure(20.0, "decode-3", 10.0),
        Failure(1.5, "prefill-0"),
    )
    assert parse_slo("tpot=0.1", FAST) == (FAST.ttft, 0.1)
    bad: Iterator[tuple[object, str, str]] = iter(
        [
            (parse_workers, "32", "workers"),
            (parse_policies, "best", "policy"),
            (parse_failures, "decode-3", "failures"),
            (lambda text: parse_slo(text, FAST), "itl=1", "slo"),
            (parse_local_prefill, "short", "local_prefill"),
        ]
    )
    for parse, text, field in bad:
        with pytest.raises(ConfigError, match=text) as error:
            parse(text)  # type: ignore[operator]
        assert error.value.field == field
    with pytest.raises(ConfigError, match="no worker 'decode-9'"):
        scenario(failures=(Failure(1.0, "decode-9"),))
    with pytest.raises(ConfigError, match="prefill workers must lie in"):
        scenario(prefill=0)


def test_the_command_prints_a_row_for_each_policy_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    run = CliRunner().invoke(
        app, ["simulate", "--requests", "60", "--policy", "cost,least-loaded", "--workers", "2P2D", "--json", str(file)]
    )
    assert run.exit_code == 0, run.output
    assert "least_loaded" in run.output
    report = msgspec.json.decode(file.read_bytes(), type=SimulationReport)
    assert [each.policy for each in report.figures] == ["cost", "least_loaded"]
    assert all(each.finished == 60 for each in report.figures)
    curve = report.figures[0].ttft.curve
    assert all(a <= b for a, b in pairwise(curve))
    assert np.isclose(curve[50], report.figures[0].ttft.p50)


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_the_command_draws_its_figures(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"found{suffix}"
    run = CliRunner().invoke(
        app, ["simulate", "--requests", "30", "--policy", "cost,random", "--workers", "1P1D", "--plot", str(file)]
    )
    assert run.exit_code == 0, run.output
    content = file.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"<svg" in content
        assert b"time to the first token" in content
        assert b"multi-turn" in content


def test_a_profile_knows_the_bytes_of_a_token() -> None:
    assert isinstance(FAST, EngineProfile)
    assert FAST.token_bytes == 2 * 32 * 8 * 128 * 2
