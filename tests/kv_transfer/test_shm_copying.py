"""Copying runs out of a peer's memory: every byte that was asked for, and no other, past the caches or through them."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.shm import copying
from kv_transfer.shm.copying import STREAM_BYTES, SUMMED_BYTES, HostCopier, Run, batches
from protocol.errors import ConfigError

PAGE = 4096
ROOM = 4 * SUMMED_BYTES


def pool(nbytes: int) -> mmap.mmap:
    descriptor = os.memfd_create("pool")
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def copied(runs: Sequence[Run], *, offset: int = 0, summed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What lies in a target after a batch, and what should."""
    source = np.random.default_rng(1).integers(0, 256, ROOM, dtype=np.uint8)
    mapping = pool(ROOM)
    mapping[:] = source.tobytes()
    # Targets lie anywhere, not only where a page begins.
    whole = np.full(ROOM + offset, 0xA5, np.uint8)
    expected = whole.copy()
    for start, target, nbytes in runs:
        expected[offset + target : offset + target + nbytes] = source[start : start + nbytes]
    copier = HostCopier(mapping, memoryview(whole)[offset:])
    copier.copy(runs, summed=summed)
    copier.release()
    return whole, expected


@st.composite
def scattered(draw: st.DrawFn) -> list[Run]:
    """Runs whose targets lie apart; sources may lie anywhere."""
    sizes = draw(st.lists(st.integers(0, 130) | st.integers(0, 200 << 10) | st.just(64 << 10), min_size=1, max_size=12))
    runs, at = [], 0
    for size in sizes:
        at += draw(st.integers(0, 200))
        runs.append((draw(st.integers(0, ROOM - size)), at, size))
        at += size
    return draw(st.permutations(runs))


@settings(deadline=None)  # the first example may build the library
@given(runs=scattered(), offset=st.integers(0, 80), past=st.booleans())
def test_every_byte_and_no_other(runs: list[Run], offset: int, past: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "STREAM_BYTES", 0 if past else ROOM)
        whole, expected = copied(runs, offset=offset)
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    "cut", [[SUMMED_BYTES], [STREAM_BYTES, 3, PAGE], [SUMMED_BYTES - 1, 1], [64 << 10] * 16, [1] * 700]
)
def test_batches_of_every_size(cut: list[int], summed: bool) -> None:
    starts = np.cumsum([0, *cut[:-1]])
    runs = [(int(at) + 11, int(at) + 7, nbytes) for at, nbytes in zip(starts, cut, strict=True)]
    whole, expected = copied(runs, summed=summed)
    np.testing.assert_array_equal(whole, expected)


def test_without_a_compiler_it_copies_run_by_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object, **__: object) -> None:
        raise ConfigError("shm needs a C compiler", field="PATH")

    monkeypatch.setattr(copying, "compiled", none)
    copying.load_copies.cache_clear()
    try:
        for _ in range(2):
            whole, expected = copied([(5, 9, SUMMED_BYTES // 2), (PAGE, SUMMED_BYTES, 77)])
            np.testing.assert_array_equal(whole, expected)
    finally:
        copying.load_copies.cache_clear()
    assert [record.message for record in caplog.records] == [
        "shared memory is copied run by run, which is slower: shm needs a C compiler"
    ]


@given(runs=scattered(), longest=st.integers(1 << 10, 1 << 20))
def test_batches_hold_all_in_order(runs: list[Run], longest: int) -> None:
    cut = list(batches(runs, longest))
    assert all(sum(nbytes for _, _, nbytes in batch) <= longest for batch in cut)
    pieces = [piece for batch in cut for piece in batch]
    for source, target, nbytes in runs:
        left = nbytes
        while left:
            assert pieces[0][:2] == (source + nbytes - left, target + nbytes - left)
            left -= pieces.pop(0)[2]
    assert not pieces
