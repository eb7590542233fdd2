from __future__ import annotations

import pytest
from request_cases import (
    D0,
    D1,
    LIMITS,
    OTHER_PAIR,
    P0,
    P1,
    PAIR,
    PROMPT,
    cancelled,
    decoding,
    machine,
    only,
    started,
    tokens,
)

from protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    WorkerLost,
)
from protocol.grammar import Grammar
from protocol.ids import Peer
from protocol.messages import StageTimes, Tokens
from protocol.sampling import SamplingParams
from router.front.generation import Generation
from router.instructions import (
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
from router.request_table import RequestState

EVERY_FIELD = SamplingParams(
    temperature=0.7,
    top_p=0.8,
    top_k=9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias=((4, 1.5),),
    logprobs=2,
    seed=77,
    max_tokens=8,
    min_tokens=3,
    stop_token_ids=(2, 9),
    grammar=Grammar("regex", "a+"),
)


def test_each_field_goes_to_each_leg_in_every_attempt() -> None:
    """Both draw tokens: the first leg needs the least number of them, its bans and its penalties as the second does."""
    plain = SamplingParams()
    assert [name for name in plain.__struct_fields__ if getattr(EVERY_FIELD, name) == getattr(plain, name)] == []
    generation = Generation(PROMPT, EVERY_FIELD, cache_salt="salt", prompt_logprobs=1)
    request = RequestMachine("r", generation, LIMITS)
    request.submit(0.0)
    prefill, reserve = request.placed(PAIR, 0.0)
    assert isinstance(reserve, SendReserve)
    assert isinstance(prefill, SendPrefill)
    for message in (reserve.message, prefill.message):
        assert (message.sampling, message.cache_salt, message.token_ids) == (EVERY_FIELD, "salt", PROMPT)
    assert prefill.message.prompt_logprobs == 1
    request.worker_lost(D0.peer, "killed", 1.0)
    for instruction in request.placed(OTHER_PAIR, 1.0):
        assert isinstance(instruction, SendReserve | SendPrefill)
        assert instruction.message.sampling == EVERY_FIELD


def test_a_request_goes_through_its_states() -> None:
    request = machine()
    assert request.submit(0.0) == [NeedPlacement(needs_decode=True, excluded=frozenset())]
    assert request.state is RequestState.QUEUED
    prefill, reserve = request.placed(PAIR, 0.5)
    assert isinstance(reserve, SendReserve)
    assert isinstance(prefill, SendPrefill)
    assert (reserve.peer, prefill.peer) == (D0.peer, P0.peer)
    assert (prefill.message.handoff, prefill.message.token_ids, prefill.message.emitted) == (D0.peer, PROMPT, 0)
    assert reserve.message.prefill.peer == P0.peer
    assert reserve.message.prefill.endpoint == P0.profile.peer_endpoint
    for message in (reserve.message, prefill.message):
        assert (message.cache_salt, message.sampling.seed, message.lease_ttl) == ("salt", 3, 30.0)
    assert request.state is RequestState.PREFILLING
    assert request.tokens(P0.peer, tokens(0, 11), 1.0) == [Emit((11,), None, Stage.PREFILLED)]
    assert request.state is RequestState.HANDOFF
    assert request.tokens(D0.peer, tokens(1, 12), 2.0) == [Emit((12,), None, Stage.TAKEN_OVER)]
    assert request.state is RequestState.DECODING
    assert request.tokens(D0.peer, tokens(2, 13, 14), 3.0) == [Emit((13, 14), None, Stage.DECODING)]
    assert request.tokens(D0.peer, tokens(4, 2, finish="stop"), 4.0) == [Emit((2,), "stop", Stage.DECODING)]
    assert request.state is RequestState.FINISHED
    assert request.ended


def test_a_request_of_one_token_runs_on_prefill_alone() -> None:
    request = machine(max_tokens=1)
    assert request.submit(0.0) == [NeedPlacement(needs_decode=False, excluded=frozenset())]
    (prefill,) = request.placed(Placement(P0, None), 0.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.message.handoff is None
    assert request.tokens(P0.peer, tokens(0, 11, finish="length"), 1.0) == [Emit((11,), "length", Stage.PREFILLED)]
    assert request.state is RequestState.FINISHED


def test_a_stop_at_the_first_token_cancels_the_reservation_alone() -> None:
    request = started()
    out = request.tokens(P0.peer, tokens(0, 2, finish="stop"), 1.0)
    assert only(Emit, out) == [Emit((2,), "stop", Stage.PREFILLED)]
    assert cancelled(out) == {("d0", 0)}
    assert request.state is RequestState.FINISHED


def test_max_tokens_ends_a_request_whatever_the_worker_thinks() -> None:
    request = started(max_tokens=3)
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    out = request.tokens(D0.peer, tokens(1, 12, 13, 14, 15), 2.0)
    assert only(Emit, out) == [Emit((12, 13), "length", Stage.TAKEN_OVER)]
    assert cancelled(out) == {("d0", 0)}


def test_decode_tokens_that_overtake_prefills_wait_for_it() -> None:
    request = started()
    assert request.tokens(D0.peer, tokens(1, 12), 1.0) == []
    assert request.tokens(D0.peer, tokens(2, 13, finish="length"), 1.0) == []
    assert request.tokens(P0.peer, tokens(0, 11), 1.1) == [
        Emit((11,), None, Stage.PREFILLED),
        Emit((12,), None, Stage.TAKEN_OVER),
        Emit((13,), "length", Stage.DECODING),
    ]
    assert request.ended


def test_decode_tokens_do_not_wait_for_prefills_for_ever() -> None:
    request = started()
    request.tokens(D0.peer, tokens(1, 12), 1.0)
    assert request.deadline == 3.0
    assert request.tick(2.9) == []
    out = request.tick(3.0)
    assert cancelled(out) == {("p0", 0), ("d0", 0)}
    assert only(Retry, out)
    assert only(Emit, out) == []


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (P0.peer, tokens(3, 14, attempt=1)),
        (D0.peer, tokens(3, 14, attempt=1)),
        (Peer("d0", 2), tokens(3, 14)),
        (D1.peer, tokens(3, 14)),
        (P0.peer, tokens(3, 14)),
        (D0.peer, tokens(1, 12, 13)),
        (D0.peer, tokens(0, 99)),
        (D0.peer, tokens(0, 99, finish="stop")),
    ],
    ids=["attempt-p", "attempt-d", "incarnation", "stranger", "prefill-again", "duplicate", "older", "older-end"],
)
def test_a_late_or_foreign_message_changes_nothing(sender: Peer, message: Tokens) -> None:
    request = decoding()
    assert request.tokens(sender, message, 3.0) == []
    assert request.state is RequestState.DECODING
    assert request.tokens(D0.peer, tokens(3, 14), 3.0) == [Emit((14,), None, Stage.DECODING)]


