"""What /metrics exports, held against docs/metrics.md, and against what a name, a unit and a bucket have to be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from worker_facts import worker

from protocol.histogram import SECONDS, Observations
from protocol.ids import Peer
from protocol.transfer_counts import SCALES, PathCounts, TransferCounts
from router.block_index import BlockIndex
from router.explanations import Candidates, Decision
from router.front.generation import GenerationReport
from router.instructions import Stage
from router.kv_feed import KVFeeds
from router.metrics import RouterMetrics
from router.registry import Worker
from router.slo.classes import SLOClass

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| ([\w/ ]+) \| (.+) \|$", re.MULTILINE)
SUFFIXES = {
    "seconds": ("_seconds",),
    "bytes": ("_bytes",),
    "bytes/second": ("_bytes_per_second",),
}
"""What the name of a metric in that unit ends with; any other unit is a count of things."""


class Row(NamedTuple):
    """One metric on the page."""

    name: str
    kind: str
    labels: frozenset[str]
    unit: str
    meaning: str


ROWS = [
    Row(name, kind, frozenset(re.findall(r"`(\w+)`", labels)), unit, text)
    for name, kind, labels, unit, text in ROW.findall(PAGE.read_text())
]


def observed() -> PathCounts:
    histograms = {}
    for name, scale in SCALES.items():
        observations = Observations(scale)
        for value in (0.0, *scale.bounds, 2 * scale.bounds[-1]):
            observations.add(value)
        histograms[name] = observations.histogram()
    return PathCounts(**histograms, broken={"channel_lost": 2})


def everything() -> tuple[Worker, Worker]:
    """Two workers that have counted each thing that there is."""
    leases = TransferCounts(
        opened=9,
        ended={"settled": 5, "lost": 1},
        open=2,
        draining=1,
        refusals={"lease_refused": 3},
        paths={"tcp": observed()},
    )
    imports = TransferCounts(opened=4, ended={"settled": 4}, broken={"integrity_mismatch": 1})
    gaps = Observations(SECONDS)
    gaps.add(0.001)
    decode = worker("d0", "decode", transfer=imports, step_gaps=gaps.histogram(), spans_exported=3)
    return worker("p0", "prefill", transfer=leases), decode


def decision() -> Decision:
    candidates = Candidates((), (), (), ())
    predicted = {"predicted_ttft": 0.2, "predicted_tpot": None, "predicted_transfer": None, "measured_ttft": 0.3}
    counts = dict.fromkeys(("attempt", "at", "prompt_tokens", "cached_tokens"), 0)
    where = {"prefill": Peer("p0", 1), "decode": None, "prefill_candidates": candidates, "decode_candidates": None}
    return Decision(request_id="r", policy="cost", local_prefill="", **counts, **predicted, **where)  # type: ignore[arg-type]


def exported() -> dict[str, Metric]:
    index = BlockIndex()
    metrics = RouterMetrics(everything, lambda: 0, index, KVFeeds(index))
    metrics.ended("finished", "stop")
    metrics.retries.labels("worker_lost").inc()
    numbers = dict.fromkeys(("cached_tokens", "kv_blocks", "kv_bytes"), 0)
    names = dict.fromkeys(("prefill_worker", "decode_worker"), "w")
    times = {f"{stage}_s": 0.5 for stage in ("queue", "prefill", "handoff", "ttft", "decode", "ship")}
    report = GenerationReport(request_id="r", attempts=1, transport="shm", **numbers, **names, **times)
    metrics.reached(Stage.TAKEN_OVER, report, first=True)
    metrics.reached(Stage.PREFILLED, replace(report, local_prefill="always"), first=False)
    metrics.foretold(decision(), 0.1)
    metrics.admission.watch(("fast",), lambda _: 3)
    metrics.admission.admitted("fast", 0.25)
    metrics.admission.refused("fast", "target", 9)
    metrics.admission.served(SLOClass(name="fast", ttft=1.0, tpot=0.1), 0.5, 0.2)
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {family.name: family for family in families if not family.name.endswith("_created")}


EXPORTED = exported()


def labels_of(family: Metric) -> Iterable[frozenset[str]]:
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield frozenset(sample.labels) - {"le"}


def test_the_page_and_the_router_name_the_same_metrics() -> None:
    assert [row.name for row in ROWS] == [*EXPORTED], "the page has them in the order of the scrape"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_page_says_of_each_metric_what_the_scrape_says(row: Row) -> None:
    family = EXPORTED[row.name]
    assert (row.kind, row.meaning) == (family.type, family.documentation)
    assert {*labels_of(family)} == {row.labels}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_metric_has_help_and_a_unit_that_its_name_ends_with(row: Row) -> None:
    assert re.fullmatch(r"kvferry_[a-z0-9_]+", row.name)
    assert row.meaning.endswith(".")
    assert len(row.meaning) > 10
    assert row.unit in (
        *SUFFIXES,
        "blocks",
        "tokens",
        "sequences",
        "requests",
        "steps",
        "workers",
        "openings",
        "messages",
        "ships",
        "leases",
        "imports",
        "spans",
        "share",
        "yes/no",
    )
    for unit, endings in SUFFIXES.items():
        assert (row.unit == unit) == row.name.endswith(endings)


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.kind == "histogram"])
def test_buckets_ascend_end_with_infinity_and_hold_what_was_counted(name: str) -> None:
    samples = EXPORTED[name].samples
    buckets = [(float(sample.labels["le"]), sample.value) for sample in samples if sample.name == f"{name}_bucket"]
    bounds, counts = zip(*buckets, strict=True)
    assert list(bounds) == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    assert list(counts) == sorted(counts)
    (total,) = [sample.value for sample in samples if sample.name == f"{name}_count"]
    assert counts[-1] == total
    if name.startswith("kvferry_transfer_"):
        assert list(counts) == [2, *range(3, len(counts) + 2)], "one value on each bound, one at 0 and one above all"
