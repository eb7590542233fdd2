"""Where the last tokens stood before, against a search through the whole text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import ngram_index
from decode_worker.ngram_index import NgramIndex


def searched(text: list[int], count: int, shortest: int, longest: int) -> tuple[int, ...]:
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return tuple(grown[len(text) :])
    return ()


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    asked_at=st.sets(st.integers(1, 60)),
    count=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_the_longest_match_is_found_and_the_latest_of_them(
    text: list[int], asked_at: set[int], count: int, sizes: tuple[int, int]
) -> None:
    shortest, longest = sizes[0], sum(sizes)
    index = NgramIndex(shortest, longest)
    # Whenever it was asked before, and so learned what there was, the answer is that of a search.
    for length in sorted({*asked_at, len(text)}):
        if length <= len(text):
            known = text[:length]
            assert index.continuation(known, count) == searched(known, count, shortest, longest)


def test_memory_is_bounded_and_what_is_near_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "SPAN", 64)
    rng = random.Random(1)
    index, text, most = NgramIndex(2, 4), [rng.randrange(1 << 20) for _ in range(500)], 0
    index.learn(text)
    for _ in range(400):
        back = rng.randrange(5, 64)
        # A run of the last tokens comes again: what followed it follows again.
        start = len(text) - back
        text += text[start : start + 4]
        assert index.continuation(text, 1) == searched(text, 1, 2, 4) != ()
        text += [rng.randrange(1 << 20) for _ in range(rng.randrange(1, 20))]
        index.learn(text)
        most = max(most, len(index))
    # Two generations of runs of three sizes, and what one question adds.
    assert most <= (2 * 64 + 24) * 3


def test_a_long_prompt_is_learned_from_its_end() -> None:
    text = list(range(3 * ngram_index.SPAN))
    index = NgramIndex(2, 4)
    index.learn(text)
    assert len(index) <= 3 * ngram_index.SPAN
    far, near = text[100:104], text[-ngram_index.SPAN + 10 : -ngram_index.SPAN + 14]
    assert index.continuation([*text, *far], 2) == ()
    assert index.continuation([*text, *far, *near], 2) == (near[-1] + 1, near[-1] + 2)
