from __future__ import annotations

import pytest

from engine.step_watch import LONGEST_LOOK, StepWatch
from protocol.errors import EngineFailure


def looks(watch: StepWatch, start: float, seconds: float, *, busy: bool = True) -> None:
    for tenth in range(1, round(seconds * 10) + 1):
        watch.look(busy=busy, now=start + tenth / 10)


def test_age_grows_while_there_is_work_and_no_step_ends() -> None:
    watch = StepWatch(60.0)
    watch.look(busy=False, now=100.0)
    looks(watch, 100.0, 1.0)
    assert watch.age == pytest.approx(1.0)
    with watch.step():
        looks(watch, 101.0, 0.5)
        assert watch.age == pytest.approx(1.5)
    watch.look(busy=True, now=101.6)
    assert watch.age == 0, "a step has ended"
    looks(watch, 101.6, 0.5)
    assert watch.age == pytest.approx(0.5)
    watch.look(busy=False, now=102.2)
    assert watch.age == 0, "nothing is wanted"


def test_a_step_that_stands_does_so_when_nobody_wants_it_any_more() -> None:
    watch = StepWatch(60.0)
    watch.look(busy=False, now=100.0)
    with watch.step():
        looks(watch, 100.0, 0.5)
        looks(watch, 100.5, 0.5, busy=False)
        assert watch.age == pytest.approx(1.0)
    watch.look(busy=False, now=101.1)
    assert watch.age == 0


def test_a_step_that_raises_has_ended() -> None:
    watch = StepWatch(60.0)
    with pytest.raises(EngineFailure), watch.step():
        raise EngineFailure("a kernel failed")
    looks(watch, 100.0, 1.0, busy=False)
    assert watch.age == 0


def test_a_process_that_was_stopped_was_not_watched_meanwhile() -> None:
    watch = StepWatch(60.0)
    watch.look(busy=True, now=100.0)
    watch.look(busy=True, now=5000.0)
    assert watch.age <= 2 * LONGEST_LOOK


def test_beyond_the_limit_it_ends_the_worker() -> None:
    watch = StepWatch(2.0)
    watch.look(busy=False, now=100.0)
    looks(watch, 100.0, 2.0)
    with pytest.raises(EngineFailure, match=r"no step has ended for 2\.1 s"):
        watch.look(busy=True, now=102.1)
