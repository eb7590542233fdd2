"""Which prompt the prefill scheduler takes first: the senior, and in time everybody becomes it."""

from __future__ import annotations

import pytest

from engine.batch import Draw
from engine.block_pool import BlockPool
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
from protocol.sampling import SamplingParams
from router.priority import seniority

ROUTER = Peer("router-0", 1)
BLOCK = 4
AGING = 2.0


class Queue:
    """A scheduler that computes one step a second, and what it was asked for at which priority."""

    def __init__(self, *, budget: int = 8, sequences: int = 1, num_blocks: int = 65) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.subject = PrefillScheduler(self.pool, block_size=BLOCK, max_batch_tokens=budget, max_sequences=sequences)
        self.now = 0.0
        self.asked = 0

    def add(self, name: str, priority: int = 0, *, length: int = 8, waited: float = 0.0) -> None:
        first = self.asked = self.asked + 100
        request = Prefill(
            key=RequestKey(name, 0),
            token_ids=tuple(range(first, first + length)),
            sampling=SamplingParams(max_tokens=4),
            handoff=None,
            seniority=seniority(waited, priority, AGING),
        )
        self.subject.add(request, ROUTER, self.now)

    def step(self) -> list[str]:
        """Compute one step; returns whom it finished."""
        self.subject.admit(self.now)
        step = self.subject.next_step()
        done = self.subject.complete_step([Draw(7) if work.last else None for work in step])
        finished = [progress.prompt for progress in done if progress.draw is not None]
        for prompt in finished:
            self.subject.release(prompt)
        self.now += 1.0
        self.pool.check_integrity()
        return [prompt.key.request_id for prompt in finished]


def test_the_lower_priority_goes_first_and_equals_go_as_they_came() -> None:
    queue = Queue()
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        queue.add(name, priority)
    assert [queue.step() for _ in range(5)] == [["c"], ["e"], ["a"], ["d"], ["b"]]


@pytest.mark.parametrize("priority", [1, 3, 10])
def test_a_flood_of_urgent_prompts_starves_nobody(priority: int) -> None:
    """One urgent prompt comes for each that is computed: the other one is passed for as long as its priority says."""
    queue = Queue()
    queue.add("patient", priority)
    passed = 0
    while True:
        queue.add(f"urgent {passed}", 0)
        if queue.step() == ["patient"]:
            break
        passed += 1
        assert passed < 100, "it starved"
    assert passed == priority * AGING, "no sooner, or the priority counted nothing"


def test_what_was_waited_elsewhere_counts() -> None:
    queue = Queue()
    queue.add("fresh")
    queue.add("second attempt", waited=5.0)
    assert [queue.step(), queue.step()] == [["second attempt"], ["fresh"]]


def test_an_urgent_prompt_goes_before_the_rest_of_one_that_has_begun() -> None:
    queue = Queue(sequences=2)
    queue.add("long", length=24)
    assert queue.step() == []
    queue.add("urgent", -1, length=6)
    # It leaves two tokens of the step, which is less than a block: the chunk of the long one must end on a border.
    assert queue.step() == ["urgent"]
    assert [queue.step(), queue.step()] == [[], ["long"]]


def test_a_senior_that_does_not_fit_is_not_passed_by_one_that_would() -> None:
    queue = Queue(sequences=4, num_blocks=9)
    queue.add("running", length=20)
    queue.step()
    queue.add("small", 1, length=4)
    queue.add("large", 0, length=20)
    order = [name for _ in range(8) for name in queue.step()]
    assert order == ["running", "large", "small"]
