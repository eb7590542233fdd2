"""Plans between layouts that differ: they copy what a naive copy of single elements copies, in the fewest runs."""

from __future__ import annotations

import numpy as np
import pytest
from conversion_cases import POOL, Case, carry_out, carry_out_moves, cases, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.conversion import convert
from kv_transfer.plan import plan
from kv_transfer.shards import Share, heads_of, shares
from protocol.errors import IntegrityMismatch, LayoutMismatch
from protocol.layout import KVLayout
from protocol.wire_layout import WireDtype, WireLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")


def changed(**changes: object) -> KVLayout:
    return KVLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | changes)


@settings(deadline=None)
@given(cases())
def test_a_plan_copies_what_single_elements_copy(case: Case) -> None:
    found = case.plan()
    source, by_run, by_move, by_element = pool_of(case.source), *(pool_of(case.target, 2) for _ in range(3))
    untouched = pool_of(case.target, 2)
    carry_out(found, source, by_run)
    carry_out_moves(found, source, by_move)
    pairs = case.pairs()
    for origin, to in pairs:
        by_element[to] = source[origin]
    assert (by_run == by_element).all()
    assert (by_move == by_element).all()
    assert (by_run != untouched).sum() == len(pairs)


@settings(deadline=None)
@given(cases())
def test_runs_lie_in_the_pools_write_nothing_twice_and_are_fewest(case: Case) -> None:
    found = case.plan()
    runs = found.runs()
    pairs = case.pairs()
    assert runs[:, 2].sum() == len(pairs) == sum(int(np.prod(move.shape)) for move in found.moves)
    assert len({to for _, to in pairs}) == len(pairs)
    if not pairs:
        assert not found.spans()
        return
    assert runs.min() >= 0
    assert (runs[:, 0] + runs[:, 2]).max() <= pool_of(case.source).size
    assert (runs[:, 1] + runs[:, 2]).max() <= pool_of(case.target).size
    assert (runs[1:, 1] >= runs[:-1, 1] + runs[:-1, 2]).all()
    known = set(pairs)
    assert len(runs) == sum((origin - 1, to - 1) not in known for origin, to in pairs)
    size = case.source.itemsize
    assert [(span.source, span.target, span.nbytes) for span in found.spans()] == [
        tuple(size * value for value in run) for run in runs.tolist()
    ]


@settings(deadline=None)
@given(cases(sharded=False))
def test_there_and_back_is_the_same(case: Case) -> None:
    source, middle, again = pool_of(case.source), pool_of(case.target, 2), pool_of(case.source, 3)
    carry_out(case.plan(), source, middle)
    carry_out(case.plan(back=True), middle, again)
    wanted = [origin for origin, _ in case.pairs()]
    assert (again[wanted] == source[wanted]).all()
    assert (np.delete(again, wanted) == np.delete(pool_of(case.source, 3), wanted)).all()


