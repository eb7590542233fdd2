"""The request machine under events in any order: messages late, doubled, foreign, lost or overtaken."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from worker_facts import worker

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer, RequestKey
from protocol.messages import ErrorInfo, Failed, PromptLogprobs, Tokens
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import SamplingParams
from router.front.generation import Generation
from router.instructions import Emit, Fail, Instruction, NeedPlacement, SendCancel, SendPrefill, SendReserve
from router.policy import Placement
from router.request import RequestMachine
from router.request_limits import RequestLimits
from router.request_table import RequestState

PROMPT = (900, 901, 902, 903, 904)
PREFILL = [worker(f"p{index}", "prefill") for index in range(2)]
DECODE = [worker(f"d{index}", "decode") for index in range(2)]
CODES = ("engine_failure", "channel_lost", "preempted", "preempted", "invalid_request")
EVENTS = (
    *("a_leg_tells_its_next_tokens",) * 12,
    *("a_leg_tells_of_the_prompt",) * 6,
    "a_table_of_the_prompt_is_lost",
    *("an_old_frame_comes_again",) * 3,
    *("a_leg_begins_too_early",) * 2,
    *("time_passes",) * 2,
    *("workers_join",) * 2,
    *("a_leg_fails",) * 2,
    "frames_of_decode_are_lost",
    *("a_late_failure_comes",) * 2,
    "a_worker_is_lost",
    "an_older_worker_is_lost",
    "a_stranger_speaks",
    "much_time_passes",
    "the_client_leaves",
)
"""What may happen next; how often each stands here is how likely it is."""


@dataclass
class Leg:
    """What a worker was asked for, and how far it has told."""

    peer: Peer
    key: RequestKey
    prefill: bool
    base: int
    handed_off: bool
    told: int = 0
    over: bool = False
    sent: list[Tokens] = field(default_factory=list)
    prompt_told: int = len(PROMPT)
    tables: list[PromptLogprobs] = field(default_factory=list)


def table(start: int, stop: int) -> LogprobTable:
    """Of prompt tokens: each has the log-probability of minus its index."""
    return LogprobTable(
        0,
        struct.pack(f"<{stop - start}f", *(-float(at) for at in range(start, stop))),
        bytes(4 * (stop - start)),
        b"",
        b"",
    )


class RequestUnderFire(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.truth: tuple[int, ...] = ()
        self.output: list[int] = []
        self.scores: list[float] = []
        self.legs: list[Leg] = []
        self.ends: list[str] = []
        self.choices = 0

    @initialize(
        length=st.sampled_from([1, 2, 3, 6, 9]),
        max_tokens=st.sampled_from([6, 1, 2, 9]),
        attempts=st.sampled_from([4, 2, 1]),
        scored=st.booleans(),
    )
    def begin(self, length: int, max_tokens: int, attempts: int, scored: bool) -> None:
        # The model says `length` tokens, the last one a stop token, unless max_tokens ends it before.
        self.truth = tuple(range(100, 100 + min(length, max_tokens)))
        self.finish = "stop" if length <= max_tokens else "length"
        sampling = SamplingParams(max_tokens=max_tokens)
        limits = RequestLimits(max_attempts=attempts, request_timeout=300.0)
        generation = Generation(PROMPT, sampling, prompt_logprobs=0 if scored else None)
        self.expected = [-float(at) for at in range(1, len(PROMPT))] if scored else []
        self.request = RequestMachine("r", generation, limits)
        self.carry_out(self.request.submit(self.now))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Emit(token_ids, finish_reason, prompt_logprobs=tables):
                    assert not self.ends, "nothing is emitted after the end"
                    self.output.extend(token_ids)
                    self.scores += [row.logprob for each in tables for row in each.rows()]
                    if finish_reason is not None:
                        self.ends.append(finish_reason)
                case Fail():
                    assert not self.ends
                    self.ends.append("failed")
                case SendReserve(peer, message):
                    assert message.token_ids == (*PROMPT, *self.output)
                    self.legs.append(Leg(peer, message.key, False, message.emitted + 1, False, message.emitted + 1))
                case SendPrefill(peer, message):
                    assert message.token_ids == (*PROMPT, *self.output)
                    assert message.emitted == len(self.output)
                    leg = Leg(peer, message.key, True, message.emitted, message.handoff is not None, message.emitted)
                    if message.prompt_logprobs is not None:
                        leg.prompt_told = message.prompt_logprobs_from
                    self.legs.append(leg)
                case SendCancel(peer, key):
                    for leg in self.legs:
                        leg.over = leg.over or (leg.peer == peer and leg.key == key)
                case NeedPlacement(needs_decode):
                    self.place(needs_decode)

    def place(self, needs_decode: bool) -> None:
        self.choices += 1
        if self.request.attempt and self.choices % 5 == 0:
            self.carry_out(self.request.unplaced(NoWorkerAvailable("none"), self.now))
            return
        decode = DECODE[self.choices // 2 % 2] if needs_decode else None
        self.carry_out(self.request.placed(Placement(PREFILL[self.choices // 3 % 2], decode), self.now))

    def tell(self, leg: Leg, start: int, end: int) -> None:
        finish = self.finish if end == len(self.truth) else None
        message = Tokens(key=leg.key, start=start, token_ids=self.truth[start:end], finish_reason=finish)
        leg.told = end
        leg.sent.append(message)
        self.deliver(leg, message)

    def deliver(self, leg: Leg, message: Tokens) -> None:
        self.carry_out(self.request.tokens(leg.peer, message, self.now))
        # Prefill's part is done with its token; decode's with a token that it knows to be the last.
        leg.over = leg.over or leg.prefill or message.finish_reason is not None

    def pick(self, data: st.DataObject, legs: list[Leg]) -> Leg | None:
        # The last legs are the current attempt's, the others a late message's; both must come up often.
        current = [leg for leg in legs if leg.key.attempt == self.request.attempt]
        chosen = data.draw(st.sampled_from([current, current, current, legs]))
        return data.draw(st.sampled_from(chosen)) if chosen else None

    @rule(data=st.data(), event=st.sampled_from(EVENTS))
    def something_happens(self, data: st.DataObject, event: str) -> None:
        getattr(self, event)(data)

    def a_leg_tells_its_next_tokens(self, data: st.DataObject) -> None:
        ready = [
            leg
            for leg in self.legs
            if leg.told < len(self.truth) and not (leg.prefill and leg.sent) and leg.prompt_told == len(PROMPT)
        ]
        leg = self.pick(data, ready)
        if leg is not None:
            count = 1 if leg.prefill else data.draw(st.integers(1, 3))
            self.tell(leg, leg.told, min(len(self.truth), leg.told + count))

    def a_leg_tells_of_the_prompt(self, data: st.DataObject) -> None:
        leg = self.pick(data, [leg for leg in self.legs if leg.prompt_told < len(PROMPT)])
        if leg is not None:
            stop = data.draw(st.integers(leg.prompt_told + 1, len(PROMPT)))
            message = PromptLogprobs(key=leg.key, start=leg.prompt_told, table=table(leg.prompt_told, stop))
            leg.prompt_told = stop
            leg.tables.append(message)
            self.carry_out(self.request.prompt_told(leg.peer, message, self.now))

    def a_table_of_the_prompt_is_lost(self, data: st.DataObject) -> None:
        leg = self.pick(data, [leg for leg in self.legs if leg.prompt_told < len(PROMPT)])
        if leg is not None:
            leg.prompt_told += 1

    def a_leg_begins_too_early(self, data: st.DataObject) -> None:
        leg = self.pick(data, [leg for leg in self.legs if leg.sent and not leg.prefill])
        if leg is not None:
            self.tell(leg, data.draw(st.integers(leg.base, leg.told - 1)), min(len(self.truth), leg.told + 1))

    def an_old_frame_comes_again(self, data: st.DataObject) -> None:
        told = self.pick(data, [leg for leg in self.legs if leg.tables])
        if told is not None:
            self.carry_out(self.request.prompt_told(told.peer, data.draw(st.sampled_from(told.tables)), self.now))
        leg = self.pick(data, [leg for leg in self.legs if leg.sent])
        if leg is not None:
            self.deliver(leg, data.draw(st.sampled_from(leg.sent)))

    def frames_of_decode_are_lost(self, data: st.DataObject) -> None:
        leg = self.pick(data, [leg for leg in self.legs if not leg.prefill and leg.told < len(self.truth)])
        if leg is not None:
            leg.told += 1

    def a_leg_fails(self, data: st.DataObject) -> None:
        leg = self.pick(data, self.legs)
        if leg is not None:
            leg.told = len(self.truth)
            error = ErrorInfo(code=data.draw(st.sampled_from(CODES)), message="so it is")
            self.carry_out(self.request.failed(leg.peer, Failed(key=leg.key, error=error), self.now))

    def a_late_failure_comes(self, data: st.DataObject) -> None:
        late = [leg for leg in self.legs if leg.key.attempt < self.request.attempt]
        if late:
            leg = data.draw(st.sampled_from(late))
            error = ErrorInfo(code="invalid_request", message="of an attempt that is over")
            assert self.request.failed(leg.peer, Failed(key=leg.key, error=error), self.now) == []

    def a_worker_is_lost(self, data: st.DataObject) -> None:
        leg = self.pick(data, self.legs)
        if leg is not None:
            self.carry_out(self.request.worker_lost(leg.peer, "killed", self.now))

    def an_older_worker_is_lost(self, data: st.DataObject) -> None:
        for leg in self.legs:
            assert self.request.worker_lost(Peer(leg.peer.name, 0), "killed", self.now) == []

    def a_stranger_speaks(self, data: st.DataObject) -> None:
        for leg in self.legs:
            stranger = Peer(leg.peer.name, leg.peer.incarnation + 1)
            message = Tokens(key=leg.key, start=len(self.output), token_ids=(666,), finish_reason="stop")
            assert self.request.tokens(stranger, message, self.now) == []

    def time_passes(self, data: st.DataObject) -> None:
        self.now += data.draw(st.sampled_from([0.01, 0.1, 1.0, 3.0]))
        self.carry_out(self.request.tick(self.now))

    def much_time_passes(self, data: st.DataObject) -> None:
        self.now += 61.0
        self.carry_out(self.request.tick(self.now))

    def workers_join(self, data: st.DataObject) -> None:
        self.carry_out(self.request.workers_changed(self.now))

    def the_client_leaves(self, data: st.DataObject) -> None:
        if not self.request.ended:
            self.carry_out(self.request.cancel(self.now))
            self.ends.append("cancelled")

    @invariant()
    def the_output_is_a_prefix_of_the_truth(self) -> None:
        assert tuple(self.output) == self.truth[: len(self.output)]

    @invariant()
    def the_prompt_is_told_of_once_and_whole_with_the_first_token(self) -> None:
        if self.truth:
            assert self.scores == (self.expected if self.output else [])

    @invariant()
    def there_is_one_end(self) -> None:
        if not self.truth:
            return
        assert len(self.ends) == int(self.request.ended)
        if self.ends and self.ends[0] in ("stop", "length"):
            assert self.request.state is RequestState.FINISHED
            assert tuple(self.output) == self.truth
            assert self.ends[0] == self.finish

    @invariant()
    def every_leg_of_an_ended_attempt_is_closed(self) -> None:
        if not self.truth:
            return
        for leg in self.legs:
            if self.request.ended or leg.key.attempt < self.request.attempt:
                assert leg.over, f"{leg.peer} was left open"

    @invariant()
    def a_live_request_is_always_waited_for(self) -> None:
        if self.truth and not self.request.ended:
            assert self.request.deadline <= 300.0

    def teardown(self) -> None:
        if self.truth and not self.request.ended:
            self.now = 1e6
            self.carry_out(self.request.tick(self.now))
            assert self.ends == ["failed"]
            self.every_leg_of_an_ended_attempt_is_closed()


TestRequestUnderFire = RequestUnderFire.TestCase
TestRequestUnderFire.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
