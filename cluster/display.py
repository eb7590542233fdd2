"""What the command shows: news while a cluster comes up, its status, and where the time of an answer went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster.phases import spelled
from cluster.progress import Step
from kv_transfer.choice import AUTO

if TYPE_CHECKING:
    from cluster.status import ActorReport, ClusterReport
    from protocol.messages import WorkerLoad
    from router.client import Timings

QUARTERS = 4
"""Lines per stage that knows how far it is."""


def print_json(value: object) -> None:
    """Print ``value`` on standard output, as JSON for people and programs."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


class StepPrinter:
    """Prints one line per new stage of each actor, with the seconds since it was made. Used as a progress callback."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._last: dict[str, tuple[str, int]] = {}

    def __call__(self, step: Step) -> None:
        """Print ``step`` unless it says nothing new."""
        quarter = min(int(step.fraction * QUARTERS), QUARTERS - 1)
        if self._last.get(step.actor) == (step.stage, quarter):
            return
        self._last[step.actor] = (step.stage, quarter)
        percent = f" {step.fraction:.0%}" if 0.0 < step.fraction < 1.0 else ""
        detail = f": {step.detail}" if step.detail else ""
        elapsed = time.monotonic() - self._begun
        line = f"[{elapsed:6.1f} s] {step.actor:<12} {step.stage}{percent}{detail}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def status_table(report: ClusterReport) -> Table:
    """The processes of a cluster, one a row.

    "available" counts KV blocks, and the "cached" are among them; "empty" is what of the others holds no token.
    """
    hosts = {actor.status.host for actor in report.actors if actor.status.host}
    table = Table(box=None, pad_edge=False)
    for heading in ("name", *(("host",) if len(hosts) > 1 else ()), "role", "pid", "state"):
        table.add_column(heading)
    for heading in ("available", "cached", "empty", "running", "waiting", "KV moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for actor in report.actors:
        status = actor.status
        where = (status.host or "-",) if len(hosts) > 1 else ()
        table.add_row(status.name, *where, status.role, str(status.pid or "-"), _state(actor), *_load(actor.load))
    return table


def transport_words(report: ClusterReport) -> str:
    """By what KV goes: what it went by, once it has; the file may have left the choice to the workers."""
    used = ", ".join(report.transports)
    if report.transport == AUTO:
        return f"KV by {used}" if used else "KV by what each pair of workers has best (none has moved yet)"
    return f"KV by {report.transport}" + (f" (went by {used})" if used and used != report.transport else "")


def start_lines(report: ClusterReport) -> list[str]:
    """Where the time of the start went: of the command, and of each process that is ready."""
    lines = [f"start of the cluster: {spelled(report.phases)}"] if report.phases else []
    return lines + [
        f"start of {actor.status.name}: {spelled(actor.status.phases)}"
        for actor in report.actors
        if actor.status.state == "ready" and actor.status.phases
    ]


def timing_table(timings: Timings, *, per_token: float | None) -> Table:
    """Where the time of one answer went.

    Args:
        timings: the router's report.
        per_token: mean seconds between two tokens after the first; None where there was no second one.
    """
    table = Table("stage", "time", box=None, pad_edge=False)
    rows = (
        ("queue", timings.queue_s),
        ("prefill", timings.prefill_s),
        ("first token (TTFT)", timings.ttft_s),
        ("handoff (KV to decode), meanwhile", timings.handoff_s),
        ("per token (TPOT)", per_token),
    )
    for name, seconds in rows:
        table.add_row(name, "-" if seconds is None else f"{1000 * seconds:.1f} ms")
    return table


def transfer_line(timings: Timings) -> str:
    """How much KV moved, how fast, and by what."""
    if timings.local_prefill:
        return f"KV moved: none ({timings.prefill_worker} computed the prompt itself: {timings.local_prefill})"
    if not timings.kv_bytes:
        return "KV moved: none (the answer ended at its first token, or decode had every block)"
    rate = f"{timings.kv_bytes / timings.ship_s / 1e9:.2f} GB/s" if timings.ship_s > 0 else "-"
    return (
        f"KV moved: {binary(timings.kv_bytes)} in {timings.kv_blocks} blocks, {1000 * timings.ship_s:.1f} ms in the "
        f"{timings.transport or '?'} transport ({rate}), {timings.prefill_worker} -> {timings.decode_worker}"
    )


def binary(nbytes: int) -> str:
    """A number of bytes for a person."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _state(actor: ActorReport) -> str:
    status, load = actor.status, actor.load
    if load is not None and load.pool.leaked:
        return f"{status.state}, {load.pool.leaked} blocks LEAKED"
    if status.state == "ready":
        word = "draining" if load is not None and load.draining else "ready"
        return f"{word} (restarted)" if status.restarted else word
    if status.error:
        return f"{status.state}: {status.error.splitlines()[-1][:80]}"
    return f"{status.state} ({status.stage} {status.fraction:.0%})" if status.stage else status.state


def _load(load: WorkerLoad | None) -> tuple[str, ...]:
    if load is None:
        return ("-",) * 6
    pool = load.pool
    available = f"{pool.free + pool.cached}/{pool.total - pool.reserved}"
    empty = f"{load.empty_share:.1%}"
    return available, str(pool.cached), empty, str(load.running), str(load.waiting), binary(load.kv_bytes)