def test_an_overlap_is_cut_to_what_is_new() -> None:
    assert decoding().tokens(D0.peer, tokens(2, 13, 14), 3.0) == [Emit((14,), None, Stage.DECODING)]


def test_an_end_that_comes_after_all_its_tokens_still_ends_it() -> None:
    request = decoding()
    assert request.tokens(D0.peer, tokens(2, 13, finish="stop"), 3.0) == [Emit((), "stop", Stage.DECODING)]
    assert request.ended


@pytest.mark.parametrize("state", ["queued", "prefilling", "handoff", "decoding"])
@pytest.mark.parametrize("event", ["cancel", "satisfied"])
def test_a_client_that_wants_no_more_closes_both_legs_in_any_state(event: str, state: str) -> None:
    request = machine()
    request.submit(0.0)
    if state != "queued":
        request.placed(PAIR, 0.0)
    if state in ("handoff", "decoding"):
        request.tokens(P0.peer, tokens(0, 11), 1.0)
    if state == "decoding":
        request.tokens(D0.peer, tokens(1, 12), 1.0)
    assert request.state.value == state
    assert cancelled(getattr(request, event)(2.0)) == (set() if state == "queued" else {("p0", 0), ("d0", 0)})
    assert request.state is (RequestState.CANCELLED if event == "cancel" else RequestState.FINISHED)
    assert request.timeline.ended == (None if event == "cancel" else 2.0)
    assert request.cancel(2.0) == request.satisfied(2.0) == request.tick(1e6) == []
    assert request.tokens(D0.peer, tokens(1, 12), 3.0) == []


