"""Where the time of a request goes, by prompt length, on a cluster that is up.

Each request has a prompt of its own, so that nothing is cached; lengths take turns, so that what else runs on the
machine hits all alike. Usage: ``python benchmarks/latency.py --url http://127.0.0.1:8000``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable

from rich.console import Console
from rich.progress import track
from rich.table import Table

from router.client import Client, Timings

LENGTHS = (16, 64, 256, 900)
OUTPUT_TOKENS = 16
LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID = 100, 40_000
"""Random prompts are drawn from these: no special token, and inside every supported vocabulary."""


def measure(client: Client, length: int, rng: random.Random) -> Timings:
    """One request of ``length`` prompt tokens."""
    prompt = [rng.randrange(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID) for _ in range(length)]
    answer = client.complete(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True, timings=True)
    assert answer.timings is not None, "asked for"
    return answer.timings


def summary(length: int, found: list[Timings]) -> dict[str, float | int | str]:
    """Medians of the runs of one length; milliseconds, mebibytes, GB/s."""

    def median(value: Callable[[Timings], float]) -> float:
        return round(statistics.median(value(each) for each in found), 2)

    return {
        "prompt_tokens": length,
        "prefill_ms": median(lambda each: 1e3 * each.prefill_s),
        "handoff_ms": median(lambda each: 1e3 * each.handoff_s),
        "ttft_ms": median(lambda each: 1e3 * each.ttft_s),
        "tpot_ms": median(lambda each: 1e3 * each.decode_s / (OUTPUT_TOKENS - 1)),
        "kv_mib": median(lambda each: each.kv_bytes / (1 << 20)),
        "ship_ms": median(lambda each: 1e3 * each.ship_s),
        "gb_per_s": median(lambda each: each.kv_bytes / each.ship_s / 1e9 if each.ship_s else 0.0),
        "transport": found[0].transport,
    }


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--runs", type=int, default=7, help="of each length, after one that does not count")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    console, rng = Console(width=110), random.Random(0)  # noqa: S311
    found: dict[int, list[Timings]] = {length: [] for length in LENGTHS}
    with Client(options.url) as client:
        for turn in track(range(options.runs + 1), description="runs", console=Console(stderr=True)):
            for length in LENGTHS:
                timings = measure(client, length, rng)
                if turn:
                    found[length].append(timings)
    rows = [summary(length, timings) for length, timings in found.items()]
    table = Table(title=f"medians of {options.runs} runs, {OUTPUT_TOKENS} output tokens", box=None)
    for column in rows[0]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
