"""The index against a dictionary of sets, whatever comes in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.errors import ConfigError
from router import native_search
from router.block_index import BlockIndex, Move, mark, rows_of
from router.block_slots import Array, ArraySearch, Run, Search, Slots, Values
from router.block_table import BlockTable
from router.native_search import NativeSearch, best_search

ROWS = 24
# Keys whose homes are all in one bucket, and such that are far apart.
KEYS = [*range(40), *((index << 58) + 7 for index in range(60))]


def keys(*wanted: int) -> np.ndarray:
    return np.array(wanted, dtype=np.uint64)


class InTurn:
    """Either search in its turn: what one puts down the other has to find."""

    def __init__(self) -> None:
        self._turns = cycle((best_search(), ArraySearch()))

    def locate(self, slots: Slots, keys: Array) -> np.ndarray:
        return next(self._turns).locate(slots, keys)

    def lead(self, slots: Slots, old: Slots | None, keys: Array) -> Iterable[Run]:
        return next(self._turns).lead(slots, old, keys)

    def insert(self, slots: Slots, keys: Array, values: Values) -> int:
        return next(self._turns).insert(slots, keys, values)


SEARCHES = {"native": best_search, "arrays": ArraySearch, "in turn": InTurn}


@pytest.fixture(params=SEARCHES.values(), ids=SEARCHES)
def search(request: pytest.FixtureRequest) -> Search:
    return request.param()


class IndexModel(RuleBasedStateMachine):
    search: Callable[[], Search] = best_search

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(type(self).search())
        self.model: dict[int, set[int]] = {}

    @rule(row=st.integers(0, ROWS - 1), wanted=st.lists(st.sampled_from(KEYS), max_size=30))
    def store(self, row: int, wanted: list[int]) -> None:
        self.index.store(row, keys(*wanted))
        for key in wanted:
            self.model.setdefault(max(key, 1), set()).add(row)

    @rule(row=st.integers(0, ROWS - 1), wanted=st.lists(st.sampled_from(KEYS), max_size=30))
    def remove(self, row: int, wanted: list[int]) -> None:
        self.index.remove(row, keys(*wanted))
        for key in wanted:
            self.model.get(max(key, 1), set()).discard(row)

    @rule(
        moves=st.lists(
            st.tuples(st.integers(0, ROWS - 1), st.lists(st.sampled_from(KEYS), max_size=12), st.booleans()),
            min_size=1,
            max_size=6,
        )
    )
    def change(self, moves: list[tuple[int, list[int], bool]]) -> None:
        """Several at once, which may name the same keys."""
        self.index.change([Move(row, keys(*wanted), stored) for row, wanted, stored in moves])
        for row, wanted, stored in moves:
            for key in wanted:
                rows = self.model.setdefault(max(key, 1), set())
                rows.add(row) if stored else rows.discard(row)

    @rule(row=st.integers(0, ROWS - 1))
    def drop(self, row: int) -> None:
        self.index.drop(row)
        for rows in self.model.values():
            rows.discard(row)

    @rule(count=st.integers(100, 1500), row=st.integers(0, ROWS - 1))
    def crowd(self, count: int, row: int) -> None:
        """So many at once that tables are moved."""
        wanted = (np.arange(count, dtype=np.uint64) + np.uint64(1000)) * np.uint64(0x9E3779B97F4A7C15)
        self.index.store(row, wanted)
        self.index.remove(row, wanted)

    @rule(chain=st.lists(st.sampled_from(KEYS), max_size=12), among=st.integers(0, (1 << ROWS) - 1))
    def depths(self, chain: list[int], among: int) -> None:
        known = np.maximum(keys(*chain), 1)
        found = np.zeros(ROWS)
        for bits, blocks in self.index.depths([known[:5], known[5:]], among):
            mark(found, bits, blocks)
            assert not set(rows_of(bits)) - {row for row in range(ROWS) if among >> row & 1}
        for row in range(ROWS):
            depth = 0
            while among >> row & 1 and depth < len(chain) and row in self.model.get(max(chain[depth], 1), ()):
                depth += 1
            assert found[row] == depth

    @invariant()
    def counts(self) -> None:
        assert self.index.holdings == sum(map(len, self.model.values()))
        assert self.index.blocks == sum(bool(rows) for rows in self.model.values())


class ByArrays(IndexModel):
    search = ArraySearch


class ByEither(IndexModel):
    search = InTurn


TestIndex = IndexModel.TestCase
TestByArrays = ByArrays.TestCase
TestByEither = ByEither.TestCase
for case in (TestIndex, TestByArrays, TestByEither):
    case.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_here_keys_are_found_natively() -> None:
    assert isinstance(best_search(), NativeSearch)


def test_without_a_compiler_arrays_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("the index of blocks needs a C compiler", field="PATH")

    monkeypatch.setattr(native_search, "compiled", refuse)
    native_search.library.cache_clear()
    try:
        assert [type(best_search()) for _ in range(2)] == [ArraySearch, ArraySearch]
    finally:
        native_search.library.cache_clear()
    (told,) = caplog.messages
    assert "slower" in told
    assert "compiler" in told


def test_keys_need_not_lie_in_a_row(search: Search) -> None:
    index, chain = BlockIndex(search), np.arange(1, 201, dtype=np.uint64)
    index.store(3, chain[::2])
    assert [*index.depths([chain[::2]], 1 << 3)] == [(1 << 3, 100)]
    assert index.depths([chain], 1 << 3) == [(1 << 3, 1)]
    index.remove(3, chain[::-2])
    assert index.holdings == 100
    index.remove(3, chain[::2][::-1])
    assert not index.holdings


def test_a_long_prompt_is_found_whole_and_as_far_as_it_goes(search: Search) -> None:
    """Longer than what any part of it was looked up with before, with other workers in it, and a gap."""
    index = BlockIndex(search)
    chain = (np.arange(5000, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    index.store(0, chain)
    for row in (1, 2):
        index.store(row, chain[: 1500 * row])
    index.remove(0, chain[4000:4001])
    assert index.depths([chain[:64], chain[64:]], 7) == [(1 << 1, 1500), (1 << 2, 3000), (1 << 0, 4000)]


def test_a_table_that_grows_step_by_step_loses_nothing(search: Search) -> None:
    table = BlockTable(lambda values: np.ones(len(values), dtype=bool), search)
    rng = np.random.default_rng(3)
    model: dict[int, int] = {}
    for _ in range(120):
        fresh = np.unique(rng.integers(1, 1 << 63, 100, dtype=np.uint64))
        values = rng.integers(1, 1 << 31, len(fresh)).astype(np.uint32)
        gone = np.array(list(model)[:: len(model) // 40 + 1] if len(model) > 4000 else [], dtype=np.uint64)
        for each, numbers in ((fresh, values), (gone, np.zeros(len(gone), dtype=np.uint32))):
            table.make_room(len(each), len(model))
            table.assign(each, table.locate(each), numbers)
        model.update(zip(fresh.tolist(), values.tolist(), strict=True))
        for key in gone.tolist():
            del model[key]
    assert len(table) == len(model)
    assert table.locate(np.array(list(model), dtype=np.uint64)).values.tolist() == list(model.values())
    assert not table.locate(rng.integers(1, 1 << 63, 500, dtype=np.uint64)).values.any()


@pytest.mark.parametrize("holders", [1, 2])
def test_a_block_takes_forty_bytes_at_most(holders: int) -> None:
    index = BlockIndex()
    rng = np.random.default_rng(1)
    worst = 0.0
    for prompt in range(600):
        chain = rng.integers(1, 1 << 64, 64, dtype=np.uint64)
        for holder in range(holders):
            index.store((prompt * 7 + holder * 501) % 1000, chain)
        if prompt > 100 and prompt % 8 == 0:
            worst = max(worst, index.nbytes / index.holdings)
    assert worst <= 40


def test_a_worker_that_is_dropped_leaves_room() -> None:
    index = BlockIndex()
    for turn in range(40):
        index.store(turn % 2, np.arange(1, 5000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(turn))
        index.drop(turn % 2)
    assert index.holdings == index.blocks == 0
    assert index.nbytes < 40 * 20_000
