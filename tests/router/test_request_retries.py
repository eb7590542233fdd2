from __future__ import annotations

import pytest
from request_cases import (
    D0,
    D1,
    OTHER_PAIR,
    P0,
    P1,
    PAIR,
    PROMPT,
    cancelled,
    decoding,
    failure,
    machine,
    only,
    started,
    tokens,
)

from protocol.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    NoWorkerAvailable,
)
from protocol.ids import Peer, RequestKey
from protocol.messages import Failed
from router.instructions import (
    Blame,
    Emit,
    Fail,
    NeedPlacement,
    Retry,
    SendPrefill,
    SendReserve,
    Stage,
)
from router.policy import Placement
from router.request import RequestMachine
from router.request_limits import RequestLimits
from router.request_table import RequestState

GRACE = RequestLimits().reorder_grace


def handed_over() -> RequestMachine:
    request = started()
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    return request


def test_a_gap_is_tried_again_and_nothing_is_lost() -> None:
    request = decoding()
    out = request.tokens(D0.peer, tokens(4, 15), 3.0)
    assert cancelled(out) == {("p0", 0), ("d0", 0)}
    (retry,) = only(Retry, out)
    assert "begin at 4, only 3" in retry.cause.message
    assert only(Emit, out) == []
    prefill, reserve = request.placed(OTHER_PAIR, 3.0)
    assert isinstance(prefill, SendPrefill)
    assert isinstance(reserve, SendReserve)
    for message in (reserve.message, prefill.message):
        assert (message.token_ids, message.emitted) == ((*PROMPT, 11, 12, 13), 3)
        assert message.key == RequestKey("r", 1)
    assert request.tokens(P1.peer, tokens(3, 14, attempt=1), 4.0) == [Emit((14,), None, Stage.PREFILLED)]


@pytest.mark.parametrize("sender", [P0.peer, D0.peer])
def test_a_failed_leg_cancels_the_other_and_is_tried_elsewhere(sender: Peer) -> None:
    request = started()
    out = request.failed(sender, failure("engine_failure"), 1.0)
    assert cancelled(out) == {("p0", 0), ("d0", 0)}
    assert only(NeedPlacement, out) == [NeedPlacement(needs_decode=True, excluded=frozenset({sender}))]
    assert request.state is RequestState.QUEUED
    assert request.attempt == 1


def test_a_failed_transfer_avoids_both_ends() -> None:
    (need,) = only(NeedPlacement, started().failed(D0.peer, failure("channel_lost"), 1.0))
    assert need.excluded == {P0.peer, D0.peer}


def test_what_befalls_the_lease_once_decode_runs_is_of_no_matter() -> None:
    request = decoding()
    assert request.failed(P0.peer, failure("lease_expired"), 3.0) == []
    assert request.worker_lost(P0.peer, "killed", 3.0) == []
    assert request.state is RequestState.DECODING


class TestAShipThatFailsAfterTheHandover:
    """Decode may have everything, and only the answer was lost; or a cut link, and decode hears of nothing."""

    def test_decode_has_a_moment_to_show_that_it_has_everything(self) -> None:
        request = handed_over()
        assert request.failed(P0.peer, failure("channel_lost"), 2.0) == []
        assert request.deadline == 2.0 + GRACE
        assert request.tokens(D0.peer, tokens(1, 12), 2.0 + GRACE / 2) == [Emit((12,), None, Stage.TAKEN_OVER)]
        assert request.tick(2.0 + GRACE) == []
        assert request.state is RequestState.DECODING

    def test_else_it_is_tried_elsewhere(self) -> None:
        request = handed_over()
        request.failed(P0.peer, failure("channel_lost"), 2.0)
        assert request.failed(P0.peer, failure("channel_lost"), 3.0) == [], "said twice, it is no later"
        out = request.tick(2.0 + GRACE)
        assert [blame.peers for blame in only(Blame, out)] == [frozenset({P0.peer, D0.peer})]
        assert cancelled(out) == {("p0", 0), ("d0", 0)}
        assert only(NeedPlacement, out) == [NeedPlacement(needs_decode=True, excluded=frozenset({P0.peer, D0.peer}))]
        assert request.tick(2.0 + 2 * GRACE) == []

    def test_decode_may_say_so_first(self) -> None:
        request = handed_over()
        request.failed(P0.peer, failure("channel_lost"), 2.0)
        assert cancelled(request.failed(D0.peer, failure("channel_lost"), 2.0)) == {("p0", 0), ("d0", 0)}
        assert request.attempt == 1
        assert request.tick(2.0 + GRACE) == []


def test_an_error_that_no_retry_mends_is_the_clients() -> None:
    request = started()
    out = request.failed(D0.peer, failure("context_length_exceeded"), 1.0)
    (fail,) = only(Fail, out)
    assert type(fail.error) is ContextLengthExceeded
    assert cancelled(out) == {("p0", 0), ("d0", 0)}
    assert request.state is RequestState.FAILED


@pytest.mark.parametrize(
    ("sender", "message"),
    [(D0.peer, failure("engine_failure", attempt=3)), (Peer("d0", 9), failure("engine_failure"))],
)
def test_a_late_failure_changes_nothing(sender: Peer, message: Failed) -> None:
    request = started()
    assert request.failed(sender, message, 1.0) == []
    assert request.state is RequestState.PREFILLING


