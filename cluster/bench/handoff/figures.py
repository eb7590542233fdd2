"""What a benchmark of the handoff found, as values, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.table import Table

from cluster.bench.statistics import Latency, latency
from protocol.layout import KVLayout

VERSION = 1
MIB = 1 << 20


class HandoffRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt length by one transport.

    Attributes:
        transport: as asked for.
        prompt_tokens, chunks, nbytes: of the prompt.
        latency: from the moment its last chunk's blocks are complete to the commit at decode.
        of_one_chunk: that over the same of a prompt of one chunk, the median over the turns; None for such a prompt.
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


def rows_of(transport: str, layout: KVLayout, chunk_tokens: int, found: dict[int, Sequence[float]]) -> list[HandoffRow]:
    """The rows of one transport.

    Args:
        transport: its name.
        layout: of the blocks.
        chunk_tokens: of a chunk; if a prompt is longer, ``found`` has one of exactly this length too.
        found: seconds by prompt tokens, turn by turn, as many of each.
    """
    rows = []
    for tokens, seconds in found.items():
        chunks = -(-tokens // chunk_tokens)
        pairs = zip(seconds, found[chunk_tokens], strict=True) if chunks > 1 else ()
        shares = [own / alone for own, alone in pairs]
        rows.append(
            HandoffRow(
                transport=transport,
                prompt_tokens=tokens,
                chunks=chunks,
                nbytes=layout.blocks_for(tokens) * layout.block_bytes,
                latency=latency(seconds),
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
