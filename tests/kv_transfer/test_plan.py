"""The block plan: applying it equals copying block by block, with the fewest spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import plan
from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch, LayoutMismatch
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=1, dtype="float16", order="NHD")
BLOCK = LAYOUT.block_bytes
POOL = 24


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(0, POOL))
    target = draw(st.permutations(range(POOL)))[:count]
    shift = draw(st.integers(-3, 3))
    near = [min(max(block + shift, 0), POOL - 1) for block in target]
    far = draw(st.lists(st.integers(0, POOL - 1), min_size=count, max_size=count))
    pick = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return [n if p else f for n, f, p in zip(near, far, pick, strict=True)], target


@given(block_lists(), st.integers(1, 6))
def test_spans_copy_what_block_by_block_copies_and_are_fewest(lists: tuple[list[int], list[int]], longest: int) -> None:
    source_blocks, target_blocks = lists
    spans = plan(LAYOUT, source_blocks, LAYOUT, target_blocks, max_span_bytes=longest * BLOCK)
    source = np.arange(POOL * BLOCK, dtype=np.uint8) + 1
    by_span, by_block = np.zeros(POOL * BLOCK, np.uint8), np.zeros(POOL * BLOCK, np.uint8)
    writes = np.zeros(POOL * BLOCK, np.int64)
    for span in spans:
        by_span[span.target : span.target + span.nbytes] = source[span.source : span.source + span.nbytes]
        writes[span.target : span.target + span.nbytes] += 1
    for origin, to in zip(source_blocks, target_blocks, strict=True):
        by_block[to * BLOCK : (to + 1) * BLOCK] = source[origin * BLOCK : (origin + 1) * BLOCK]
    assert (by_span == by_block).all()
    assert writes.max() <= 1
    assert writes.sum() == len(target_blocks) * BLOCK
    assert all(span.nbytes <= longest * BLOCK for span in spans)
    pairs = set(zip(source_blocks, target_blocks, strict=True))
    fewest = 0
    for origin, to in pairs:
        if (origin - 1, to - 1) not in pairs:
            run = 1
            while (origin + run, to + run) in pairs:
                run += 1
            fewest += -(-run // longest)
    assert len(spans) == fewest


def test_reversed_neighbours_are_one_span() -> None:
    assert plan(LAYOUT, [3, 2, 1], LAYOUT, [7, 6, 5]) == [Span(BLOCK, 5 * BLOCK, 3 * BLOCK)]


def test_a_block_longer_than_the_bound_is_one_span() -> None:
    assert plan(LAYOUT, [1, 2], LAYOUT, [3, 4], max_span_bytes=1) == [
        Span(BLOCK, 3 * BLOCK, BLOCK),
        Span(2 * BLOCK, 4 * BLOCK, BLOCK),
    ]


def test_nothing_to_ship_is_no_span() -> None:
    assert plan(LAYOUT, [], LAYOUT, []) == []


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 2), ("order", "HND"), ("dtype", "bfloat16"), ("kv_heads", 4), ("head_dim", 8)]
)
def test_a_layout_that_differs_is_refused_with_both_values(field: str, value: object) -> None:
    other = KVLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {field: value})
    with pytest.raises(LayoutMismatch) as caught:
        plan(LAYOUT, [1], other, [1])
    assert field in caught.value.message
    assert repr(getattr(LAYOUT, field)) in caught.value.message
    assert repr(value) in caught.value.message


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [([1], [1, 2], "1 source blocks for 2"), ([1, 2], [5, 5], "5 is named twice"), ([-1], [1], "source must lie")],
)
def test_block_lists_that_make_no_sense_are_refused(source: list[int], target: list[int], words: str) -> None:
    with pytest.raises(IntegrityMismatch, match=words):
        plan(LAYOUT, source, LAYOUT, target)


@pytest.mark.parametrize("values", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 1 << 62)])
def test_a_span_out_of_bounds_names_the_field(values: tuple[int, int, int]) -> None:
    with pytest.raises(IntegrityMismatch) as caught:
        Span(*values)
    assert caught.value.field in ("source", "target", "nbytes")
