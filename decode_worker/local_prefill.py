"""Tells routers of the prompts that this worker computes itself, and lets those run that have their first token.

There is no lease, no import and no handover: the blocks are the sequence's own from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.prompts import Computed
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence
from engine.first_tokens import FirstTokens
from protocol.forks import ForkBook
from protocol.ids import Peer
from protocol.messages import Message, StageTimes
from protocol.prompt_logprobs import PromptLogprobs
from protocol.worker_watch import WorkerWatch


class LocalPrefill:
    """See the module.

    Args:
        scheduler: of the sequences.
        forks: who is wanted.
        send: sends a message to a router.
        fork: makes sequences of the forks of one that has begun to run, from their first tokens.
        watch: sees how far prompts get.

    Attributes:
        tokens: of prompts, computed here so far.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        forks: ForkBook,
        send: Callable[[Peer, Message], object],
        fork: Callable[[Sequence, tuple[int, ...], StageTimes], None],
        watch: WorkerWatch,
    ) -> None:
        self.tokens = 0
        self._scheduler = scheduler
        self._forks = forks
        self._send = send
        self._fork = fork
        self._watch = watch
        self._first_tokens = FirstTokens(forks, send)

    def advance(self, computed: Computed, now: float) -> None:
        """A step has gone on with a prompt."""
        sequence, draw = computed.sequence, computed.draw
        self.tokens += computed.tokens
        prompt = sequence.prompt
        assert prompt is not None, "it is being computed"
        self._watch.computed(prompt.key, prompt.computed)
        for start, table in prompt.take_tables():
            self._send(prompt.router, PromptLogprobs(key=prompt.key, start=start, table=table))
        if draw is None:
            return
        if not self._first_tokens.tell(prompt, draw, now):
            self._forks.close(sequence.key)
            self._scheduler.drop(sequence.key)
            return
        times = StageTimes(decode_cached_blocks=sequence.cached_blocks)
        self._scheduler.begin(sequence, draw.token_id, now)
        sequence.times = times
        if sequence.request.forks:
            self._fork(sequence, tuple(fork.token_id for fork in draw.forks), times)
