"""``kvferry bench transfer`` without its options' spelling: checks first, then runs, then says what was found."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from cluster.bench import far_end, memory
from cluster.bench.case import Case, Grid, pool_blocks
from cluster.bench.limit import LIMITS
from cluster.bench.local_peer import LISTENING, local_peer
from cluster.bench.machine import this_machine
from cluster.bench.near_end import Setup
from cluster.bench.output import tell, write_json
from cluster.bench.picture import check_files
from cluster.bench.plot import write_plot
from cluster.bench.preset import layout_of
from cluster.bench.progress import CaseProgress
from cluster.bench.report import Outcome, Report, Settings, outcome_table, remarks, summary
from cluster.bench.rivals.contest import Invitation, OnRival, RivalState
from cluster.bench.run import NOBODY, Effort, OnCase, OnOutcome, run
from cluster.signals import run_until_terminated
from kv_transfer.transport import TransportConfig
from protocol.errors import ConfigError

TRANSPORT_TIMEOUT_SECONDS = 10.0
POOLS_HERE = 2
"""The sender's pool, and the one that the memory copy goes to."""
POOLS_PER_RIVAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure; the fields are the command's options.

    Attributes:
        peer: the far end's host and port; None makes one in a second process here.
        rivals: measured beside, all on this machine.
    """

    model: str
    block_size: int
    dtype: str
    grid: Grid
    streams: int | None
    seconds: float
    time_limit: float
    max_pool: int
    seed: int
    peer: tuple[str, int] | None
    json: Path | None
    plot: Path | None
    rivals: Invitation = NOBODY


def parse_place(text: str, *, field: str) -> tuple[str, int]:
    """Host and port; an IPv6 host stands in square brackets.

    Raises:
        ConfigError: the text is not of that form.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or "/" in text or "@" in text:
        raise ConfigError(f"{field} must be HOST:PORT, got {text!r}", field=field)
    return host, port


def be_far_end(host: str, port: int, *, max_pool: int, tied: bool) -> None:
    """Be the receiving side until interrupted; see :func:`cluster.bench.far_end.serve`."""

    def announce(bound: str, taken: int) -> None:
        shown = f"[{bound}]" if ":" in bound else bound
        print(f"{LISTENING} {shown}:{taken}", flush=True)

    run_until_terminated(far_end.serve(host, port, max_pool=max_pool, on_bound=announce, tied=tied))


def measure_transfers(options: Options, console: Console) -> bool:
    """Run all cases and print, write and draw what they gave; when interrupted, print what there is by then.

    Returns:
        Whether every case was either measured or skipped, and one was measured.

    Raises:
        ConfigError: an option cannot be; said before anything is started.
        ConnectionFailed: the far end does not answer.
    """
    if options.rivals.names and options.peer is not None:
        raise ConfigError("--vs measures on one machine, and --connect between two: give one of them", field="vs")
    layout = layout_of(options.model, block_size=options.block_size, dtype=options.dtype)
    cases = options.grid.cases()
    blocks = pool_blocks(cases, layout, limit=options.max_pool)
    pools = POOLS_HERE + (options.peer is None) + POOLS_PER_RIVAL * len(options.rivals.names)
    memory.check_room(layout.pool_bytes(blocks) * pools)
    check_files(options.json, options.plot)
    timeout = min(TRANSPORT_TIMEOUT_SECONDS, options.time_limit)
    config = TransportConfig(timeout=timeout)
    if options.streams is not None:
        config = TransportConfig(timeout=timeout, streams=options.streams)
    setup = Setup(layout, blocks, config, options.seed)
    outcomes: list[Outcome] = []
    states: list[RivalState] = []
    complete = False
    try:
        with CaseProgress(len(cases), Console(stderr=True)) as progress:

            def keep(outcome: Outcome) -> None:
                outcomes.append(outcome)
                progress.finish(outcome.case, None if outcome.state == "skipped" else summary(outcome))

            effort = Effort(options.seconds, options.time_limit)
            run_until_terminated(_run(options, cases, setup, effort, progress.show, keep, states.append))
        complete = True
    finally:
        if outcomes:
            report = _report(options, setup, tuple(outcomes), tuple(states), complete)
            _tell(report, console)
            if options.json is not None:
                write_json(report, options.json)
            if options.plot is not None:
                write_plot(report, options.plot)
    ends = {outcome.state for outcome in outcomes}
    return "failed" not in ends and "measured" in ends


async def _run(
    options: Options,
    cases: list[Case],
    setup: Setup,
    effort: Effort,
    on_case: OnCase,
    on_outcome: OnOutcome,
    on_rival: OnRival,
) -> None:
    async with AsyncExitStack() as stack:
        where = options.peer
        if where is None:
            where = await stack.enter_async_context(local_peer(options.max_pool))
        await run(cases, where, setup, effort, on_case, on_outcome, rivals=options.rivals, on_rival=on_rival)


def _report(
    options: Options, setup: Setup, outcomes: tuple[Outcome, ...], rivals: tuple[RivalState, ...], complete: bool
) -> Report:
    return Report(
        kvferry=version("kvferry"),
        machine=this_machine(),
        model=Path(options.model).name,
        layout=setup.layout,
        block_bytes=setup.layout.block_bytes,
        settings=Settings(
            seconds=options.seconds,
            time_limit=options.time_limit,
            streams=setup.config.streams,
            seed=options.seed,
            max_pool=options.max_pool,
            two_machines=options.peer is not None,
        ),
        limits=dict(LIMITS),
        rivals=rivals,
        outcomes=outcomes,
        complete=complete,
    )


def _tell(report: Report, console: Console) -> None:
    machine, layout = report.machine, report.layout
    headline = (
        f"{report.model}: {layout.bytes_per_token} bytes a token, blocks of {layout.block_size} tokens "
        f"({report.block_bytes} bytes); {report.settings.streams} streams; {machine.cores} cores, {machine.processor}"
    )
    tell(console, headline, outcome_table(report), remarks(report))
