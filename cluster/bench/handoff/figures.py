"""What a benchmark of the handoff found, as values, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.table import Table

from cluster.bench.statistics import Latency, latency
from protocol.layout import KVLayout

VERSION = 2
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """One prompt.

    Attributes:
        seconds: from the moment its last chunk's blocks are complete to the commit at decode.
        ships: seconds of each ship, from its beginning to its acknowledgement; the last chunk's is the last.
    """

    seconds: float
    ships: tuple[float, ...]

    @property
    def of_one_chunk(self) -> float | None:
        """Its seconds over those that an earlier chunk of the same prompt was under way; None where it has none.

        Not over those of a short prompt: its blocks have been used more lately, and memory gets slower to reach the
        longer nobody has.
        """
        return self.seconds / statistics.median(self.ships[:-1]) if len(self.ships) > 1 else None


class HandoffRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt length by one transport.

    Attributes:
        transport: as asked for.
        prompt_tokens, chunks, nbytes: of the prompt.
        latency: from the moment its last chunk's blocks are complete to the commit at decode.
        of_one_chunk: that over what an earlier chunk of the same prompt takes on its way, the median over the turns;
            None for a prompt of one chunk.
    """

    transport: str
    prompt_tokens: int
    chunks: int
    nbytes: int
    latency: Latency
    of_one_chunk: float | None


class HandoffReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        model: preset, or name of the directory.
        chunk_tokens: of a chunk.
        pause: seconds before each chunk, in which a prefill worker would compute it.
        runs: of each length, after those that do not count.
        rows: what was found.
        skipped: why a transport was not measured, by its name.
    """

    version: int = VERSION
    model: str
    chunk_tokens: int
    pause: float
    runs: int
    rows: tuple[HandoffRow, ...]
    skipped: dict[str, str]


def rows_of(
    transport: str, layout: KVLayout, chunk_tokens: int, found: dict[int, Sequence[HandoffTimes]]
) -> list[HandoffRow]:
    """The rows of one transport.

    Args:
        transport: its name.
        layout: of the blocks.
        chunk_tokens: of a chunk.
        found: by prompt tokens, turn by turn.
    """
    rows = []
    for tokens, times in found.items():
        shares = [share for each in times if (share := each.of_one_chunk) is not None]
        rows.append(
            HandoffRow(
                transport=transport,
                prompt_tokens=tokens,
                chunks=-(-tokens // chunk_tokens),
                nbytes=layout.blocks_for(tokens) * layout.block_bytes,
                latency=latency([each.seconds for each in times]),
                of_one_chunk=statistics.median(shares) if shares else None,
            )
        )
    return rows


def headline(report: HandoffReport) -> str:
    """What the table shows."""
    return (
        f"{report.model}, {report.runs} runs: last chunk complete to committed, chunks of {report.chunk_tokens} "
        f"tokens, {1e3 * report.pause:g} ms before each"
    )


def handoff_table(report: HandoffReport) -> Table:
    """The rows, for a person."""
    table = Table(box=None, pad_edge=False)
    for heading in ("transport", "prompt tokens", "chunks", "MiB", "p50 ms", "p90 ms", "p99 ms", "of one chunk"):
        table.add_column(heading, justify="left" if heading == "transport" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.transport,
            str(row.prompt_tokens),
            str(row.chunks),
            f"{row.nbytes / MIB:.2f}",
            *(f"{1e3 * value:.3f}" for value in (row.latency.p50, row.latency.p90, row.latency.p99)),
            "" if row.of_one_chunk is None else f"{row.of_one_chunk:.2f}",
        )
    return table
