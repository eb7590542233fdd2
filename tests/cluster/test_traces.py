"""Traces: arrivals at the rate that was asked for, prompts that share what their kind says, and Mooncake's files."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench.traces.arrivals import arrival_times
from cluster.bench.traces.kind import KINDS, Lengths
from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.registry import make_trace, stream_trace
from cluster.bench.traces.request import BLOCK_TOKENS, TraceRequest
from protocol.errors import ConfigError

LINES = [
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [*range(14)]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 3, "hash_ids": [0, 40, 41]},
    {"timestamp": 1000, "input_length": 513, "output_length": 20, "hash_ids": [0, 50]},
]


def written(folder: Path, *lines: object) -> str:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Blocks of the longest prefix that both have."""
    count = 0
    for mine, its in zip(one.blocks, other.blocks, strict=False):
        if mine != its:
            break
        count += 1
    return count


@given(
    st.sampled_from([*KINDS]),
    st.integers(0, 1000),
    st.floats(0.1, 1000.0),
    st.integers(64, 4096),
    st.none() | st.floats(0.1, 1000.0),
)
@settings(max_examples=40, deadline=None)
def test_a_trace_is_in_order_within_its_limit_and_the_same_each_time(
    name: str, seed: int, rate: float, limit: int, end: float | None
) -> None:
    options = TraceOptions(name=name, requests=60, rate=rate, rate_end=end, seed=seed, max_tokens=limit)
    found = list(stream_trace(options))
    assert found == list(stream_trace(options))
    assert found == make_trace(name, requests=60, rate=rate, seed=seed, rate_end=end, max_tokens=limit)
    assert len(found) == 60
    assert all(before.at <= after.at for before, after in pairwise(found))
    for each in found:
        assert each.prompt_tokens + each.output_tokens <= limit
        assert len(each.blocks) * BLOCK_TOKENS - each.prompt_tokens in range(BLOCK_TOKENS)
        assert len(set(each.blocks)) == len(each.blocks)


def test_another_seed_is_another_trace() -> None:
    assert make_trace("sharegpt", requests=5, rate=1.0, seed=1) != make_trace("sharegpt", requests=5, rate=1.0, seed=2)


@pytest.mark.parametrize("name", [*KINDS])
def test_every_kind_keeps_the_rate_and_its_mean_lengths(name: str) -> None:
    found = make_trace(name, requests=4000, rate=50.0, seed=3, max_tokens=1 << 20)
    assert found[-1].at == pytest.approx(80.0, rel=0.15)
    outputs = statistics.fmean(each.output_tokens for each in found)
    assert outputs == pytest.approx(KINDS[name].output.mean, rel=0.1)
    firsts = {each.session: each for each in reversed(found)}.values()
    kind = KINDS[name]
    assert statistics.fmean(each.prompt_tokens for each in firsts) == pytest.approx(
        kind.system_tokens + kind.prompt.mean, rel=0.15
    )


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_vary_as_the_burstiness_says(burstiness: float, variation: float) -> None:
    times = arrival_times(random.Random(0), requests=1, rate=10.0, burstiness=burstiness)
    gaps = [after - before for before, after in pairwise(islice(times, 20_000))]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)


@pytest.mark.parametrize(("first", "last"), [(2.0, 18.0), (18.0, 2.0), (10.0, 10.0)])
def test_a_ramp_takes_its_requests_from_one_rate_to_the_other(first: float, last: float) -> None:
    even = arrival_times(random.Random(0), requests=1000, rate=first, rate_end=last, burstiness=math.inf)
    times = list(islice(even, 1200))
    assert times[999] == pytest.approx(100.0)
    # At half the time a ramp has reached the mean of both rates; after it the last rate goes on.
    assert sum(time <= 50.0 for time in times) == pytest.approx((first + (first + last) / 2) / 2 * 50.0, abs=1)
    assert times[1] - times[0] == pytest.approx(1 / first, rel=0.1)
    assert times[1199] - times[1099] == pytest.approx(100 / last)


