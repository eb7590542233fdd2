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


def test_only_new_keys_each_once_may_be_opened() -> None:
    book = ForkBook()
    assert book.newcomers(FIRST, FORKS) == KEYS
    assert book.newcomers(FIRST, (*FORKS, FORKS[1])) == KEYS, "a fork named twice"
    assert book.newcomers(FORKS[0].key, FORKS) == KEYS[1:], "the first among its forks"
    assert book.newcomers(FIRST, FORKS, {FORKS[2].key}) == KEYS[:3]
    book.open(FIRST, FORKS)
    other = RequestKey("b", 0)
    assert book.newcomers(other, FORKS[:1]) == (other,), "a fork of another prompt"
    assert book.newcomers(FORKS[0].key, ()) == ()
    book.close(FIRST)
    assert book.newcomers(other, FORKS[:1]) == (other, FORKS[0].key)


openings = st.tuples(st.sampled_from(KEYS), st.lists(st.sampled_from(FORKS), max_size=4))


@given(st.lists(openings, max_size=4, unique_by=lambda opening: opening[0]), st.data())
def test_whatever_is_opened_is_closed(opened: list[tuple[RequestKey, list[Fork]]], data: st.DataObject) -> None:
    """Keys named twice are refused before they come here; were they not, the book would still hold."""
    book = ForkBook()
    for first, forks in opened:
        book.open(first, forks)
    for first, _ in data.draw(st.permutations(opened)):
        book.drop(first)
        book.close(first)
    assert len(book) == 0
    assert [book.first_of(key) for key in KEYS] == list(KEYS)


def test_a_fork_draws_as_the_first_does_but_by_its_own_seed() -> None:
    first = SamplingParams(temperature=0.7, seed=5, max_tokens=9)
    assert FORKS[2].sampling(first) == SamplingParams(temperature=0.7, seed=2, max_tokens=9)
