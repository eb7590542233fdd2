"""The pure parts of ``kvferry bench``: statistics, cases, block tables, layouts."""

from __future__ import annotations

import json
import math
import statistics as reference
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.block_table import transfers
from cluster.bench.case import (
    CHUNK_TOKENS,
    MAX_TOKENS,
    TABLES,
    UCX_HELD,
    WAYS,
    Case,
    Grid,
    parse_choices,
    parse_count,
    parse_counts,
    pool_blocks,
)
from cluster.bench.latency import cases, summary
from cluster.bench.limit import LIMITS, limit_of
from cluster.bench.preset import PRESETS, layout_of
from cluster.bench.statistics import latency, paired_ratio, percentile, rate
from protocol.errors import CheckpointUnavailable, ConfigError, UnknownTransport
from protocol.layout import KVLayout
from router.client import Timings

SECONDS = st.floats(1e-6, 1e3)
SAMPLES = st.lists(SECONDS, min_size=1, max_size=300)
LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=2, block_size=16)
CASES = st.builds(
    Case,
    transport=st.just("tcp"),
    tokens=st.integers(1, 3000),
    table=st.sampled_from(TABLES),
    way=st.sampled_from(WAYS),
    concurrency=st.integers(1, 5),
)


def grid(**changed: object) -> Grid:
    values: dict[str, object] = {"transports": ("tcp",), "tokens": (16, 1024), "tables": TABLES, "ways": WAYS}
    return Grid(**{**values, "concurrency": (1,), **changed})  # type: ignore[arg-type]


@given(SAMPLES, st.floats(0.1, 100.0))
def test_a_percentile_is_a_sample_that_enough_do_not_exceed(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values) * (1 - 1e-12)
    smaller = [value for value in values if value < found]
    assert all(sum(value <= one for value in values) * 100 < percent * len(values) for one in smaller)


@given(SAMPLES)
def test_percentiles_are_in_order_and_within_the_samples(values: list[float]) -> None:
    found = latency(values)
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= max(values)
    assert found.samples == len(values)
    if len(values) < 100:
        assert found.p99 == max(values)
    if len(values) % 2:
        assert found.p50 == reference.median(values)


@given(SAMPLES, st.integers(1, 1 << 40))
def test_the_rate_is_of_the_median(values: list[float], nbytes: int) -> None:
    assert math.isclose(rate(nbytes, values) * 1e9 * reference.median(values), nbytes)


@given(SAMPLES, st.floats(0.01, 100.0))
def test_the_ratio_is_found_again_whatever_slows_both_sides_of_a_round(ours: list[float], share: float) -> None:
    assert math.isclose(paired_ratio(ours, [share * own for own in ours]), share)


@given(CASES, st.integers(0, 5), st.integers(0, 100))
def test_transfers_share_no_block_and_ships_cover_each_block_once(case: Case, seed: int, spare: int) -> None:
    pool = case.pool_blocks(LAYOUT) + spare
    found = transfers(case, LAYOUT, pool, seed=seed)
    assert found == transfers(case, LAYOUT, pool, seed=seed)
    assert len(found) == case.concurrency
    for side in ([one.source for one in found], [one.target for one in found]):
        blocks = [block for each in side for block in each]
        assert len(set(blocks)) == len(blocks) == case.concurrency * LAYOUT.blocks_for(case.tokens)
        assert 0 <= min(blocks) <= max(blocks) < pool
    for one in found:
        assert [target for _, targets in one.ships for target in targets] == [*one.target]
        assert sum(span.nbytes for span in one.spans()) == len(one.target) * LAYOUT.block_bytes
        moved = {}
        for span in one.spans():
            for done in range(0, span.nbytes, LAYOUT.block_bytes):
                moved[(span.target + done) // LAYOUT.block_bytes] = (span.source + done) // LAYOUT.block_bytes
        assert moved == dict(zip(one.target, one.source, strict=True))
        chunks = -(-case.tokens // CHUNK_TOKENS) if case.way == "chunked" else 1
        assert len(one.ships) == chunks


def test_a_contiguous_transfer_is_one_span() -> None:
    case = Case(transport="tcp", tokens=500, table="contiguous", way="whole", concurrency=2)
    assert [len(one.spans()) for one in transfers(case, LAYOUT, 64, seed=0)] == [1, 1]


def test_the_grid_is_every_combination_but_chunked_ones_of_one_chunk() -> None:
    cases = grid().cases()
    assert len(cases) == len(set(cases)) == 2 + 4
    assert {case.way for case in cases if case.tokens == 16} == {"whole"}
    assert [case.way for case in grid(ways=("chunked",), tokens=(16,)).cases()] == ["chunked"] * 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": ()}, "tokens must name"),
        ({"tokens": (0,)}, "got 0"),
        ({"tokens": (MAX_TOKENS + 1,)}, f"got {MAX_TOKENS + 1}"),
        ({"concurrency": (1, 1000)}, "got 1000"),
    ],
)
def test_a_grid_names_the_value_that_is_wrong(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid(**changed)


def test_an_unknown_transport_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownTransport, match=r"'pigeon'.*tcp"):
        grid(transports=("pigeon",))


