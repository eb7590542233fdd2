"""``kvferry bench disaggregation``: real workers in processes of their own, and the arithmetic of what they took."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from checkpoints import tiny_llama

from cluster.bench.disaggregation.figures import (
    AloneRow,
    DisaggregationReport,
    LoadRow,
    Request,
    alone_table,
    load_table,
    p99_ratio,
)
from cluster.bench.disaggregation.measure import DisaggregationOptions, alone_row
from cluster.bench.disaggregation.plot import name_of, write_disaggregation_plot
from cluster.bench.machine import this_machine
from cluster.bench.statistics import latency
from protocol.errors import ConfigError

COMMAND = (sys.executable, "-m", "cluster", "bench", "disaggregation")


def request(ttft: float, tpot: float = 0.02) -> Request:
    return Request(ttft=ttft, prefill=ttft / 2, handoff=0.001, second=0.03, tpot=tpot, kv_bytes=1 << 20)


def load_row(way: str, budget: int, *gaps: float) -> LoadRow:
    return LoadRow(
        way=way,
        step_tokens=budget,
        gaps=latency(gaps),
        quiet=latency(gaps),
        worst=max(gaps),
        long_ttft=None,
        tokens_per_second=9.0,
        step_gap=0.001,
        sample=gaps,
    )


def report(*load: LoadRow, alone: tuple[AloneRow, ...] = ()) -> DisaggregationReport:
    return DisaggregationReport(
        model="m",
        machine=this_machine(),
        cores=(0, 1),
        runs=3,
        streams=8,
        long_tokens=2048,
        interval=4.0,
        seconds=20.0,
        alone=alone,
        load=load,
    )


def test_a_ratio_is_of_the_two_that_were_measured_together() -> None:
    row = alone_row(64, [request(1.0), request(9.0), request(3.0)], [request(2.0), request(6.0), request(3.0)])
    assert (row.apart.ttft, row.together.ttft) == (3.0, 3.0)
    assert row.ttft_ratio == 1.0, "the median of 0.5, 1.5 and 1, not the ratio of the medians alone"
    assert row.tpot_ratio == 1.0


def test_disaggregation_is_held_against_the_best_of_the_others() -> None:
    mixed = load_row("1P1D", 0, 0.1, 0.2), load_row("together", 64, 0.1, 0.8), load_row("together", 256, 0.1, 0.5)
    assert p99_ratio(report(*mixed)) == 0.2 / 0.5
    assert p99_ratio(report(mixed[0])) is None
    assert [name_of(row) for row in mixed[:2]] == ["1P1D", "together, 64 tokens a step"]


def test_the_picture_has_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = report(load_row("1P1D", 0, 0.1, 0.2), load_row("together", 64, 0.3, 0.4))
    write_disaggregation_plot(whole, tmp_path / "found.html")
    assert "together, 64 tokens a step" in (tmp_path / "found.html").read_text()


def test_tables_have_each_way() -> None:
    alone = (alone_row(64, [request(1.0)], [request(2.0)]),)
    whole = report(load_row("1P1D", 0, 0.1, 0.2), load_row("together", 64, 0.3, 0.4), alone=alone)
    assert alone_table(whole.alone).row_count == load_table(whole).row_count == 2


@pytest.mark.parametrize("field", ["output", "chunk", "streams"])
def test_an_option_that_cannot_be_is_named(field: str) -> None:
    given: dict[str, object] = {
        "model": Path(),
        "tokens": (8,),
        "output": 4,
        "runs": 1,
        "chunk": 16,
        "step_tokens": (16,),
    }
    given |= {"streams": 1, "long": 32, "interval": 1.0, "seconds": 1.0, "rounds": 1}
    with pytest.raises(ConfigError, match=field):
        DisaggregationOptions(**{**given, field: 0})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are wanted")
def test_a_short_run_gives_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    vocabulary = {"vocab_size": 40_000}
    arguments = ("--model", str(tiny_llama(tmp_path / "model", **vocabulary)), "--tokens", "40", "--output", "4")
    load = ("--streams", "2", "--long", "60", "--interval", "0.5", "--seconds", "2", "--chunk", "32")
    done = subprocess.run(
        [*COMMAND, *arguments, *load, "--runs", "1", "--step-tokens", "32", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(file.read_bytes(), type=DisaggregationReport)
    (row,) = found.alone
    assert (row.prompt_tokens, row.together.kv_bytes, row.together.handoff) == (40, 0, 0.0)
    assert row.apart.kv_bytes > 0
    assert [(each.way, each.step_tokens) for each in found.load] == [("1P1D", 0), ("together", 32)]
    assert all(each.gaps.samples and each.quiet.samples for each in found.load)
    assert "1P1D to the best that does both" in done.stdout
