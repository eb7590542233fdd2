from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from protocol import histogram as histogram_module
from protocol.codec import HEADER, decode, encode
from protocol.errors import ConfigError, MalformedFrame
from protocol.histogram import BYTES, BYTES_PER_SECOND, MAX_BUCKETS, SECONDS, SPANS, Histogram, Observations, Scale
from protocol.ids import Peer
from protocol.layout import KVLayout
from protocol.messages import Heartbeat, PoolCounts, WorkerLoad, WorkerProfile
from protocol.transfer_counts import SCALES, PathCounts, TransferCounts

ALL = (SECONDS, BYTES, SPANS, BYTES_PER_SECOND)


def observed(scale: Scale, *values: float) -> Histogram:
    observations = Observations(scale)
    for value in values:
        observations.add(value)
    return observations.histogram()


def test_every_scale_is_looked_at() -> None:
    found = [value for value in vars(histogram_module).values() if isinstance(value, Scale)]
    assert {scale.unit for scale in found} == {scale.unit for scale in ALL}
    assert set(map(id, SCALES.values())) <= set(map(id, ALL))


@pytest.mark.parametrize("scale", ALL, ids=lambda scale: scale.unit)
def test_the_bounds_make_sense(scale: Scale) -> None:
    assert all(math.isfinite(bound) and bound > 0 for bound in scale.bounds)
    steps = [after / before for before, after in itertools.pairwise(scale.bounds)]
    assert all(1.5 <= step <= 4.0 for step in steps), "a quantile is off by less than that factor"
    assert len(scale.bounds) + 1 <= MAX_BUCKETS


@pytest.mark.parametrize(
    ("scale", "least", "most"),
    [
        (SECONDS, 40e-6, 60.0),  # a block through shared memory; a lease of twice the default
        (BYTES, 8 << 10, 2 << 30),  # a block of a small model; a long prompt of a large one, in one ship
        (SPANS, 1, 2048),
        (BYTES_PER_SECOND, 5e6, 2e11),  # a block over a slow link; a link of the next years
    ],
    ids=lambda value: value.unit if isinstance(value, Scale) else "",
)
def test_what_is_to_be_expected_falls_between_the_bounds(scale: Scale, least: float, most: float) -> None:
    assert scale.bounds[0] < least or scale.bounds[0] == least == 1
    assert most < scale.bounds[-1]


@given(st.lists(st.sampled_from([*SECONDS.bounds, 0.0, 1e9]) | st.floats(0.0, 200.0), max_size=30))
def test_values_fall_where_prometheus_puts_them(values: list[float]) -> None:
    registry = CollectorRegistry()
    reference = Reference("h", "of the library itself", buckets=SECONDS.bounds, registry=registry)
    for value in values:
        reference.observe(value)
    mine = observed(SECONDS, *values)
    (family,) = registry.collect()
    buckets = [sample.value for sample in family.samples if sample.name == "h_bucket"]
    assert list(itertools.accumulate(mine.counts)) == buckets
    assert mine.count == registry.get_sample_value("h_count") == len(values)
    assert mine.total == registry.get_sample_value("h_sum")


@given(st.lists(st.integers(0, 1 << 33)), st.lists(st.integers(0, 1 << 33)))
def test_a_sum_is_what_one_would_have_seen(one: list[int], other: list[int]) -> None:
    both = observed(BYTES, *one).plus(observed(BYTES, *other))
    assert both == observed(BYTES, *one, *other)
    assert Histogram().plus(both) == both.plus(Histogram()) == both


def test_other_buckets_than_the_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="ship_bytes must have 12 buckets, or none, got 3") as caught:
        PathCounts(ship_bytes=Histogram((1, 2, 3), 6.0))
    assert caught.value.field == "ship_bytes"


def heartbeat(path: PathCounts) -> Heartbeat:
    profile = WorkerProfile(
        role="prefill",
        model="m",
        vocab_size=9,
        max_model_len=9,
        layout=KVLayout(num_layers=1, kv_heads=1, head_dim=1, block_size=1),
        num_blocks=9,
    )
    pool = PoolCounts(**dict.fromkeys(PoolCounts.__struct_fields__, 0))
    return Heartbeat(profile, WorkerLoad(pool=pool), TransferCounts(paths={"tcp": path}))


def test_a_frame_with_other_buckets_is_refused_and_a_heartbeat_stays_small() -> None:
    full = {name: observed(scale, *scale.bounds) for name, scale in SCALES.items()}
    frame = encode(Peer("p", 1), heartbeat(PathCounts(**full)))
    assert len(frame) < 2000
    assert decode(frame).body == heartbeat(PathCounts(**full))
    spoiled = msgspec.msgpack.decode(frame[len(HEADER) :])
    spoiled[1]["transfer"]["paths"]["tcp"]["settle"][0].append(1)
    with pytest.raises(MalformedFrame, match="settle must have"):
        decode(HEADER + msgspec.msgpack.encode(spoiled))
