"""Random walks through the handoff: two books, a lossy wire, tiny pools, crashes, cancels. Failures name their seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import handoff_choices as choices
import pytest
from handoff_choices import progress
from handoff_faults import (
    AlwaysAnswers,
    CommitsOnTheHandover,
    CommitsWithTheWindowOpen,
    FreesWithTheWindowOpen,
    HasNoFence,
    ReleasesInFlight,
    ShipsLayersTwice,
    ShipsWhatIsNotComputed,
    SpeaksForItsReader,
)
from handoff_pieces import Fault, Request
from handoff_world import World

from kv_transfer.imports import ImportBook
from kv_transfer.lease import LeaseBook
from protocol.errors import KVFerryError

FAULTS = {"drop": 4, "duplicate": 3, "forge": 6, "break": 2, "unanswer": 2, "cancel": 2, "crash": 2, "time": 12}


def walk(
    seed: int,
    *,
    faults: dict[str, int] | None = None,
    lease_book: Callable[[], LeaseBook] = LeaseBook,
    import_book: Callable[[], ImportBook] = ImportBook,
    layered: bool = False,
    sizes: tuple[int, int] = (1, 1),
) -> World:
    """One random run to its end."""
    rng = random.Random(seed)
    requests = {}
    for name in ("a", "b", "c", "d"):
        blocks = rng.randint(1, 3)
        tokens = blocks * sizes[1] - rng.randrange(sizes[1])
        requests[name] = Request(tokens, rng.choice([0, 0, rng.randint(0, blocks)]))
    # Sound runs get a prefill pool that never makes a request give up.
    source_tokens = 12 * sizes[0] * sizes[1] if faults == {} else rng.randint(5, 12) * sizes[1]
    world = World(
        requests,
        FAULTS if faults is None else faults,
        lease_book=lease_book,
        import_book=import_book,
        pools=(-(-source_tokens // sizes[0]), rng.randint(3, 12)),
        layered=layered,
        sizes=sizes,
    )
    # Some runs are nearly sound, some are all trouble.
    trouble = rng.choice([0.02, 0.1, 0.3])
    for _ in range(rng.randint(20, 150)):
        possible = progress(world)
        faulty = choices.faults(world)
        if faulty and (not possible or rng.random() < trouble):
            world.apply(rng.choice(faulty))
        elif possible:
            world.apply(rng.choice(possible))
        else:
            break
    choices.drain(world, rng.choice)
    return world


@pytest.mark.parametrize("batch", range(8))
def test_whatever_happens_nothing_is_corrupted_and_everything_drains(batch: int) -> None:
    outcomes = set()
    for seed in range(batch * 100, batch * 100 + 100):
        try:
            outcomes |= {each.state for each in walk(seed, layered=seed % 2 == 0).requests.values()}
        except (Fault, KVFerryError) as error:
            pytest.fail(f"seed {seed}: {error!r}")
    assert outcomes >= {"done", "over"}, "the walk reaches both ends"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_whatever_the_block_sizes(sizes: tuple[int, int]) -> None:
    for seed in range(50):
        try:
            walk(seed, sizes=sizes)
            sound = walk(seed, sizes=sizes, faults={})
        except (Fault, KVFerryError) as error:
            pytest.fail(f"seed {seed}: {error!r}")
        assert {each.state for each in sound.requests.values()} == {"done"}, f"seed {seed}"


def test_without_faults_every_request_commits() -> None:
    for seed in range(40):
        states = {each.state for each in walk(seed, faults={}, layered=seed % 2 == 0).requests.values()}
        assert states == {"done"}, f"seed {seed}"


def test_with_a_wire_that_keeps_everything_the_router_hears_of_every_end() -> None:
    faults = {**FAULTS, "drop": 0, "crash": 0}
    for seed in range(100):
        assert {each.state for each in walk(seed, faults=faults).requests.values()} <= {"done", "over"}, f"seed {seed}"


@pytest.mark.parametrize(
    ("books", "faults", "complaint"),
    [
        ({"lease_book": ReleasesInFlight}, FAULTS, "ships a free block"),
        ({"lease_book": HasNoFence}, FAULTS, "a stale "),
        ({"lease_book": AlwaysAnswers}, FAULTS, "does not drain"),
        ({"import_book": FreesWithTheWindowOpen}, FAULTS, "not its own"),
        ({"lease_book": SpeaksForItsReader}, {"unanswer": 4}, "reported as failed after its commit"),
        ({"import_book": CommitsOnTheHandover}, FAULTS, "commits wrong bytes"),
        ({"import_book": CommitsWithTheWindowOpen}, FAULTS, "commits with its window open"),
        ({"lease_book": ShipsWhatIsNotComputed}, FAULTS, "that is not computed"),
        ({"lease_book": ShipsLayersTwice}, FAULTS, "twice"),
    ],
)
def test_the_walk_finds_a_planted_fault(
    books: dict[str, Callable[[], LeaseBook]], faults: dict[str, int], complaint: str
) -> None:
    def run(seed: int) -> str:
        try:
            walk(seed, faults=faults, layered=True, **books)  # type: ignore[arg-type]
        except (Fault, KVFerryError) as error:
            return str(error)
        return ""

    assert any(complaint in run(seed) for seed in range(300))