@pytest.mark.parametrize("peer", [P0.peer, D0.peer])
def test_a_lost_worker_is_told_too_in_case_it_only_stood_still(peer: Peer) -> None:
    request = started()
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    out = request.worker_lost(peer, "no heartbeat", 2.0)
    assert cancelled(out) == {("p0", 0), ("d0", 0)}
    (need,) = only(NeedPlacement, out)
    assert need.excluded == {peer}


def test_the_loss_of_a_stranger_changes_nothing() -> None:
    request = started()
    assert request.worker_lost(D1.peer, "killed", 1.0) == []
    assert request.worker_lost(Peer("d0", 2), "killed", 1.0) == []


def test_attempts_are_bounded_and_the_last_cause_is_told() -> None:
    request = started(limits=RequestLimits(max_attempts=3))
    for attempt in range(2):
        request.failed(D0.peer, failure("pool_exhausted", attempt=attempt), 1.0)
        request.placed(PAIR, 1.0)
    out = request.failed(D0.peer, failure("import_expired", attempt=2), 1.0)
    (fail,) = only(Fail, out)
    assert type(fail.error) is AttemptsExhausted
    assert "3 attempts failed" in fail.error.message
    assert "import_expired: because import_expired" in fail.error.message
    assert cancelled(out) == {("p0", 2), ("d0", 2)}


def test_preemptions_do_not_count_as_attempts() -> None:
    request = started(limits=RequestLimits(max_attempts=2))
    for attempt in range(2000):
        now = float(attempt) / 100
        out = request.failed(D0.peer, failure("preempted", attempt=attempt), now)
        assert only(Retry, out)
        assert all(need.excluded == frozenset() for need in only(NeedPlacement, out))
        request.placed(PAIR, now)
    assert only(Retry, request.failed(D0.peer, failure("engine_failure", attempt=2000), 30.0))
    request.placed(PAIR, 30.0)
    assert only(Fail, request.failed(D0.peer, failure("engine_failure", attempt=2001), 31.0))


def test_a_worker_that_leaves_costs_no_attempt_and_is_asked_no_more() -> None:
    request = started(limits=RequestLimits(max_attempts=1))
    out = request.failed(D0.peer, failure("worker_draining"), 1.0)
    assert only(Retry, out)
    assert [need.excluded for need in only(NeedPlacement, out)] == [frozenset({D0.peer})]


def test_the_first_retry_is_at_once_and_further_ones_back_off() -> None:
    request = started()
    assert only(NeedPlacement, request.failed(D0.peer, failure("engine_failure"), 1.0))
    request.placed(PAIR, 1.0)
    assert not only(NeedPlacement, request.failed(D0.peer, failure("engine_failure", attempt=1), 2.0))
    assert request.deadline == pytest.approx(2.05)
    assert request.tick(2.04) == []
    assert only(NeedPlacement, request.tick(2.06))
    request.placed(PAIR, 2.06)
    assert not only(NeedPlacement, request.failed(D0.peer, failure("engine_failure", attempt=2), 3.0))
    assert request.deadline == pytest.approx(3.1)


def test_the_last_token_of_a_retry_needs_no_decode_worker() -> None:
    request = started(max_tokens=4)
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    request.tokens(D0.peer, tokens(1, 12, 13), 1.0)
    (need,) = only(NeedPlacement, request.worker_lost(D0.peer, "killed", 2.0))
    assert not need.needs_decode
    request.placed(Placement(P1, None), 2.0)
    assert request.tokens(P1.peer, tokens(3, 14, attempt=1), 3.0) == [Emit((14,), "length", Stage.PREFILLED)]


def test_a_first_attempt_without_workers_fails_at_once() -> None:
    request = machine()
    request.submit(0.0)
    error = NoWorkerAvailable("none")
    assert request.unplaced(error, 0.0) == [Fail(error)]


def test_a_first_attempt_waits_where_the_limits_say_so() -> None:
    request = machine(limits=RequestLimits(worker_wait_first=1.0))
    request.submit(0.0)
    assert request.unplaced(NoWorkerAvailable("none"), 0.0) == []
    (fail,) = request.tick(1.0)
    assert isinstance(fail, Fail)
    assert type(fail.error) is NoWorkerAvailable


def test_a_retry_waits_for_a_worker_to_join() -> None:
    request = started()
    request.worker_lost(D0.peer, "killed", 1.0)
    assert request.unplaced(NoWorkerAvailable("none"), 1.0) == []
    assert request.workers_changed(3.0) == [NeedPlacement(needs_decode=True, excluded=frozenset({D0.peer}))]
    assert request.unplaced(NoWorkerAvailable("none"), 3.0) == []
    assert request.deadline == 6.0, "a second look in vain does not begin the wait anew"
    assert request.workers_changed(4.0)
    assert [type(each) for each in request.placed(OTHER_PAIR, 4.0)] == [SendPrefill, SendReserve]
    assert request.tick(6.5) == []


def test_a_retry_that_waits_in_vain_tells_why_it_was_one() -> None:
    request = started()
    request.worker_lost(D0.peer, "killed", 1.0)
    request.unplaced(NoWorkerAvailable("none"), 1.0)
    (fail,) = request.tick(6.0)
    assert isinstance(fail, Fail)
    assert type(fail.error) is NoWorkerAvailable
    assert "d0 was lost: killed" in fail.error.message


def test_workers_that_join_are_no_news_to_a_running_request() -> None:
    assert started().workers_changed(1.0) == []