def test_the_deadline_fails_a_request_and_closes_its_legs() -> None:
    request = started(timeout=10.0)
    assert request.tick(9.9) == []
    out = request.tick(10.0)
    (fail,) = only(Fail, out)
    assert type(fail.error) is DeadlineExceeded
    assert cancelled(out) == {("p0", 0), ("d0", 0)}


def test_a_client_cannot_ask_for_more_time_than_the_router_gives() -> None:
    request = started(timeout=1e6)
    assert request.deadline == LIMITS.request_timeout


def test_a_decode_worker_that_falls_silent_is_given_up() -> None:
    request = decoding()
    assert request.tick(61.9) == []
    out = request.tick(62.0)
    (retry,) = only(Retry, out)
    assert type(retry.cause) is WorkerLost
    (need,) = only(NeedPlacement, out)
    assert need.excluded == {D0.peer}


def test_a_long_wait_for_the_handoff_is_not_silence() -> None:
    request = started()
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    assert request.tick(500.0) == []


def test_the_report_tells_each_stage() -> None:
    request = machine()
    request.submit(10.0)
    request.placed(PAIR, 10.5)
    first = StageTimes(prefill_queue=0.25, prefill=1.0, cached_tokens=2)
    request.tokens(P0.peer, Tokens(key=request.key, start=0, token_ids=(11,), times=first), 12.0)
    second = StageTimes(handoff=0.125, ship=0.0625, kv_blocks=3, kv_bytes=4096, transport="tcp")
    request.tokens(D0.peer, Tokens(key=request.key, start=1, token_ids=(12,), times=second), 13.0)
    request.tokens(D0.peer, tokens(2, 13, finish="length"), 14.0)
    report = request.timeline.report("r", 1, 99.0)
    assert (report.queue_s, report.prefill_s, report.ttft_s) == (0.75, 1.0, 2.0)
    assert (report.handoff_s, report.ship_s, report.decode_s) == (0.125, 0.0625, 2.0)
    assert (report.cached_tokens, report.kv_blocks, report.kv_bytes, report.transport) == (2, 3, 4096, "tcp")
    assert (report.prefill_worker, report.decode_worker) == ("p0", "d0")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (1, -1)}, "token_ids"),
        ({"token_ids": (1 << 31,)}, "token_ids"),
        ({"token_ids": (0,) * ((1 << 20) + 1)}, "token_ids"),
        ({"sampling": SamplingParams(stop_token_ids=(-5,))}, "stop_token_ids"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_what_no_worker_could_decode_is_refused(change: dict[str, object], field: str) -> None:
    fields: dict[str, object] = {"token_ids": PROMPT, "sampling": SamplingParams(), **change}
    with pytest.raises(InvalidRequest) as caught:
        RequestMachine("r", Generation(**fields), LIMITS)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_early_tokens_are_dropped_with_their_attempt() -> None:
    request = started()
    request.tokens(D0.peer, tokens(1, 12), 1.0)
    request.worker_lost(D0.peer, "killed", 1.5)
    request.placed(OTHER_PAIR, 1.5)
    assert request.deadline == LIMITS.request_timeout
    out = request.tokens(P1.peer, tokens(0, 11, attempt=1), 2.0)
    assert out == [Emit((11,), None, Stage.PREFILLED)]


def test_a_prefill_frame_without_news_does_not_let_early_tokens_through() -> None:
    request = decoding()
    request.worker_lost(D0.peer, "killed", 3.0)
    request.placed(OTHER_PAIR, 3.0)
    assert request.tokens(D1.peer, tokens(4, 15, attempt=1), 3.5) == []
    assert request.tokens(P1.peer, tokens(2, 13, attempt=1), 3.6) == []
    assert request.tokens(P1.peer, tokens(3, 14, attempt=1), 3.7) == [
        Emit((14,), None, Stage.PREFILLED),
        Emit((15,), None, Stage.TAKEN_OVER),
    ]
