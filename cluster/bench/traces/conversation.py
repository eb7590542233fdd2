"""Makes requests of a kind: conversations, which for most kinds end with their first turn.

Arrivals keep the rate that was asked for, whatever the kind: each takes the next turn of the conversation that has
waited longest for it, or begins a conversation where none is due.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from cluster.bench.traces.arrivals import arrival_times
from cluster.bench.traces.kind import Kind
from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.request import BLOCK_TOKENS, TraceRequest, blocks_for
from protocol.errors import ConfigError

SECONDS_PER_TOKEN = 0.02
"""That an answer is taken to need before the next turn can come: an open loop does not wait for it."""


@dataclass(slots=True)
class _Conversation:
    session: int
    turns_left: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0


class Conversations:
    """All that go on at a time. Life cycle: made, then :meth:`request` for each arrival, in order."""

    def __init__(self, kind: Kind, options: TraceOptions, rng: random.Random) -> None:
        self._rng = rng
        self._prompt = kind.prompt.around(options.prompt_tokens)
        self._output = kind.output.around(options.output_tokens)
        self._kind = kind
        self._limit = options.max_tokens
        self._ids = count()
        self._sessions = count()
        opening = min(kind.system_tokens, self._limit // 4) // BLOCK_TOKENS
        self._openings = [list(islice(self._ids, opening)) for _ in range(kind.systems)]
        self._waiting: list[tuple[float, int, _Conversation]] = []
        """When the next turn is due, and a number so that no two are equal."""

    def request(self, at: float) -> TraceRequest:
        """What comes at ``at``."""
        output = min(self._output.draw(self._rng), self._limit // 2)
        while self._waiting and self._waiting[0][0] <= at:
            conversation = heapq.heappop(self._waiting)[2]
            message = self._kind.message.draw(self._rng)
            if conversation.tokens + message + output <= self._limit:
                break
        else:
            conversation = _Conversation(next(self._sessions), self._rng.randint(*self._kind.turns))
            if self._openings:
                conversation.blocks += self._rng.choice(self._openings)
                conversation.tokens = len(conversation.blocks) * BLOCK_TOKENS
            message = min(self._prompt.draw(self._rng), self._limit - conversation.tokens - output)
        self._grow(conversation, message)
        request = TraceRequest(
            at=at,
            blocks=tuple(conversation.blocks),
            prompt_tokens=conversation.tokens,
            output_tokens=output,
            session=conversation.session,
        )
        conversation.turns_left -= 1
        if conversation.turns_left:
            self._grow(conversation, output)
            pause = self._rng.expovariate(1.0 / self._kind.think)
            due = at + output * SECONDS_PER_TOKEN + pause
            heapq.heappush(self._waiting, (due, conversation.session, conversation))
        return request

    def _grow(self, conversation: _Conversation, tokens: int) -> None:
        conversation.tokens += tokens
        conversation.blocks += islice(self._ids, blocks_for(conversation.tokens) - len(conversation.blocks))


def synthetic(kind: Kind, options: TraceOptions) -> Iterator[TraceRequest]:
    """The requests of a kind, in order, without end.

    Raises:
        ConfigError: there is no rate.
    """
    if options.rate is None:
        raise ConfigError(f"the trace {options.name} needs a rate", field="rate")
    conversations = Conversations(kind, options, random.Random(f"{options.seed} content"))  # noqa: S311
    times = arrival_times(
        random.Random(f"{options.seed} arrivals"),  # noqa: S311
        requests=options.requests,
        rate=options.rate,
        rate_end=options.rate_end,
        burstiness=kind.burstiness if options.burstiness is None else options.burstiness,
    )
    return map(conversations.request, times)
