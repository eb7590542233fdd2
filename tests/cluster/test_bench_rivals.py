"""Rivals in a benchmark's rounds: their processes are real, their package is a stand-in where the real one is not."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rival_stand_in

from cluster.bench import perftest
from cluster.bench.case import TABLES, Case, Grid, Table
from cluster.bench.far_end import serve
from cluster.bench.near_end import Setup
from cluster.bench.report import Measured, Outcome
from cluster.bench.rivals.contest import MOVERS, RIVALS, Invitation, RivalState
from cluster.bench.rivals.process import PROGRAM, started
from cluster.bench.run import Effort, run
from kv_transfer.transport import TransportConfig
from protocol.errors import ConfigError, ConnectionFailed
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=64, block_size=16)
SETUP = Setup(LAYOUT, 256, TransportConfig(), seed=1)
EFFORT = Effort(seconds=0.01, time_limit=60.0)
PACKAGES = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}
PATIENCE = 120.0
Place = tuple[str, int]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    bound: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve("127.0.0.1", 0, max_pool=64 << 20, on_bound=lambda host, port: bound.set_result((host, port)), tied=False)
    )
    yield await bound
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of the processes that are started; what is installed there is found."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def cases(transport: str, *tables: Table, tokens: int = 128, concurrency: int = 1) -> list[Case]:
    grid = Grid(
        transports=(transport,),
        tokens=(tokens,),
        tables=tables or TABLES,
        ways=("whole",),
        concurrency=(concurrency,),
    )
    return grid.cases()


async def measured(wanted: list[Case], place: Place, *names: str) -> tuple[list[Measured], list[RivalState]]:
    outcomes: list[Outcome] = []
    states: list[RivalState] = []
    invitation = Invitation(names, sys.executable)
    await run(wanted, place, SETUP, EFFORT, lambda *_: None, outcomes.append, rivals=invitation, on_rival=states.append)
    found = [outcome.measured for outcome in outcomes]
    assert None not in found, outcomes
    return [one for one in found if one is not None], states


async def test_a_rival_moves_the_same_blocks_in_the_same_rounds(stand_in: Path, place: Place) -> None:
    rival_stand_in.install(stand_in)
    wanted = [*cases("tcp", concurrency=3), *cases("shm", "scattered")]
    found, states = await measured(wanted, place, "mooncake")
    for case, one in zip(wanted, found, strict=True):
        (figure,) = one.rivals
        assert figure.rival == "mooncake"
        assert figure.mode in ("READ", "WRITE")
        assert figure.latency.samples == one.rounds * case.concurrency
        assert figure.ratio > 0
        assert figure.ratio == one.ratio_to("mooncake")
    # It is started once for each transport.
    assert [(state.rival, state.reason) for state in states] == [("mooncake", "")] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("return 0", "READ moved other bytes than there were"),
        ("return 7", "RuntimeError: the transfer failed"),
        ("os._exit(3)", "its process ended"),
        ("raise OSError('no\\nroute')", "OSError: no\nroute"),
    ],
)
async def test_a_rival_that_fails_drops_out_and_spoils_no_case(
    fault: str, said: str, stand_in: Path, place: Place
) -> None:
    rival_stand_in.install(stand_in, fault=fault)
    found, (state, failure) = await measured(cases("tcp"), place, "mooncake")
    assert [one.rivals for one in found] == [(), ()]
    assert state.reason == ""
    assert failure.reason.startswith(said)


async def test_a_rival_that_fails_later_has_no_figure_for_that_case(stand_in: Path, place: Place) -> None:
    rival_stand_in.install(stand_in, fault="self.reads = getattr(self, 'reads', 0) + 1; assert self.reads < 11")
    found, states = await measured(cases("tcp"), place, "mooncake")
    assert [bool(one.rivals) for one in found] == [True, False]
    assert states[1].reason.startswith("AssertionError")


@pytest.mark.parametrize("rival", RIVALS)
async def test_a_rival_that_is_not_installed_is_one_line(rival: str, place: Place) -> None:
    if any(importlib.util.find_spec(name) for name in PACKAGES[rival]):
        pytest.skip(f"{rival} is installed")
    found, states = await measured(cases("tcp", "scattered", tokens=16), place, rival)
    assert found[0].rivals == ()
    assert [state.reason for state in states] == [f"{rival} is not installed for {sys.executable}"]


@pytest.mark.parametrize("rival", RIVALS)
async def test_the_real_rival(rival: str, place: Place) -> None:
    if not any(importlib.util.find_spec(name) for name in PACKAGES[rival]):
        pytest.skip(f"{rival} is not installed")
    found, states = await measured(cases("tcp", "scattered"), place, rival)
    assert [state.reason for state in states] == [""]
    assert found[0].ratio_to(rival)


async def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="vs_python must be an interpreter, got 'no-such-python'"):
        async with started("no-such-python", {}, MOVERS):
            pass


async def test_a_program_of_another_kind_is_no_rival() -> None:
    async with started(sys.executable, {"PYTHONWARNINGS": "ignore"}, MOVERS) as rival:
        with pytest.raises(ConnectionFailed, match="KeyError"):
            await rival.ask("start", rival="pigeon", blocks=1, block_bytes=1, seed=1, role="near")


def test_the_program_ends_with_its_standard_input_while_it_polls(stand_in: Path) -> None:
    rival_stand_in.install(stand_in)
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", str(PROGRAM), str(MOVERS)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        start = '{"do":"start","rival":"mooncake","blocks":2,"block_bytes":64,"seed":1,"role":"far"}'
        for order in (start, '{"do":"serve"}'):
            program.stdin.write(order + "\n")
            program.stdin.flush()
            assert "error" not in program.stdout.readline()
        program.stdin.close()
        assert program.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--vs", "pigeon"), "vs must be of nixl, mooncake, got 'pigeon'"),
        (("--vs", "nixl", "--connect", "127.0.0.1:9"), "--vs measures on one machine"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster", "bench", "transfer", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ucx
async def test_ucx_benchmarks_itself() -> None:
    program = perftest.find()
    if program is None:
        pytest.skip("ucx_perftest is not installed")
    found = perftest.Perftest(program, "tcp")
    assert await found.rate(perftest.Test("tag_bw", 64 << 10)) > 1e6
    with pytest.raises(ConnectionFailed, match="ucx_perftest"):
        await perftest.Perftest(perftest.Program(Path("/bin/false"), None), "tcp").best()


def test_the_rate_is_the_overall_one() -> None:
    line = "Final:      1000      0.308   289.772   289.772      215.69     64.00        3451        3451"
    assert perftest.parse_rate(f"head\n{line}\n") == 64 << 20
    with pytest.raises(ConnectionFailed, match="printed no rate"):
        perftest.parse_rate("+----+\n")
