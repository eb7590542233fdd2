from __future__ import annotations

import pytest

from engine.step_watch import LONGEST_LOOK, StepWatch
from protocol.errors import EngineFailure


def test_age_grows_while_there_is_work_and_no_step_ends() -> None:
    watch = StepWatch(60.0)
    watch.look(0, busy=False, now=100.0)
    assert watch.age == 0
    for tenth in range(1, 11):
        watch.look(0, busy=True, now=100.0 + tenth / 10)
    assert watch.age == pytest.approx(1.0)
    watch.look(1, busy=True, now=101.1)
    assert watch.age == 0, "a step has ended"
    watch.look(1, busy=True, now=101.2)
    watch.look(1, busy=False, now=101.3)
    assert watch.age == 0, "nothing is wanted"


def test_a_process_that_was_stopped_was_not_watched_meanwhile() -> None:
    watch = StepWatch(60.0)
    watch.look(0, busy=True, now=100.0)
    watch.look(0, busy=True, now=5000.0)
    assert watch.age <= 2 * LONGEST_LOOK


def test_beyond_the_limit_it_ends_the_worker() -> None:
    watch = StepWatch(2.0)
    for tenth in range(21):
        watch.look(0, busy=True, now=tenth / 10)
    with pytest.raises(EngineFailure, match=r"no step has ended for 2\.1 s"):
        watch.look(0, busy=True, now=2.1)