@settings(deadline=None)
@given(cases())
def test_blocks_that_are_not_filled_are_named(case: Case) -> None:
    found = case.plan()
    per_block = WireLayout(case.target).elements
    written = np.bincount([to // per_block for _, to in case.pairs()], minlength=POOL)
    named = case.blocks(case.target, case.target_table)
    assert all(written[block] == per_block for block in named if block not in found.incomplete)
    if case.heads == heads_of(case.target.shard_index, case.target.shard_count, case.total_heads):
        short = [block for block in named if written[block] < per_block]
        assert sorted(found.incomplete) == sorted(short)


@settings(deadline=None)
@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.data(),
)
def test_every_wanted_head_is_shipped_by_one_shard_that_holds_it(
    source_count: int, target_count: int, total: int, data: st.DataObject
) -> None:
    if (total % source_count and source_count % total) or (total % target_count and target_count % total):
        with pytest.raises(LayoutMismatch, match=f"does not fit {total} KV heads"):
            shares(total, source_count, 0, target_count)
        return
    index = data.draw(st.integers(0, target_count - 1))
    found = shares(total, source_count, index, target_count)
    assert [head for share in found for head in share.heads] == list(heads_of(index, target_count, total))
    assert len({share.source_index for share in found}) == len(found)
    for share in found:
        assert set(share.heads) <= set(heads_of(share.source_index, source_count, total))


def test_holders_of_one_head_take_turns() -> None:
    assert [shares(2, 4, index, 4) for index in range(4)] == [
        (Share(0, range(1)),),
        (Share(1, range(1)),),
        (Share(2, range(1, 2)),),
        (Share(3, range(1, 2)),),
    ]
    assert [share.source_index for index in range(2) for share in shares(1, 4, index, 2)] == [0, 2]


def test_four_shards_fill_one() -> None:
    whole = changed(kv_heads=4)
    target = np.zeros(whole.pool_bytes(2) // 4, np.int64)
    for index in range(4):
        shard = changed(kv_heads=1, shard_index=index, shard_count=4)
        found = convert(shard, [1], WireLayout(whole), [1], range(4), total_heads=4)
        assert found.incomplete == (1,)
        carry_out(found, pool_of(shard, index + 1), target)
    assert (target[: target.size // 2] == 0).all()
    assert (target[target.size // 2 :] != 0).all()


def test_equal_layouts_give_the_plan_of_equal_layouts() -> None:
    source, target = [3, 4, 9, 5], [7, 8, 2, 9]
    found = convert(LAYOUT, source, WireLayout(LAYOUT), target, range(16))
    assert found.spans() == plan(LAYOUT, source, LAYOUT, target)


def test_adjacent_blocks_of_another_order_are_one_move() -> None:
    found = convert(LAYOUT, range(3, 103), WireLayout(changed(order="HND")), range(200, 300), range(400))
    assert len(found.moves) == 1
    assert found.moves[0].shape[0] == 100


@pytest.mark.parametrize("change", [{"num_layers": 3}, {"kv_heads": 1}, {"head_dim": 8}, {"shard_count": 2}])
def test_another_geometry_is_refused_with_both_values(change: dict[str, int]) -> None:
    ((field, value),) = change.items()
    with pytest.raises(LayoutMismatch, match=f"{field}: {getattr(LAYOUT, field)} here, {value} there"):
        convert(LAYOUT, [1], WireLayout(changed(**change)), [1], range(4))


@pytest.mark.parametrize(
    ("source", "target", "tokens", "words"),
    [
        ([1], [1, 2], range(4), "2 target blocks, 1 of 4 tokens"),
        ([1], [1], range(3, 6), "1 source blocks, 2 of 4 tokens"),
        ([1], [1], range(0), "1 source blocks, 0 of 4 tokens"),
        ([-1], [1], range(4), "source block -1 is negative"),
        ([1, 2], [1, 1], range(8), "named twice"),
        ([1], [1], range(0, 4, 2), "tokens must be a plain range"),
    ],
)
def test_lists_that_make_no_sense_are_refused(source: list[int], target: list[int], tokens: range, words: str) -> None:
    with pytest.raises(IntegrityMismatch, match=words):
        convert(LAYOUT, source, WireLayout(LAYOUT), target, tokens)


def test_layers_outside_the_model_are_refused() -> None:
    with pytest.raises(IntegrityMismatch, match="layers must be"):
        convert(LAYOUT, [1], WireLayout(LAYOUT), [1], range(4), layers=range(1, 3))


def test_a_conversion_of_elements_has_no_spans() -> None:
    found = convert(LAYOUT, [1], WireLayout(changed(dtype="bfloat16")), [1], range(4))
    with pytest.raises(LayoutMismatch, match="'float32' here, 'bfloat16' there"):
        found.spans()
    here, there = (changed(dtype="float8_e4m3", scales=(scale,) * 4) for scale in (0.5, 0.25))
    assert convert(here, [1], WireLayout(here), [1], range(4)).moves_only
    with pytest.raises(LayoutMismatch, match=r"scales: 0\.5 for K of layer 0 here, 0\.25 there"):
        convert(here, [1], WireLayout(there), [1], range(4)).spans()


def test_eight_bits_cross_an_eight_bit_wire_as_they_are() -> None:
    narrow = changed(dtype="float8_e4m3", scales=(0.5,) * 4)
    for wire in (WireLayout(narrow), WireLayout(narrow, "float8_e4m3")):
        assert (wire.as_in_pool, wire.scaled, wire.block_bytes) == (True, False, narrow.block_bytes)
    # To a pool of another type they are values like any: with a scale for each head of a block.
    assert WireLayout(changed(dtype="float8_e5m2"), "float8_e4m3").scaled
    assert not WireLayout(LAYOUT, "float8_e4m3").takes_as_they_are(narrow)


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16", "float8_e4m3"])
def test_bytes_of_a_wire_block(dtype: WireDtype | None) -> None:
    wire = WireLayout(LAYOUT, dtype)
    size = {None: 4, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}[dtype]
    assert wire.elements == 2 * 2 * 2 * 4 * 4
    assert wire.as_in_pool == (dtype in (None, "float32"))
    # Two layers, K and V, and two heads have a scale of four bytes each.
    assert wire.block_bytes == wire.elements * size + (32 if dtype == "float8_e4m3" else 0)
    assert wire.block_bytes % (16 if wire.scaled else 1) == 0
