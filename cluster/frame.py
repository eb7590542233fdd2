"""One frame of ``kvferry top``: what a router says of its workers, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from router.overview import ClassOverview, ClusterOverview, Latency, WorkerOverview

BAR = 24
BLOCKS = (
    ("active", "green"),
    ("exported", "magenta"),
    ("importing", "cyan"),
    ("draining", "yellow"),
    ("cached", "blue"),
)
"""States of a pool's blocks, as the bar shows them; the rest of it is free."""
LATENCIES = ("ttft", "tpot", "handoff")
"""The router's histograms of which the frame tells."""
STATE_STYLES = {"live": "green", "draining": "yellow"}


def frame(now: ClusterOverview, before: ClusterOverview | None = None, seconds: float = 0.0) -> RenderableType:
    """The cluster ``now``; rates since ``before``, which is ``seconds`` old, where there is such a one."""
    head = Text(f"{now.router}: {now.model}, policy {now.policy}, {now.live_requests} live requests")
    table = Table(
        *("worker", "role", "state", "pool", "used", "cached", "waiting", "running", "handoffs"),
        *("prefill tok/s", "decode tok/s", "KV MB/s", "seen"),
    )
    earlier = {(each.name, each.incarnation): each for each in before.workers} if before else {}
    for worker in now.workers:
        load = worker.load
        known = earlier.get((worker.name, worker.incarnation))
        table.add_row(
            Text(worker.name),
            Text(worker.role),
            Text(worker.state, style=STATE_STYLES.get(worker.state, "bold red")),
            _bar(worker),
            f"{load.pool.used}/{load.pool.total - load.pool.reserved}",
            str(load.pool.cached),
            str(load.waiting),
            str(load.running),
            str(load.open_leases + load.open_imports),
            *_rates(worker, known, seconds),
            f"{worker.last_seen_s:.1f} s",
        )
    legend = Text("pool: ")
    for name, style in BLOCKS:
        legend.append("█ ", style).append(f"{name}  ")
    legend.append("░ free")
    return Group(
        head,
        _told(now),
        *map(_queue, now.classes),
        table,
        legend,
        *(Text(alert.text, style="bold red") for alert in now.alerts),
    )


def _told(now: ClusterOverview) -> Text:
    """Where the requests under way are, and how long those so far took."""
    live = now.requests
    parts = [
        f"{live.queued} queued, {live.prefilling} prefilling, {live.handoff} in handoff, {live.decoding} decoding",
        *(f"{name.upper()} {_milliseconds(now.latency[name])}" for name in LATENCIES if name in now.latency),
    ]
    return Text("; ".join(parts))


def _queue(of: ClassOverview) -> Text:
    """What waits of a class, and how its targets are kept."""
    refused = ", ".join(f"{count} {reason}" for reason, count in of.refused.items()) or "0"
    parts = [f"class {of.name}: {of.waiting} waiting, {of.admitted} admitted, refused: {refused}"]
    for target in ("ttft", "tpot"):
        kept, missed = of.kept.get(target, 0), of.missed.get(target, 0)
        if kept or missed:
            parts.append(f"{target.upper()} kept by {kept} of {kept + missed}")
    return Text("; ".join(parts))


def _milliseconds(latency: Latency) -> str:
    half, most = latency.quantile(0.5), latency.quantile(0.99)
    if half is None or most is None:
        return "-"
    return f"p50 {1e3 * half:.3g} ms, p99 {1e3 * most:.3g} ms"


def _bar(worker: WorkerOverview) -> Text:
    pool = worker.load.pool
    usable = pool.total - pool.reserved
    bar, held, drawn = Text(), 0, 0
    for name, style in BLOCKS:
        held += getattr(pool, name)
        # Ends are rounded, not lengths: so that they never add up to more than the bar.
        end = min(BAR, round(BAR * held / usable)) if usable > 0 else 0
        bar.append("█" * (end - drawn), style)
        drawn = max(drawn, end)
    return bar.append("░" * (BAR - drawn))


def _rates(now: WorkerOverview, before: WorkerOverview | None, seconds: float) -> tuple[str, str, str]:
    if before is None or seconds <= 0:
        return "-", "-", "-"
    prefill = (now.load.prefill_tokens - before.load.prefill_tokens) / seconds
    decode = (now.load.decode_tokens - before.load.decode_tokens) / seconds
    moved = (now.load.kv_bytes - before.load.kv_bytes) / seconds / 1e6
    return f"{prefill:.0f}", f"{decode:.0f}", f"{moved:.1f}"
