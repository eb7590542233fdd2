"""``kvferry bench latency``: where the time of a request goes, by prompt length, on a cluster that is up.

Each request has a prompt of its own, so that nothing is cached, or just its beginning, which was asked for before;
lengths take turns, so that what else runs on the machine hits all alike.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.table import Table

from router.client import Client, Timings

LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID = 300, 31_000
"""Random prompts are drawn from these: no special token, no byte, and inside every supported family's vocabulary."""
MIB = 1 << 20


class Case(NamedTuple):
    """Prompts alike."""

    length: int
    """Tokens."""
    cached: int = 0
    """Of them, asked for before."""


def cases(lengths: Sequence[int], cached: int) -> list[Case]:
    """Each length with nothing cached and, where it is longer than ``cached`` tokens, with these (0: none)."""
    return [Case(length, part) for length in lengths for part in ((0, cached) if 0 < cached < length else (0,))]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians of the runs of one case; milliseconds, mebibytes, GB/s."""

    prompt_tokens: int
    cached_tokens: int
    """Found by the prefill worker: whole blocks."""
    prefill_ms: float
    handoff_ms: float
    ttft_ms: float
    tpot_ms: float
    kv_mib: float
    ship_ms: float
    gb_per_s: float
    transport: str


def measure(client: Client, wanted: Sequence[Case], runs: int, output_tokens: int) -> Iterator[dict[Case, Timings]]:
    """Timings by case, once per run; the first run is not given, it only warms up."""
    rng = random.Random(0)  # noqa: S311
    for turn in range(runs + 1):
        found = {case: _one(client, case, output_tokens, rng) for case in wanted}
        if turn:
            yield found


def _one(client: Client, case: Case, output_tokens: int, rng: random.Random) -> Timings:
    prompt = [rng.randrange(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID) for _ in range(case.length)]
    if case.cached:
        client.complete(prompt[: case.cached], max_tokens=1, temperature=0)
    answer = client.complete(prompt, max_tokens=output_tokens, temperature=0, ignore_eos=True, timings=True)
    assert answer.timings is not None, "asked for"
    return answer.timings


def summary(length: int, found: Sequence[Timings], output_tokens: int) -> Row:
    """The medians of one case.

    Args:
        length: prompt tokens.
        found: at least one.
        output_tokens: of each answer, at least 2.
    """

    def median(value: Callable[[Timings], float]) -> float:
        return round(statistics.median(value(each) for each in found), 2)

    return Row(
        prompt_tokens=length,
        cached_tokens=round(median(lambda each: each.cached_tokens)),
        prefill_ms=median(lambda each: 1e3 * each.prefill_s),
        handoff_ms=median(lambda each: 1e3 * each.handoff_s),
        ttft_ms=median(lambda each: 1e3 * each.ttft_s),
        tpot_ms=median(lambda each: 1e3 * each.decode_s / (output_tokens - 1)),
        kv_mib=median(lambda each: each.kv_bytes / MIB),
        ship_ms=median(lambda each: 1e3 * each.ship_s),
        gb_per_s=median(lambda each: each.kv_bytes / each.ship_s / 1e9 if each.ship_s else 0.0),
        transport=found[0].transport,
    )


def row_table(rows: Sequence[Row], *, runs: int, output_tokens: int) -> Table:
    """The rows, for a person."""
    table = Table(title=f"medians of {runs} runs, {output_tokens} output tokens", box=None)
    for heading in Row.__struct_fields__:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in msgspec.structs.astuple(row)))
    return table
