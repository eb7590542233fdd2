"""How long a draft is, by how earlier ones did; and the settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.drafter import PROBE, WORTH, Drafter
from decode_worker.speculation import Speculation
from protocol.errors import ConfigError

REPEATING = [1, 2, 3, 4, 5] * 4


def drafter(tokens: int = 8) -> Drafter:
    return Drafter(Speculation(tokens=tokens), REPEATING)


def test_what_repeats_is_drafted_in_full_once_it_has_been_right() -> None:
    subject = drafter()
    for _ in range(10):
        draft = subject.propose(REPEATING, 100)
        assert draft == (1, 2, 3, 4, 5, 1, 2, 3)[: len(draft)]
        subject.judge(len(draft), len(draft))
    assert len(draft) == 8
    assert subject.propose(REPEATING, 3) == (1, 2, 3), "no more than there is room for"
    assert subject.propose(REPEATING, 0) == ()


def test_a_thousand_right_drafts_are_as_good_as_ten() -> None:
    subject = drafter()
    for _ in range(5000):
        subject.judge(8, 8)
    assert subject.length == 8


def test_where_drafts_are_wrong_they_all_but_cease_and_come_back_when_they_are_right() -> None:
    subject = drafter()
    while subject.length:
        subject.judge(1, 0)
    drafted = [len(subject.propose(REPEATING, 100)) for _ in range(10 * PROBE)]
    assert sorted(drafted) == [0] * (10 * PROBE - 10) + [1] * 10
    for _ in range(12):
        drafted = [len(subject.propose(REPEATING, 100)) for _ in range(PROBE)]
        subject.judge(max(drafted), max(drafted))
    assert subject.length == 8


@given(outcomes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=40))
def test_the_last_token_of_a_draft_is_always_worth_it(outcomes: list[tuple[int, int]]) -> None:
    subject = drafter()
    for drafted, accepted in outcomes:
        subject.judge(drafted, min(drafted, accepted))
        chance = subject._right / (subject._right + subject._wrong)
        length = subject.length
        assert length == 8 or chance ** (length + 1) < WORTH
        assert length == 0 or chance**length >= WORTH * (1 - 1e-9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "medusa"),
        ("tokens", 0),
        ("tokens", 65),
        ("tokens", True),
        ("tokens", 2.5),
        ("min_match", 0),
        ("max_match", 65),
        ("max_match", 1),
    ],
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=repr(value)) as caught:
        Speculation(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
