"""Who is let in, who waits for his turn, and who is refused because it would come too late."""

from __future__ import annotations

import math
from collections import deque

import pytest
from worker_facts import MODEL, heartbeat

from protocol.errors import Overloaded, TargetOutOfReach
from protocol.ids import Peer, RequestKey
from router.explanations import Decision
from router.local_prefill import LocalPrefillRule
from router.placer import Placer, PlacerConfig
from router.policy import Demand
from router.prompt_chain import PromptChains
from router.registry import WorkerRegistry
from router.slo.admission import HEADROOM, Admission, Admit, Refuse
from router.slo.classes import SLOClass, SLOConfig
from router.slo.expectation import FIRST_OUTPUT
from router.slo.ticket import Ticket, TicketState

Entry = Ticket[str]
PREFILL = {"steps": 10_000, "step_per_token": 1e-3}
DECODE = {"steps": 10_000, "step_fixed": 1e-2, "step_per_token": 1e-3, "free": 10_000}
PLAIN = SLOConfig(classes=(SLOClass(),))


class Stage:
    """An admission before workers that do as they are told; a prompt token takes a millisecond to compute."""

    def __init__(self, slo: SLOConfig = PLAIN, rule: LocalPrefillRule | None = None) -> None:
        self.registry = WorkerRegistry(1e9, 1e9, 1e9)
        config = PlacerConfig(MODEL, "cost", rule or LocalPrefillRule(), slow_start=0.0)
        self.placer = Placer(config, self.registry)
        self.admission: Admission[Entry] = Admission(slo, self.placer, aging=2.0)
        self.slo = slo
        self.prefilling: deque[Decision] = deque()
        self.placed: list[Decision] = []
        self.now = 0.0

    def beat(self, name: str, **load: object) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        told = heartbeat(role, **{**(PREFILL if role == "prefill" else DECODE), **load})  # type: ignore[arg-type]
        self.registry.heartbeat(Peer(name, 1), name.encode(), told, self.now)

    def ticket(
        self, tokens: int = 100, *, tenant: str = "", ttft: float = math.inf, name: str = "", **more: object
    ) -> Entry:
        return Ticket(
            payload="", slo=self.slo.of(name), tenant=tenant, prompt=tokens, most=1000, arrived=self.now, ttft=ttft,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def come(self, ticket: Entry) -> list[Refuse[Entry]]:
        chains = PromptChains(tuple(range(ticket.prompt)))
        return self.admission.arrive(ticket, chains, Demand(needs_decode=True, prompt_tokens=ticket.prompt), self.now)

    def let_on(self) -> list[Entry]:
        """Carry out all that is to be done; returns who was let in."""
        let_in = []
        while (step := self.admission.next(self.now)) is not None:
            if isinstance(step, Refuse):
                continue
            ticket = step.ticket
            demand = Demand(
                needs_decode=True,
                excluded=step.full,
                prompt_tokens=ticket.prompt,
                turn=len(self.placed),
                reserve=ticket.tokens,
            )
            _, decision = self.placer.place(
                PromptChains(tuple(range(ticket.prompt))), demand, RequestKey("r", 0), self.now
            )
            self.admission.placed(ticket, ticket.prompt)
            self.prefilling.append(decision)
            self.placed.append(decision)
            let_in.append(ticket)
        return let_in

    def compute(self) -> None:
        """The worker computes the prompt that it got first, at its pace."""
        decision = self.prefilling.popleft()
        self.now += decision.prompt_tokens * 1e-3
        self.placer.first_token(decision, self.now)


def waiting_stage(slo: SLOConfig = PLAIN) -> Stage:
    """One whose prefill worker has enough to do for a second."""
    stage = Stage(slo)
    stage.beat("p0", waiting_tokens=1000)
    stage.beat("d0")
    return stage


def test_who_finds_room_does_not_wait() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0")
    first = stage.ticket()
    assert stage.come(first) == []
    assert stage.let_on() == [first]
    assert (first.state, first.predicted, stage.admission.waiting) == (TicketState.ADMITTED, None, 0)


def test_prompts_are_sent_ahead_as_far_as_the_backlog_goes_and_the_rest_follows_one_by_one() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0")
    asked = [stage.ticket() for _ in range(6)]
    assert [refused for each in asked for refused in stage.come(each)] == []
    assert stage.let_on() == asked[:3], "a backlog of 0.2 s is there with the third"
    for further in asked[3:]:
        stage.compute()
        assert stage.let_on() == [further]


def test_who_would_come_too_late_is_told_when_to_come_again_and_is_in_time_then() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0")
    for _ in range(20):
        stage.come(stage.ticket(ttft=10.0))
        stage.let_on()
    late = stage.ticket(ttft=1.0)
    (refused,) = stage.come(late)
    assert isinstance(refused.error, TargetOutOfReach)
    assert (refused.reason, refused.ticket, late.state) == ("target", late, TicketState.REFUSED)
    # 20 prompts of 0.1 s, and its own.
    assert late.predicted == pytest.approx(2.1, rel=0.05)
    again = stage.now + refused.error.retry_after
    while stage.now < again:
        assert stage.come(stage.ticket(ttft=1.0)), "it is no use to come earlier"
        stage.compute()
        stage.let_on()
    patient = stage.ticket(ttft=1.0)
    assert stage.come(patient) == []
    while patient.state is TicketState.WAITING:
        stage.compute()
        stage.let_on()
    assert patient.waited < 1.0


def test_without_a_bound_nobody_is_refused() -> None:
    stage = waiting_stage()
    asked = [stage.ticket() for _ in range(100)]
    assert [refused for each in asked for refused in stage.come(each)] == []
    assert stage.let_on() == []
    assert (stage.admission.waiting, stage.admission.count("default")) == (100, 100)


@pytest.mark.parametrize(("bound", "reason"), [("ttft", "target"), ("limit", "deadline")])
def test_whose_time_passes_in_the_queue_is_refused(bound: str, reason: str) -> None:
    stage = waiting_stage()
    stage.beat("p0", waiting_tokens=300)
    waits, patient = stage.ticket(), stage.ticket()
    setattr(waits, bound, 1.0)
    assert stage.come(waits) == stage.come(patient) == []
    stage.now = 0.99
    assert stage.admission.overdue(stage.now) == []
    stage.now = 1.0
    (refused,) = stage.admission.overdue(stage.now)
    assert (refused.ticket, refused.reason, waits.waited) == (waits, reason, 1.0)
    assert "has not come in 1 s" in refused.error.message
    assert stage.admission.waiting == 1


def test_the_head_of_the_queue_is_refused_rather_than_let_in_too_late() -> None:
    stage = waiting_stage()
    stage.beat("p0", waiting_tokens=300)
    waits = stage.ticket(ttft=1.0)
    assert stage.come(waits) == []
    stage.now = 2.0
    stage.beat("p0")
    step = stage.admission.next(stage.now)
    assert isinstance(step, Refuse)
    assert step.ticket is waits
    assert stage.admission.next(stage.now) is None


def test_what_cannot_be_decoded_is_not_prefilled() -> None:
    stage = Stage()
    stage.beat("p0")
    # 100 blocks of four tokens: one request of 100 tokens and an answer as they are expected at first.
    stage.beat("d0", free=100, running=1)
    one, other = stage.ticket(), stage.ticket()
    assert stage.come(one) == stage.come(other) == []
    assert stage.let_on() == [one]
    assert one.tokens == 100 + FIRST_OUTPUT
    stage.compute()
    assert stage.let_on() == [], "prefill has nothing to do, and decode no room"
    stage.beat("d0", free=75, running=2)
    assert stage.let_on() == []
    stage.beat("d0", free=200, running=1)
    assert stage.let_on() == [other]


def test_answers_that_are_under_way_will_need_room_too() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0", free=100, running=3)
    waits = stage.ticket()
    assert stage.come(waits) == []
    assert stage.let_on() == [], "400 tokens are free, and three answers are to grow by 128 each"
    stage.beat("d0", free=100, running=3, empty_slots=3 * 128)
    assert stage.let_on() == [waits], "they have that room already"


def test_the_worker_that_has_room_gets_it() -> None:
    stage = Stage()
    for name, load in (("p0", {}), ("d0", {"free": 10, "running": 1}), ("d1", {"running": 30})):
        stage.beat(name, **load)
    stage.come(stage.ticket())
    assert len(stage.let_on()) == 1
    decode = stage.placed[0].decode
    assert decode is not None
    assert decode.name == "d1"


@pytest.mark.parametrize(
    ("config", "load", "most"),
    [
        (SLOConfig(classes=(SLOClass(tpot=0.016),)), {}, 4),
        (PLAIN, {"max_sequences": 5}, 5),
        (SLOConfig(classes=(SLOClass(tpot=0.001),)), {}, 1),
    ],
)
def test_decode_workers_get_no_more_sequences_than_they_step_in_time(
    config: SLOConfig, load: dict[str, object], most: int
) -> None:
    stage = Stage(config)
    stage.beat("p0")
    stage.beat("d0", **load)
    for _ in range(10):
        stage.come(stage.ticket(10))
    assert len(stage.let_on()) == most
    stage.placer.release(stage.placed[0], stage.now, computed=True)
    stage.beat("d0", running=most - 1, **load)
    # One that has none takes one, even where the target cannot be kept.
    assert len(stage.let_on()) == 1


def test_a_worker_that_has_measured_nothing_yet_is_not_taken_for_slow() -> None:
    stage = Stage(SLOConfig(classes=(SLOClass(tpot=0.001),)))
    stage.beat("p0")
    stage.beat("d0", step_fixed=0.0, step_per_token=0.0)
    for _ in range(10):
        stage.come(stage.ticket(10))
    assert len(stage.let_on()) == 10


def test_a_strict_class_keeps_others_from_slowing_its_sequences_down() -> None:
    stage = Stage(SLOConfig(classes=(SLOClass(name="fast", tpot=0.014), SLOClass(name="slow"))))
    stage.beat("p0")
    stage.beat("d0")
    fast = stage.ticket(10, name="fast")
    stage.come(fast)
    for _ in range(4):
        stage.come(stage.ticket(10, name="slow"))
    assert len(stage.let_on()) == 2
    stage.admission.ended(fast, 5, (5,))
    assert len(stage.let_on()) == 3


def test_an_idle_cluster_takes_whatever_comes() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0", free=10)
    huge = stage.ticket(5000)
    assert stage.come(huge) == []
    assert stage.let_on() == [huge]


def test_a_full_class_refuses_the_last_of_whoever_has_most_waiting() -> None:
    stage = waiting_stage(SLOConfig(classes=(SLOClass(max_queue=3),)))
    heavy = [stage.ticket(tenant="heavy") for _ in range(3)]
    assert [refused for each in heavy for refused in stage.come(each)] == []
    (refused,) = stage.come(more := stage.ticket(tenant="heavy"))
    assert (refused.ticket, refused.reason) == (more, "queue_full")
    assert type(refused.error) is Overloaded
    assert refused.error.retry_after == pytest.approx(0.3, rel=0.1), "what is ahead of it is computed then"
    light = stage.ticket(tenant="light")
    (refused,) = stage.come(light)
    assert (refused.ticket, light.state) == (heavy[-1], TicketState.WAITING)
    assert stage.admission.waiting == 3


def test_a_light_tenant_is_let_in_where_a_heavy_one_is_refused() -> None:
    stage = waiting_stage()
    for _ in range(30):
        stage.come(stage.ticket(tenant="heavy"))
    heavy, light = stage.ticket(tenant="heavy", ttft=2.0), stage.ticket(tenant="light", ttft=2.0)
    (refused,) = stage.come(heavy)
    assert refused.ticket is heavy
    assert stage.come(light) == []
    assert light.predicted is not None
    assert light.predicted < HEADROOM * 2.0 < 4.0 < (heavy.predicted or 0.0)


def test_who_leaves_the_queue_makes_room_and_its_share_is_nobodys() -> None:
    stage = waiting_stage()
    one, other = stage.ticket(), stage.ticket()
    stage.come(one)
    stage.come(other)
    stage.admission.ended(one, 0, ())
    assert (one.state, stage.admission.waiting) == (TicketState.WITHDRAWN, 1)
    stage.admission.ended(one, 0, ())
    stage.beat("p0")
    assert stage.let_on() == [other]
    stage.admission.unplaced(other)
    assert other.state is TicketState.REFUSED
    stage.admission.ended(other, 0, ())


def test_how_long_answers_are_is_learned() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0")
    for _ in range(200):
        stage.come(ticket := stage.ticket(1))
        stage.let_on()
        stage.admission.ended(ticket, 8, (8,))
    stage.come(ticket := stage.ticket(1))
    assert ticket.output == pytest.approx(8, rel=0.05)
    stage.come(short := Ticket(payload="", slo=stage.slo.of(""), prompt=1, most=3, sequences=2, arrived=0.0))
    assert short.output == 6, "no more than they may"


@pytest.mark.parametrize("mode", ["fallback", "always"])
def test_decode_workers_that_compute_prompts_count_as_such(mode: str) -> None:
    stage = Stage(rule=LocalPrefillRule(mode))  # type: ignore[arg-type]
    stage.beat("d0", prefills=True, step_fixed=0.0)
    asked = [stage.ticket() for _ in range(5)]
    for each in asked:
        stage.come(each)
    assert stage.let_on() == asked[:3]


def test_without_workers_it_is_placement_that_says_so() -> None:
    stage = Stage()
    ticket = stage.ticket(ttft=0.1)
    assert stage.come(ticket) == []
    step = stage.admission.next(0.0)
    assert isinstance(step, Admit)
    assert step.ticket is ticket


def test_what_was_once_predicted_wrong_does_not_keep_requests_from_an_idle_cluster() -> None:
    stage = Stage()
    stage.beat("p0")
    stage.beat("d0")
    for _ in range(100):
        stage.come(ticket := stage.ticket())
        stage.let_on()
        decision = stage.prefilling.popleft()
        stage.now += 10.0
        stage.placer.first_token(decision, stage.now)
        stage.admission.ended(ticket, 1, ())
        stage.beat("p0")
    demand = Demand(needs_decode=True, prompt_tokens=100, ttft_target=0.2)
    prompt = PromptChains(tuple(range(100)))
    snapshot, _ = stage.placer.look(prompt, demand, stage.now)
    assert snapshot.forecast.ttft[snapshot.fleet.row("p0")] > 0.5
    assert stage.placer.soonest(prompt, demand, stage.now) == pytest.approx(0.1)
    stage.placer.place(prompt, demand, RequestKey("r", 0), stage.now)
