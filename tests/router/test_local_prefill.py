"""Which prompts stay on a decode worker, and what the request machine makes of one that is both legs."""

from __future__ import annotations

import numpy as np
import pytest
from request_cases import PROMPT, cancelled, failure, machine, only, tokens
from worker_facts import fleet_of, worker

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer
from protocol.messages import Failed, Tokens
from router.forecast import forecast
from router.instructions import Blame, Emit, NeedPlacement, SendPrefill, SendReserve, Stage
from router.local_prefill import LocalPrefillRule, Reason, decide
from router.policy import Demand, Placement, Snapshot
from router.registry import Worker
from router.request import RequestMachine
from router.request_table import RequestState

P0, D0 = worker("p0", "prefill"), worker("d0", "decode", prefills=True)
D1, PLAIN = worker("d1", "decode", prefills=True), worker("d2", "decode")
LOST = worker("p1", "prefill", lost="killed")
HERE = Placement(D0, D0, "always")


def choice(
    rule: LocalPrefillRule, *workers: Worker, tokens: int = 8, decode: bool = True, **demand: object
) -> Placement:
    asked = Demand(decode, prompt_tokens=tokens, **demand)  # type: ignore[arg-type]
    fleet = fleet_of(workers)
    chosen = decide("least_loaded", Snapshot(fleet, forecast(fleet, 8, np.zeros(len(fleet)), 0.0, 0.0)), asked, rule)
    prefill, partner = fleet.workers[chosen.prefill], None if chosen.decode is None else fleet.workers[chosen.decode]
    assert prefill is not None
    return Placement(prefill, partner, chosen.local)


@pytest.mark.parametrize(
    ("rule", "workers", "reason"),
    [
        (LocalPrefillRule(), (P0, D0), ""),
        (LocalPrefillRule(), (LOST, D0), "no_prefill_worker"),
        (LocalPrefillRule("short", 8), (P0, D0), "short_prompt"),
        (LocalPrefillRule("short", 7), (P0, D0), ""),
        (LocalPrefillRule("short", 7), (D0,), "no_prefill_worker"),
        (LocalPrefillRule("short", 8), (P0, PLAIN), ""),
        (LocalPrefillRule("always"), (P0, D0), "always"),
        (LocalPrefillRule("always"), (P0, PLAIN), ""),
        (LocalPrefillRule("never"), (P0, D0), ""),
    ],
)
def test_the_place_and_the_reason(rule: LocalPrefillRule, workers: tuple[Worker, ...], reason: Reason) -> None:
    chosen = choice(rule, *workers)
    assert chosen.local == reason
    assert chosen.prefill is (chosen.decode if reason else P0)


@pytest.mark.parametrize("workers", [(LOST, PLAIN), (LOST,), ()])
def test_who_cannot_prefill_is_no_fall_back(workers: tuple[Worker, ...]) -> None:
    with pytest.raises(NoWorkerAvailable, match="no prefill worker"):
        choice(LocalPrefillRule(), *workers)


def test_never_is_never() -> None:
    with pytest.raises(NoWorkerAvailable, match="no prefill worker"):
        choice(LocalPrefillRule("never"), D0)


def test_the_policy_ranks_and_who_failed_comes_last() -> None:
    busy = worker("d0", "decode", prefills=True, running=3)
    assert choice(LocalPrefillRule(), busy, D1).prefill is D1
    assert choice(LocalPrefillRule(), busy, D1, excluded=frozenset({D1.peer})).prefill is busy
    assert choice(LocalPrefillRule(), D0, decode=False) == Placement(D0, None, "no_prefill_worker")


@pytest.mark.parametrize(
    ("cached", "decode", "prefill", "reason"),
    [
        (0, {}, {}, ""),
        (80, {}, {}, "faster"),
        (80, {"running": 3}, {}, "faster"),
        (80, {"running": 30}, {}, ""),
        (0, {"kv_bytes": 1 << 20, "kv_seconds": 100.0}, {}, "faster"),
        (0, {"kv_bytes": 1 << 20, "kv_seconds": 100.0, "running": 60}, {}, ""),
        (0, {}, {"waiting_tokens": 900}, "faster"),
        (0, {"waiting_tokens": 900}, {"waiting_tokens": 900}, ""),
    ],
)
def test_auto_takes_what_is_predicted_to_be_faster_for_all(
    cached: int, decode: dict[str, object], prefill: dict[str, object], reason: Reason
) -> None:
    pace: dict[str, object] = {"steps": 10_000, "step_per_token": 1e-3}
    fleet = fleet_of(
        [worker("p0", "prefill", **pace, **prefill), worker("d0", "decode", prefills=True, **pace, **decode)]
    )
    has = np.zeros(len(fleet))
    has[fleet.row("d0")] = cached
    snapshot = Snapshot(fleet, forecast(fleet, 100, has, 0.0, 0.0))
    for needs_decode in (True, False):
        chosen = decide("cost", snapshot, Demand(needs_decode, prompt_tokens=100), LocalPrefillRule("auto"))
        if needs_decode:
            assert chosen.local == reason
        assert (chosen.decode is None) is not needs_decode
        assert chosen.prefill == fleet.row("d0" if chosen.local else "p0")


