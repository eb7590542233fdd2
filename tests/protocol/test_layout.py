from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import layouts

from protocol.errors import ConfigError
from protocol.layout import PADDING_BLOCK, KVLayout


def layout(**changes: object) -> KVLayout:
    return KVLayout(**{"num_layers": 4, "kv_heads": 2, "head_dim": 8, "block_size": 4, **changes})  # type: ignore[arg-type]


def test_the_cache_of_a_70b_model() -> None:
    llama_70b = KVLayout(num_layers=80, kv_heads=8, head_dim=128, block_size=16, dtype="float16")
    assert llama_70b.bytes_per_token * 4096 == 1_342_177_280


def test_the_cache_of_64_layers_over_16k_tokens() -> None:
    deep = KVLayout(num_layers=64, kv_heads=8, head_dim=128, block_size=16, dtype="float16")
    assert deep.bytes_per_token * 16_384 == 4_294_967_296
    assert deep.pool_bytes(deep.blocks_for(16_384)) == 4_294_967_296


def test_one_layers_block() -> None:
    wide = KVLayout(num_layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="float16")
    assert wide.layer_bytes == 65_536
    assert wide.half_bytes == 32_768


def test_a_block_of_llama_3_8b_is_two_mebibytes() -> None:
    assert KVLayout(num_layers=32, kv_heads=8, head_dim=128, block_size=16).block_bytes == 2 << 20


def test_the_slot_of_a_token() -> None:
    assert layout(block_size=4).slot([7, 3, 12], 6) == 14


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True), st.integers(1, 33))
def test_no_two_tokens_share_a_slot(table: list[int], block_size: int) -> None:
    shaped = layout(block_size=block_size)
    slots = [shaped.slot(table, position) for position in range(len(table) * block_size)]
    assert len(set(slots)) == len(slots)
    assert {slot // block_size for slot in slots} == set(table)
    assert PADDING_BLOCK not in {slot // block_size for slot in slots}


@given(layouts, st.integers(1, 64))
def test_the_arithmetic_agrees_with_itself(shaped: KVLayout, num_blocks: int) -> None:
    assert shaped.block_bytes == shaped.bytes_per_token * shaped.block_size
    assert math.prod(shaped.pool_shape(num_blocks)) * shaped.itemsize == shaped.pool_bytes(num_blocks)
    assert shaped.block_span(num_blocks - 1)[0] + shaped.block_bytes == shaped.pool_bytes(num_blocks)


def test_layer_ranges_tile_a_block() -> None:
    shaped = layout()
    start, size = shaped.block_span(5)
    spans = [shaped.block_span(5, layers=range(i, i + 1)) for i in range(4)]
    assert [offset for offset, _ in spans] == [start + i * shaped.layer_bytes for i in range(4)]
    assert sum(nbytes for _, nbytes in spans) == size
    assert shaped.block_span(5, layers=range(1, 3)) == (spans[1][0], 2 * shaped.layer_bytes)


@pytest.mark.parametrize("layers", [range(0, 4, 2), range(-1, 2), range(2, 5)])
def test_a_layer_range_outside_the_block_is_refused(layers: range) -> None:
    with pytest.raises(ConfigError, match="layers"):
        layout().block_span(0, layers=layers)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert layout(block_size=4).blocks_for(tokens) == blocks


def test_the_orders_differ_in_shape_alone() -> None:
    assert layout(order="HND").inner_shape() == (2, 4, 8)
    assert layout(order="NHD").inner_shape() == (4, 2, 8)
    assert layout(order="HND").block_bytes == layout(order="NHD").block_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("kv_heads", 0),
        ("head_dim", -8),
        ("block_size", 0),
        ("dtype", "int8"),
        ("order", "DHN"),
        ("shard_count", 0),
        ("shard_index", 1),
        ("shard_index", -1),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} .*{value}") as caught:
        layout(**{field: value})
    assert caught.value.field == field


@given(layouts, layouts)
def test_fingerprints_are_equal_for_equal_layouts_alone(left: KVLayout, right: KVLayout) -> None:
    assert (left.fingerprint() == right.fingerprint()) == (left == right)
    assert bool(left.differences(right)) == (left != right)


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from protocol.layout import KVLayout;"
        "print(KVLayout(num_layers=4, kv_heads=2, head_dim=8, block_size=4).fingerprint())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == layout().fingerprint()


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_an_eight_bit_cache_is_half_of_a_bfloat16_one(dtype: str) -> None:
    assert 2 * layout(dtype=dtype).block_bytes == layout().block_bytes
    scaled = layout(dtype=dtype, scales=(0.5, 2.0) * 4)
    assert scaled.block_bytes == layout(dtype=dtype).block_bytes
    assert [scaled.scales_of(layer) for layer in (0, 3)] == [(0.5, 2.0)] * 2
    assert layout(dtype=dtype).scales_of(3) == (1.0, 1.0)
    assert not scaled.same_elements(layout(dtype=dtype))
    assert scaled.same_elements(layout(dtype=dtype, scales=(0.5, 2.0) * 4, block_size=8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scales": (1.0,) * 8}, "float8_e4m3 or float8_e5m2, got 'bfloat16'"),
        ({"dtype": "float8_e4m3", "scales": (1.0,) * 7}, "4 layers, got 7"),
        ({"dtype": "float8_e4m3", "scales": (*(1.0,) * 7, 0.0)}, "got 0.0"),
        ({"dtype": "float8_e4m3", "scales": (*(1.0,) * 7, -2.0)}, "got -2.0"),
        ({"dtype": "float8_e4m3", "scales": (*(1.0,) * 7, math.nan)}, "got nan"),
        ({"dtype": "float8_e4m3", "scales": (*(1.0,) * 7, math.inf)}, "got inf"),
    ],
)
def test_wrong_scales_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^scales .*{said}") as caught:
        layout(**changes)
    assert caught.value.field == "scales"


def test_of_scales_that_differ_the_first_is_named() -> None:
    here, there = (layout(dtype="float8_e4m3", scales=(*(1.0,) * 5, last, 0.5, 2.0)) for last in (0.25, 4.0))
    assert here.differences(there) == ["scales: 0.25 for V of layer 2 here, 4 there"]
    assert here.geometry_differences(there) == []


def test_differences_name_both_values() -> None:
    lines = layout().differences(layout(block_size=8, dtype="float32"))
    assert lines == ["block_size: 4 here, 8 there", "dtype: 'bfloat16' here, 'float32' there"]
