"""Exhaustive search through small handoffs: every order, every place for a fault; each state must be able to drain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from handoff_faults import (
    AlwaysAnswers,
    CommitsOnTheHandover,
    CommitsWithTheWindowOpen,
    FreesWithTheWindowOpen,
    HasNoFence,
    LeavesItsReaderAlone,
    ReleasesInFlight,
    ShipsLayersTwice,
    ShipsWhatIsNotComputed,
    SpeaksForItsReader,
)
from handoff_pieces import Fault, Request
from handoff_search import explore
from handoff_world import World

LIMIT = 60_000


def world(
    tokens: int,
    first_block: int,
    attempts: int,
    budgets: dict[str, int],
    sizes: tuple[int, int] = (1, 1),
    *,
    layered: bool = False,
    **books: Callable[..., object],
) -> World:
    requests = {"a": Request(tokens, first_block)}
    pools = -(-max(2, tokens) // sizes[0]), -(-max(2, tokens) // sizes[1])
    settings = {"pools": pools, "attempts": attempts, "sizes": sizes, "layered": layered}
    return World(requests, budgets, **settings, **books)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "first_block", "attempts", "budgets"),
    [
        (2, 0, 1, {}),
        (2, 1, 1, {"forge": 1}),
        (2, 0, 1, {"drop": 2}),
        (2, 0, 1, {"break": 2}),
        (1, 0, 1, {"unanswer": 1, "drop": 1}),
        (1, 0, 1, {"unanswer": 1, "cancel": 1}),
        (1, 0, 1, {"duplicate": 1}),
        (1, 0, 1, {"cancel": 1, "drop": 1}),
        (1, 0, 1, {"crash": 1}),
        (1, 1, 1, {"cancel": 1}),
        pytest.param(1, 0, 2, {"drop": 1}, marks=pytest.mark.slow),
        pytest.param(1, 0, 1, {"time": 1}, marks=pytest.mark.slow),
        pytest.param(2, 0, 1, {"cancel": 1}, marks=pytest.mark.slow),
        pytest.param(1, 0, 1, {"cancel": 1, "crash": 1}, marks=pytest.mark.slow),
        pytest.param(1, 0, 2, {"break": 1}, marks=pytest.mark.slow),
    ],
)
def test_no_state_is_wrong_and_every_state_drains(
    tokens: int, first_block: int, attempts: int, budgets: dict[str, int]
) -> None:
    states, outcomes = explore(world(tokens, first_block, attempts, budgets), LIMIT)
    assert states > 50
    if attempts > 1 or not budgets.keys() - {"duplicate", "forge"}:
        # A duplicate or stale message changes nothing, and one more attempt makes good for any one fault.
        assert outcomes == {"done"}
    else:
        assert outcomes >= {"done", "over"}


@pytest.mark.parametrize(
    ("blocks", "first_block", "budgets"),
    [
        (1, 0, {}),
        (2, 1, {}),
        (1, 0, {"forge": 1, "drop": 1}),
        (1, 0, {"break": 1}),
        (1, 0, {"cancel": 1}),
        (1, 0, {"crash": 1}),
        (2, 0, {}),
    ],
)
def test_blocks_that_ship_by_layers(blocks: int, first_block: int, budgets: dict[str, int]) -> None:
    states, outcomes = explore(world(blocks, first_block, 1, budgets, layered=True), LIMIT)
    assert states > 50
    assert outcomes >= {"done"}


@pytest.mark.parametrize(
    ("sizes", "tokens", "first_block", "budgets"),
    [
        ((1, 2), 3, 0, {}),
        ((2, 1), 3, 0, {}),
        ((2, 3), 5, 1, {"drop": 1}),
        ((1, 2), 2, 0, {"break": 1}),
        ((2, 1), 2, 0, {"cancel": 1}),
    ],
)
def test_blocks_of_another_size_on_the_other_side(
    sizes: tuple[int, int], tokens: int, first_block: int, budgets: dict[str, int]
) -> None:
    states, outcomes = explore(world(tokens, first_block, 1, budgets, sizes), LIMIT)
    assert states > 50
    assert outcomes >= ({"done", "over"} if budgets else {"done"})


@pytest.mark.parametrize(
    ("books", "budgets", "complaint"),
    [
        ({"lease_book": ReleasesInFlight}, {"cancel": 1}, "ships a free block"),
        ({"lease_book": HasNoFence}, {"forge": 1}, "a stale "),
        ({"lease_book": AlwaysAnswers}, {"drop": 1}, "cannot drain"),
        ({"import_book": FreesWithTheWindowOpen}, {"cancel": 1}, "not its own"),
        ({"lease_book": SpeaksForItsReader}, {"unanswer": 1}, "reported as failed after its commit"),
        ({"lease_book": LeavesItsReaderAlone}, {"break": 1}, "is not told"),
        ({"import_book": CommitsOnTheHandover}, {}, "commits wrong bytes"),
        ({"import_book": CommitsWithTheWindowOpen}, {}, "commits with its window open"),
        ({"lease_book": ShipsWhatIsNotComputed}, {}, "while a ship reads it"),
        ({"lease_book": ShipsLayersTwice}, {}, "twice"),
    ],
)
def test_the_search_finds_a_planted_fault(
    books: dict[str, Callable[..., object]], budgets: dict[str, int], complaint: str
) -> None:
    with pytest.raises(Fault, match=complaint):
        explore(world(1, 0, 1, budgets, layered=True, **books), LIMIT)