def test_auto_falls_back_like_the_default_and_heeds_who_cannot() -> None:
    assert choice(LocalPrefillRule("auto"), LOST, D0).local == "no_prefill_worker"
    assert choice(LocalPrefillRule("auto"), P0, PLAIN).local == ""
    with pytest.raises(NoWorkerAvailable, match="no prefill worker"):
        choice(LocalPrefillRule("auto"), LOST, PLAIN)


def placed(max_tokens: int = 8, placement: Placement = HERE) -> RequestMachine:
    request = machine(max_tokens)
    request.submit(0.0)
    (opened,) = request.placed(placement, 0.0)
    assert isinstance(opened, SendPrefill)
    assert (opened.peer, opened.message.handoff) == (D0.peer, placement.decode and D0.peer)
    return request


def test_one_message_opens_both_legs_and_one_worker_gives_all_tokens() -> None:
    request = placed()
    (first,) = only(Emit, request.tokens(D0.peer, tokens(0, 11), 1.0))
    assert (first.stage, request.state) == (Stage.PREFILLED, RequestState.HANDOFF)
    (second,) = only(Emit, request.tokens(D0.peer, tokens(1, 12), 2.0))
    assert (second.stage, request.state) == (Stage.TAKEN_OVER, RequestState.DECODING)
    assert not request.tokens(P0.peer, tokens(2, 13), 2.5), "nobody else has a say"
    (last,) = request.tokens(D0.peer, tokens(2, 13, finish="stop"), 3.0)
    assert isinstance(last, Emit)
    report = request.timeline.report("r", 1, 3.0)
    assert (report.local_prefill, report.prefill_worker, report.decode_worker) == ("always", "d0", "d0")


@pytest.mark.parametrize("message", [tokens(0, 11, finish="stop"), failure("engine_failure"), None])
@pytest.mark.parametrize("seen", [0, 1, 2])
def test_its_end_and_its_loss_count_in_every_state(message: Tokens | Failed | None, seen: int) -> None:
    request = placed()
    for index in range(seen):
        request.tokens(D0.peer, tokens(index, 11 + index), 1.0)
    if isinstance(message, Tokens):
        out = request.tokens(D0.peer, tokens(seen, 30, finish="stop"), 2.0)
        assert [type(each) for each in out] == [Emit], "it has ended by itself"
        return
    out = request.worker_lost(D0.peer, "killed", 2.0) if message is None else request.failed(D0.peer, message, 2.0)
    assert cancelled(out) == {("d0", 0)}
    assert len([each for each in out if not isinstance(each, Emit | Blame)]) == 3, (
        "one cancel, one retry, one placement"
    )
    (wish,) = only(NeedPlacement, out)
    assert wish.excluded == {D0.peer}
    # The next attempt may be an ordinary one, and goes on from what was emitted.
    opened = request.placed(Placement(P0, D1), 3.0)
    (reserve,), (prefill,) = only(SendReserve, opened), only(SendPrefill, opened)
    assert reserve.message.token_ids == prefill.message.token_ids == (*PROMPT, *range(11, 11 + seen))
    assert request.timeline.local_prefill == ""
    assert not request.tokens(D0.peer, tokens(seen, 40), 4.0), "of the attempt before"


def test_an_answer_of_one_token_needs_nobody_to_go_on() -> None:
    request = placed(1, Placement(D0, None, "always"))
    (emit,) = request.tokens(D0.peer, tokens(0, 11, finish="length"), 1.0)
    assert isinstance(emit, Emit)


def test_another_life_of_the_worker_is_another_worker() -> None:
    request = placed()
    assert not request.tokens(Peer("d0", 2), tokens(0, 11), 1.0)
    assert not request.worker_lost(Peer("d0", 2), "killed", 1.0)
