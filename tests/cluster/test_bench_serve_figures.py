"""The pure parts of ``kvferry bench serve``: pacers on a clock of the test's own, stopwatches, targets, prompts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.machine import Machine
from cluster.bench.picture import SUFFIXES
from cluster.bench.serve.answer import Record, Stopwatch
from cluster.bench.serve.dialect import Dialect
from cluster.bench.serve.drive import drive
from cluster.bench.serve.events import EventReader, Piece, Usage
from cluster.bench.serve.figures import ServeReport, Taken, figures_of, spread, versus_of
from cluster.bench.serve.pacer import ClosedLoop, OpenLoop, Order
from cluster.bench.serve.plot import curve, write_serve_plot
from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.serve.report import headline, remarks, server_table, time_table
from cluster.bench.serve.target import Target, parse_target
from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.registry import make_trace
from cluster.bench.traces.request import TraceRequest
from protocol.errors import MalformedFrame

TIMES = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40).map(sorted)


def requests(*times: float) -> list[TraceRequest]:
    return [TraceRequest(at=at, blocks=(0,), prompt_tokens=4, output_tokens=2, session=0) for at in times]


def record(index: int, **changed: object) -> Record:
    values: dict[str, object] = {"due": 0.0, "late": 0.0, "ttft": 0.1, "e2e": 0.5, "tpot": 0.02}
    values |= {"prompt_tokens": 10, "output_tokens": 5, "events": 5, **changed}
    return Record(index=index, **values)  # type: ignore[arg-type]


@given(TIMES, st.floats(0.0, 50.0), st.floats(0.001, 5.0))
def test_an_open_loop_sends_everything_at_its_time(times: list[float], start: float, step: float) -> None:
    pacer = OpenLoop(requests(*times), start=start)
    now, sent = start, []
    while not pacer.over:
        at = pacer.next_at()
        assert at is not None
        now = max(now + step, at)
        due = pacer.due(now)
        assert due
        sent += due
        assert all(order.due <= now for order in due)
    assert [order.request.at for order in sent] == times
    assert [order.due for order in sent] == [start + at for at in times]
    assert pacer.next_at() is None


def test_a_slice_of_a_trace_begins_where_the_last_one_ended() -> None:
    pacer = OpenLoop(requests(7.0, 9.0), start=100.0, begin=6.0)
    assert pacer.due(100.9) == []
    assert [order.due for order in pacer.due(103.0)] == [101.0, 103.0]


@given(st.integers(1, 30), st.integers(1, 8))
def test_a_closed_loop_has_no_more_than_its_number_under_way(count: int, concurrency: int) -> None:
    pacer = ClosedLoop(requests(*[0.0] * count), concurrency=concurrency)
    under_way = sent = 0
    now = 0.0
    while not pacer.over:
        due = pacer.due(now)
        sent, under_way = sent + len(due), under_way + len(due)
        assert under_way == min(concurrency, count - sent + under_way)
        assert all(order.due == now for order in due)
        pacer.answered()
        under_way, now = under_way - 1, now + 1.0
    assert sent == count


def test_a_closed_loop_ends_with_its_time() -> None:
    pacer = ClosedLoop(requests(*[0.0] * 9), concurrency=1, until=5.0)
    assert len(pacer.due(4.9)) == 1
    pacer.answered()
    assert not pacer.over
    assert pacer.due(5.0) == []
    assert pacer.over


async def test_driving_waits_for_every_answer_and_passes_on_what_is_no_answer() -> None:
    ended: list[float] = []

    async def ask(order: Order) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append(order.request.at)

    clock = asyncio.get_running_loop().time
    await drive(OpenLoop(requests(0.0, 0.01, 0.02), start=clock()), ask, clock)
    assert ended == [0.0, 0.01, 0.02]

    async def fail(_: Order) -> None:
        raise ValueError

    with pytest.raises(ExceptionGroup):
        await drive(ClosedLoop(requests(0.0, 0.0), concurrency=1), fail, clock)


TOKEN, END = Piece(True), Piece(False)


def counted(prompt: int, output: int) -> Piece:
    return Piece(False, Usage(prompt, output))


def watched(*pieces: tuple[float, Piece], error: str | None = None) -> tuple[Record, list[float]]:
    watch = Stopwatch(due=10.0, now=10.1)
    watch.sent(10.5)
    for now, piece in pieces:
        watch.push(piece, now)
    return watch.record(3, began=4.0, asked=7, now=20.0, error=error), watch.gaps


def test_times_run_from_when_a_request_should_have_been_sent() -> None:
    found, gaps = watched((11.0, TOKEN), (12.0, TOKEN), (14.0, TOKEN), (14.5, END), (15.0, counted(9, 5)))
    assert (found.due, found.late, found.ttft, found.e2e) == (6.0, 0.5, 1.0, 4.0)
    assert (found.prompt_tokens, found.output_tokens, found.events) == (9, 5, 3)
    assert found.tpot == 3.0 / 4
    assert gaps == [1.0, 2.0]


def test_a_server_that_does_not_count_is_counted_by_its_events() -> None:
    found, _ = watched((11.0, TOKEN), (12.0, TOKEN))
    assert (found.prompt_tokens, found.output_tokens, found.tpot) == (7, 2, 1.0)


def test_an_answer_of_one_token_has_no_tpot_and_one_of_none_is_no_answer() -> None:
    found, _ = watched((11.0, TOKEN), (11.1, END))
    assert (found.tpot, found.error) == (None, None)
    empty, _ = watched((11.0, END))
    assert empty.error == "empty_answer"
    failed, _ = watched((11.0, TOKEN), error="timeout")
    assert (failed.error, failed.e2e, failed.ttft) == ("timeout", 10.0, 1.0)


def test_a_text_that_was_held_back_to_its_end_has_a_first_token_there() -> None:
    found, _ = watched((11.0, counted(9, 2)))
    assert (found.ttft, found.error) == (1.0, None)


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ('data: {"choices": [{"index": 0, "text": "a", "logprobs": null, "finish_reason": null}]}', TOKEN),
        ('data:{"choices":[{"text":"","finish_reason":null}],"usage":null}', TOKEN),
        ('data: {"choices": [{"text": "b", "finish_reason": "length", "stop_reason": null}]}', TOKEN),
        ('data: {"choices": [{"text": "", "finish_reason": "stop", "matched_stop": 2}]}', END),
        ('data: {"choices": []}', END),
        (
            'data: {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 11, "completion_tokens": 2}}',
            counted(9, 2),
        ),
        (": a comment", None),
        ("", None),
        ("event: x", None),
    ],
)
def test_an_event_brings_tokens_or_a_count_or_nothing(line: str, piece: Piece | None) -> None:
    reader = EventReader()
    assert reader.push(line) == piece
    assert not reader.done
    assert reader.failed is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ('{"code": "worker_lost"}', "worker_lost"),
        ('{"code": 400, "type": "BadRequest"}', "400"),
        ("{}", "server_error"),
    ],
)
def test_an_error_in_mid_answer_has_a_kind(error: str, kind: str) -> None:
    reader = EventReader()
    assert reader.push(f'data: {{"error": {error}}}') is None
    assert reader.failed == kind


def test_what_is_no_event_is_refused_and_nothing_counts_after_the_end() -> None:
    reader = EventReader()
    for line in ("data: {", 'data: {"choices": 5}', f'data: "{"x" * (1 << 20)}"'):
        with pytest.raises(MalformedFrame):
            reader.push(line)
    assert reader.push("data: [DONE]") is None
    assert reader.done
    assert reader.push('data: {"choices": [{"text": "a"}]}') is None


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=200))
def test_a_spread_is_of_times_that_were_measured(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found.p50 <= found.p90 <= found.p95 <= found.p99 <= found.worst == max(values)
    assert {found.p50, found.p95, found.p99} <= {*values}
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert spread([]) is None


def test_goodput_counts_what_met_every_target_and_no_failure() -> None:
    taken = Taken(scheduled=1.0, sent=2.0, seconds=4.0)
    taken.records = [
        record(0),
        record(1, ttft=0.3),
        record(2, tpot=0.2),
        record(3, tpot=None),
        record(4, error="timeout"),
        record(5, error="timeout", ttft=None),
    ]
    taken.wanted = dict.fromkeys(range(6), 8)
    dialect = Dialect(True, True)
    found = figures_of(taken, url="u", model="m", dialect=dialect, open_loop=True, target=Target(ttft=0.2, tpot=0.1))
    assert (found.requests, found.completed, found.errors, found.good, found.goodput) == (6, 4, {"timeout": 2}, 2, 0.5)
    assert (found.asked_rate, found.sent_rate, found.completed_rate) == (6.0, 3.0, 1.0)
    assert (found.output_tokens, found.wanted_tokens) == (20, 32)


def test_two_servers_are_compared_request_by_request() -> None:
    def of(factor: float, failed: int) -> tuple[Taken, list[Record]]:
        records = [record(index, ttft=factor * (index + 1), e2e=factor, tpot=factor) for index in range(5)]
        records[failed] = record(failed, error="timeout")
        return Taken(records=records, wanted=dict.fromkeys(range(5), 5), seconds=10 * factor), records

    dialect = Dialect(True, True)
    (one, mine), (other, its) = of(1.0, 0), of(2.0, 4)
    ours, theirs = (
        figures_of(taken, url="u", model="m", dialect=dialect, open_loop=True, target=Target(ttft=100.0))
        for taken in (one, other)
    )
    found = versus_of(ours, theirs, (mine, its))
    assert (found.pairs, found.ttft, found.tpot, found.e2e, found.output, found.goodput) == (3, 0.5, 0.5, 0.5, 2.0, 2.0)


def two_servers(target: Target | None = None) -> ServeReport:
    """One that answers, and one that has failed twice and never answered."""
    dialect = Dialect(True, True)
    answered = [record(index, due=float(index), ttft=0.1 * (index + 1)) for index in range(3)]
    failed = [record(index, due=float(index), error="http_503", ttft=None, tpot=None) for index in range(2)]
    figures = tuple(
        figures_of(
            Taken(records=records, wanted=dict.fromkeys(range(3), 5), seconds=3.0, sent=1.0, scheduled=0.5),
            url=url,
            model="<m>",
            dialect=dialect,
            open_loop=True,
            target=target,
        )
        for url, records in (("http://a", answered), ("http://b", failed))
    )
    return ServeReport(
        kvferry="0",
        machine=Machine(system="s", processor="p", cores=2, memory_bytes=1, python="3"),
        trace=TraceOptions(name="poisson", requests=3, rate=1.0),
        concurrency=None,
        slice=2,
        salt="s",
        target=target,
        cpu=0.9,
        servers=figures,
        versus=versus_of(figures[0], figures[1], (answered, failed)),
        records=(tuple(answered), tuple(failed)),
    )


def test_what_a_reader_has_to_know_is_told() -> None:
    report = two_servers(Target(ttft=0.2))
    told = "\n".join(remarks(report))
    for line in (
        "http://b: failed: http_503 2",
        "http://a: sent 3.00 requests/s, not 6.00",
        "the generator used 90% of a core",
        "over 0 pairs: none; no rates",
        "times run from when the trace has a request",
    ):
        assert line in told
    assert "http://a: failed" not in told
    assert headline(report) == "poisson, 1 requests/s, seed 0, at most 32768 tokens; good: ttft <= 200 ms"
    assert server_table(report).row_count == 2
    assert len(server_table(report).columns) == len(server_table(two_servers()).columns) + 2
    assert time_table(report).row_count == 10


def test_a_late_generator_says_so() -> None:
    late = [record(index, late=0.02) for index in range(3)]
    taken = Taken(records=late, wanted=dict.fromkeys(range(3), 5), seconds=3.0, sent=1.0, scheduled=1.0)
    found = figures_of(taken, url="u", model="m", dialect=Dialect(True, True), open_loop=True, target=None)
    report = msgspec.structs.replace(two_servers(), servers=(found,), versus=None, cpu=0.1)
    assert "late by 20.0 ms at the 99th percentile" in "\n".join(remarks(report))


def test_a_report_is_read_back_as_it_was_written() -> None:
    report = two_servers(Target(ttft=0.2))
    assert msgspec.json.decode(msgspec.json.encode(report), type=ServeReport) == report


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_picture_is_written_even_of_failures(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"run{suffix}"
    write_serve_plot(two_servers(Target(ttft=0.2)), file)
    content = file.read_bytes()
    assert content.startswith({".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml"}[suffix])
    if suffix == ".html":
        assert b"http_503 2" in content


def test_a_curve_is_of_what_was_completed() -> None:
    report = two_servers()
    assert curve(report.records[0], "ttft")[1] == pytest.approx([100 / 3, 200 / 3, 100.0])
    assert curve(report.records[1], "ttft") == ([], [])


def test_targets() -> None:
    target = parse_target("ttft=500ms, tpot=0.05s")
    assert target == Target(ttft=0.5, tpot=0.05)
    assert str(target) == "ttft <= 500 ms, tpot <= 50 ms"
    assert target.met(ttft=0.5, tpot=None, e2e=9.0)
    assert not target.met(ttft=0.51, tpot=0.01, e2e=9.0)
    assert not target.met(ttft=0.1, tpot=0.06, e2e=9.0)
    assert not parse_target("e2e=1s").met(ttft=0.1, tpot=0.1, e2e=1.5)


@pytest.mark.parametrize("make", [PromptMaker.tokens, lambda maker, request: maker.text(request).split()])
def test_prompts_share_what_their_requests_share(make: Callable[[PromptMaker, TraceRequest], list[object]]) -> None:
    found = make_trace("multi-turn", requests=300, rate=5.0, seed=2, max_tokens=4096)
    maker, other = PromptMaker("a", (100, 31_999)), PromptMaker("b", (100, 31_999))
    by_session: dict[int, list[object]] = {}
    for request in found:
        prompt = make(maker, request)
        assert len(prompt) == request.prompt_tokens
        assert prompt == make(maker, request)
        assert prompt != make(other, request)
        before = by_session.get(request.session, [])
        assert prompt[: len(before)] == before
        by_session[request.session] = prompt


def test_tokens_lie_in_the_vocabulary_and_use_all_of_it() -> None:
    maker = PromptMaker("a", (10, 20))
    (request,) = make_trace("poisson", requests=1, rate=1.0, prompt_tokens=500)
    assert {*maker.tokens(request)} == {*range(10, 21)}
