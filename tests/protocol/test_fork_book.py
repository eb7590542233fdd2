"""Which continuations of a prompt are still wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.forks import Fork, ForkBook
from protocol.ids import RequestKey
from protocol.sampling import SamplingParams

FIRST = RequestKey("a", 0)
FORKS = tuple(Fork(RequestKey(f"a{index}", 0), index) for index in range(3))
KEYS = (FIRST, *(fork.key for fork in FORKS))


def test_a_key_that_is_not_in_the_book_stands_for_itself() -> None:
    book = ForkBook()
    book.open(FIRST, ())
    assert (len(book), book.first_of(FIRST), book.wanted(FIRST), book.drop(FIRST)) == (0, FIRST, (FIRST,), True)
    assert book.close(FIRST) == (FIRST,)


@given(st.permutations(KEYS))
def test_only_the_last_one_dropped_ends_the_prompt(order: list[RequestKey]) -> None:
    book = ForkBook()
    book.open(FIRST, FORKS)
    for index, key in enumerate(order):
        assert book.first_of(key) == FIRST
        assert set(book.wanted(FIRST)) == set(order[index:])
        assert book.drop(key) is (key == order[-1])
        assert book.drop(key) is (key == order[-1]), "a second drop says the same"
    assert book.close(FIRST) == ()
    assert len(book) == 0


def test_what_is_closed_is_forgotten() -> None:
    book = ForkBook()
    book.open(FIRST, FORKS)
    book.drop(FORKS[1].key)
    assert book.close(FIRST) == (FIRST, FORKS[0].key, FORKS[2].key)
    assert [book.first_of(key) for key in KEYS] == list(KEYS)
    assert len(book) == 0


def test_a_fork_draws_as_the_first_does_but_by_its_own_seed() -> None:
    first = SamplingParams(temperature=0.7, seed=5, max_tokens=9)
    assert FORKS[2].sampling(first) == SamplingParams(temperature=0.7, seed=2, max_tokens=9)
