"""What a benchmark of the router found, as values, and as a table."""

from __future__ import annotations

import msgspec
from rich.table import Table

from cluster.bench.statistics import Latency

VERSION = 1
MIB = 1 << 20


class StreamRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Streams side by side.

    Attributes:
        streams: how many.
        wanted: tokens a second over all of them that decode makes; None for as many as it can send.
        tokens: that came.
        events: that they came in; fewer than tokens where the router was behind and joined some.
        seconds: from the first to the last.
        cpu: seconds of CPU that the router used.
        first: to the first event of each.
    """

    streams: int
    wanted: float | None
    tokens: int
    events: int
    seconds: float
    cpu: float
    first: Latency

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def cpu_per_token(self) -> float:
        """Seconds of CPU for each token, the requests' beginnings and ends included."""
        return self.cpu / self.tokens


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router's memory over many short requests.

    Attributes:
        requests: how many.
        early, late: bytes after a tenth of them, and at the end.
        seconds, cpu: that they took; of CPU.
    """

    requests: int
    early: int
    late: int
    seconds: float
    cpu: float


class RouterReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        model: whose tokenizer it was.
        first_token: from a request to its first event, one request at a time.
        cancelled: from a client's leaving to the cancel at the later of both workers.
        streams: what streams cost.
        memory: None where no requests were wanted.
    """

    version: int = VERSION
    model: str
    first_token: Latency
    cancelled: Latency
    streams: tuple[StreamRow, ...]
    memory: MemoryRow | None


def summary(report: RouterReport) -> list[str]:
    """What is no table."""

    def told(what: str, found: Latency) -> str:
        return (
            f"{what}: p50 {1e3 * found.p50:.2f} ms, p90 {1e3 * found.p90:.2f}, p99 {1e3 * found.p99:.2f} "
            f"({found.samples} times)"
        )

    lines = [
        told("added to the time to the first token", report.first_token),
        told("a client leaves: cancels at both workers after", report.cancelled),
    ]
    memory = report.memory
    if memory is not None:
        lines.append(
            f"memory over {memory.requests} requests: {memory.early / MIB:.1f} MiB after a tenth of them, "
            f"{memory.late / MIB:.1f} MiB at the end; {memory.requests / memory.seconds:.0f} requests/s, "
            f"{1e6 * memory.cpu / memory.requests:.0f} us of CPU each"
        )
    return lines


def stream_table(report: RouterReport) -> Table:
    """The rows, for a person."""
    table = Table(box=None, pad_edge=False)
    headings = (
        "streams",
        "tokens/s made",
        "tokens/s streamed",
        "events of tokens",
        "us CPU a token",
        "core",
        "TTFT p50 ms",
        "p99 ms",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.streams:
        table.add_row(
            str(row.streams),
            "all it can" if row.wanted is None else f"{row.wanted:.0f}",
            f"{row.rate:.0f}",
            f"{row.events / row.tokens:.1%}",
            f"{1e6 * row.cpu_per_token:.0f}",
            f"{row.cpu / row.seconds:.0%}",
            f"{1e3 * row.first.p50:.1f}",
            f"{1e3 * row.first.p99:.1f}",
        )
    return table
