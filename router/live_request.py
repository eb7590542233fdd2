"""One request under way, and what the dispatcher remembers of it.

Life cycle: made when the request is let in, dropped in the moment its machine has ended; only its mailbox stays with
the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.ids import Peer, new_request_id
from router.explanations import Decision
from router.front.generation import Generation
from router.instructions import Instruction, NeedPlacement
from router.mailbox import Mailbox
from router.placer import Placer
from router.policy import Demand, Placement
from router.prompt_chain import PromptChains
from router.request import RequestMachine
from router.request_limits import RequestLimits
from router.slo.ticket import Ticket


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One live request.

    Attributes:
        machine: decides.
        generation: what its reader wants.
        chains: of its prompt's blocks.
        mailbox: its reader's.
        placement: where its latest attempt runs, or ran.
        answered: whether its first token was given out.
        decision: why its latest attempt went there; those that one prefill comes to share it. None before the first.
        charged: the same as long as that attempt is under way.
        ticket: its place in the queue of those that are to be let in, which it may share with others.
    """

    machine: RequestMachine
    generation: Generation
    chains: PromptChains
    mailbox: Mailbox = field(default_factory=Mailbox)
    placement: Placement | None = None
    answered: bool = False
    decision: Decision | None = None
    ticket: Ticket[Any] | None = None
    charged: Decision | None = None

    def decided(self, decision: Decision | None) -> None:
        """An attempt begins."""
        self.decision = self.charged = decision

    def over(self, placer: Placer, now: float, *, computed: bool = False) -> None:
        """Its latest attempt is over, and nothing of it is ahead of any worker any more; twice does no more than once.

        ``computed`` when its prompt was.
        """
        decision, self.charged = self.charged, None
        if decision is not None:
            placer.release(decision, now, computed=computed)

    @classmethod
    def of(cls, generation: Generation, limits: RequestLimits) -> LiveRequest:
        """One that has just come.

        Raises:
            InvalidRequest: it can never be served; names the field.
        """
        machine = RequestMachine(new_request_id(), generation, limits)
        return cls(machine, generation, PromptChains(generation.token_ids, generation.cache_salt))

    def seen(self, instruction: Instruction, now: float) -> Instruction:
        """What the machine asks for, once its trace has seen it; what opens an attempt carries its span."""
        trace, machine = self.generation.trace, self.machine
        if trace is None:
            return instruction
        return trace.seen(machine.key, machine.timeline, self.decision, instruction, now)

    def demand(
        self,
        wish: NeedPlacement,
        *,
        turn: int = 0,
        ttft_target: float = 0.0,
        full: frozenset[Peer] = frozenset(),
        barred: frozenset[Peer] = frozenset(),
        sequences: int = 1,
    ) -> Demand:
        """What its next attempt wants of a placement; arguments as in :class:`Demand`.

        ``full`` are further workers to avoid: those that have no room.
        """
        machine, generation = self.machine, self.generation
        if machine.emitted:
            self.chains.grow(machine.token_ids)
        return Demand(
            needs_decode=wish.needs_decode,
            excluded=wish.excluded | full,
            turn=turn,
            prompt_tokens=machine.prompt_tokens,
            output=generation.sampling.max_tokens - machine.emitted,
            session=generation.session,
            sequences=sequences,
            ttft_target=ttft_target,
            barred=barred,
            reserve=0.0 if self.ticket is None or machine.attempt else self.ticket.tokens,
        )