def test_a_pool_over_the_limit_names_the_case_and_both_sizes() -> None:
    cases = grid(tokens=(16, 1 << 10)).cases()
    needed = 2 * 64
    assert pool_blocks(cases, LAYOUT, limit=LAYOUT.pool_bytes(needed)) == needed
    with pytest.raises(ConfigError, match=r"1024 tokens, scattered.*--max-pool"):
        pool_blocks(cases, LAYOUT, limit=LAYOUT.pool_bytes(needed) - 1)


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("128k", 128 << 10), (" 2GiB ", 2 << 30), ("3 mb", 3 << 20), ("7B", 7)]
)
def test_counts_with_units(text: str, value: int) -> None:
    assert parse_count(text, field="x") == value
    assert parse_counts(f"{text},5", field="x") == (value, 5)


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "1t", "1,2", "9" * 20])
def test_what_is_no_count_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="x must be a number"):
        parse_count(text, field="x")


def test_choices() -> None:
    assert parse_choices("whole, chunked", WAYS, field="ways") == WAYS
    assert parse_choices("all", WAYS, field="ways") == WAYS
    with pytest.raises(ConfigError, match="ways must be of whole, chunked, got 'half'"):
        parse_choices("whole,half", WAYS, field="ways")


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("smollm2-135m", 23_040),
        ("llama-3-8b", 131_072),
        ("llama-3-70b-tp8", 40_960),
        ("deepseek-v2-lite", 31_104),
        ("blocks-64k", 4096),
    ],
)
def test_presets_have_the_bytes_of_their_models(model: str, bytes_per_token: int) -> None:
    assert layout_of(model, block_size=16).bytes_per_token == bytes_per_token


def test_a_directory_stands_for_its_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    layout = layout_of(str(tmp_path), block_size=8, dtype="float32")
    assert layout == KVLayout(num_layers=3, kv_heads=2, head_dim=16, block_size=8, dtype="float32")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointUnavailable, match=r"config\.json"):
        layout_of(str(tmp_path), block_size=8)


def test_an_unknown_model_is_told_the_presets() -> None:
    with pytest.raises(ConfigError, match=", ".join(PRESETS)):
        layout_of("gpt-9", block_size=16)
    with pytest.raises(ConfigError, match=r"dtype.*'int3'"):
        layout_of("llama-3-8b", block_size=16, dtype="int3")


def test_every_limit_is_explained() -> None:
    found = {
        limit_of(transport, same_host=same, perftest=perftest)
        for transport in ("tcp", "shm", *UCX_HELD)
        for same in (True, False)
        for perftest in (True, False)
    }
    assert found == set(LIMITS)


@pytest.mark.parametrize(
    ("transport", "same_host", "perftest", "limit"),
    [
        ("tcp", True, True, "socket"),
        ("ucx", True, True, "memcpy"),
        ("ucx:shm", True, True, "memcpy"),
        ("ucx:tcp", True, True, "ucx_perftest"),
        ("ucx:tcp", True, False, "socket"),
        ("ucx:tcp", False, True, "socket"),
        ("shm", False, True, "socket"),
    ],
)
def test_a_transport_is_held_against_its_own_road(transport: str, same_host: bool, perftest: bool, limit: str) -> None:
    assert limit_of(transport, same_host=same_host, perftest=perftest) == limit


def test_ucx_may_be_held_to_one_of_its_transports() -> None:
    held = {case.transport: (case.scheme, case.ucx_tls) for case in grid(transports=("ucx", *UCX_HELD, "tcp")).cases()}
    assert held == {
        "ucx": ("ucx", ""),
        "ucx:tcp": ("ucx", "tcp"),
        "ucx:shm": ("ucx", "shm"),
        "tcp": ("tcp", ""),
    }
    with pytest.raises(UnknownTransport, match=r"no transport 'ucx:rc'; known: .*ucx:shm, ucx:tcp"):
        grid(transports=("ucx:rc",))


def timings(ttft_s: float) -> Timings:
    return Timings(
        request_id="r1",
        attempts=1,
        cached_tokens=0,
        queue_s=0.0,
        prefill_s=0.25,
        handoff_s=0.0,
        ttft_s=ttft_s,
        decode_s=1.5,
        kv_blocks=1,
        kv_bytes=10**9,
        ship_s=0.5,
        transport="tcp",
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    )


def test_a_latency_row_is_of_medians() -> None:
    row = summary(16, [timings(value) for value in (1.0, 9.0, 2.0)], output_tokens=4)
    assert (row.prompt_tokens, row.ttft_ms, row.tpot_ms, row.gb_per_s) == (16, 2000.0, 500.0, 2.0)
    assert row.cached_tokens == 0


def test_prompts_longer_than_what_is_cached_are_measured_with_it_and_without() -> None:
    assert cases([16, 64], 0) == [(16, 0), (64, 0)]
    assert cases([16, 64, 900], 64) == [(16, 0), (64, 0), (900, 0), (900, 64)]