@pytest.mark.parametrize("name", ["multi-turn", "agentic"])
def test_a_turn_brings_all_that_was_before_it(name: str) -> None:
    found = make_trace(name, requests=2000, rate=20.0, seed=1)
    sessions: dict[int, list[TraceRequest]] = {}
    for each in found:
        sessions.setdefault(each.session, []).append(each)
    several = [turns for turns in sessions.values() if len(turns) > 1]
    assert len(several) > 20
    for turns in several:
        assert len(turns) <= KINDS[name].turns[1]
        for before, after in pairwise(turns):
            assert shared(before, after) == len(before.blocks)
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.at > before.at
    openings = {turns[0].blocks[: KINDS[name].system_tokens // BLOCK_TOKENS] for turns in sessions.values()}
    assert len(openings) == KINDS[name].systems


@pytest.mark.parametrize("name", ["poisson", "sharegpt", "no-reuse", "long-prompt", "bursts"])
def test_the_other_kinds_share_nothing(name: str) -> None:
    found = make_trace(name, requests=200, rate=20.0)
    ids = [one for each in found for one in each.blocks]
    assert len(set(ids)) == len(ids)
    assert len({each.session for each in found}) == 200


def test_means_may_be_others() -> None:
    found = make_trace("poisson", requests=3, rate=1.0, prompt_tokens=40, output_tokens=5)
    assert {(each.prompt_tokens, each.output_tokens, len(each.blocks)) for each in found} == {(40, 5, 3)}


def test_lognormal_lengths_have_their_mean_and_spread() -> None:
    rng = random.Random(0)
    drawn = [Lengths(300.0, 0.8).draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(300.0, rel=0.05)
    assert statistics.pstdev(math.log(each) for each in drawn) == pytest.approx(0.8, rel=0.05)


def test_a_file_of_mooncakes_is_read_by_its_times(tmp_path: Path) -> None:
    found = make_trace(written(tmp_path, *LINES), requests=10)
    assert [each.at for each in found] == [0.0, 1.0, 3.0]
    assert [each.prompt_tokens for each in found] == [6758, 513, 1030]
    assert [each.output_tokens for each in found] == [500, 20, 3]
    first, second, third = found
    assert (shared(first, second), shared(first, third), shared(second, third)) == (32, 32, 32)
    assert len(second.blocks) == 33


def test_a_file_may_be_played_at_another_rate_shortened_and_cut(tmp_path: Path) -> None:
    file = written(tmp_path, *LINES)
    assert [each.at for each in make_trace(file, requests=10, rate=2.0)] == [0.0, pytest.approx(1 / 3), 1.0]
    assert len(make_trace(file, requests=2)) == 2
    assert make_trace(file, requests=1, max_tokens=512)[0].prompt_tokens == 512 - 256


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"timestamp": 0}, "line 2.*input_length"),
        ({**LINES[0], "hash_ids": [1]}, r"line 2.*1 hash_ids for 6758 tokens"),
        ({**LINES[0], "hash_ids": [-1] * 14}, "line 2"),
        ({**LINES[0], "input_length": 1 << 30}, "line 2.*out of range"),
        ({**LINES[0], "timestamp": -5}, "line 2.*out of range"),
        ([], "line 2"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_trace(written(tmp_path, LINES[0], line), requests=10)
    assert caught.value.field == "trace"


def test_answers_of_no_tokens_are_passed_over_and_a_file_of_none_is_refused(tmp_path: Path) -> None:
    none = {**LINES[0], "output_length": 0}
    assert len(make_trace(written(tmp_path, none, LINES[1]), requests=10)) == 1
    with pytest.raises(ConfigError, match="no requests"):
        make_trace(written(tmp_path, none), requests=10)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"requests": 0}, "requests.*got 0"),
        ({"rate": 0.0}, "rate.*got 0"),
        ({"rate": None}, "poisson needs a rate"),
        ({"rate": None, "rate_end": 2.0}, "rate_end"),
        ({"burstiness": 0.0}, "burstiness.*got 0"),
        ({"max_tokens": 5}, "max_tokens.*got 5"),
        ({"prompt_tokens": 0}, "prompt_tokens.*got 0"),
        ({"name": "nonsense"}, "trace must be of poisson.*'nonsense'"),
    ],
)
def test_a_value_that_is_wrong_is_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trace(**{"name": "poisson", "requests": 1, "rate": 1.0, **changed})  # type: ignore[arg-type]


def test_what_does_not_go_with_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens does not go with"):
        make_trace(written(tmp_path, *LINES), requests=1, prompt_tokens=5)
