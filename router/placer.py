"""Places attempts on workers, with all that this takes: the fleet, the index of their caches, and what came of it.

No I/O: messages to workers are returned. One for each router, for its whole life.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protocol.errors import NoWorkerAvailable, TargetOutOfReach
from protocol.ids import Peer, RequestKey
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from router.bid import Bid, bid_of, soonest
from router.block_index import BlockIndex, mark, rows_of
from router.columns import Floats
from router.explanations import Decision, Explanations
from router.fleet import Fleet, Work
from router.forecast import forecast
from router.glance import glance
from router.kv_feed import KVFeeds
from router.local_prefill import LocalPrefillRule, decide, prompt_rows
from router.policy import DEFAULT, Choice, Demand, Placement, Snapshot
from router.prompt_chain import Prompt
from router.registry import Worker, WorkerRegistry
from router.slo.capacity import Capacity, Terms

LEAST_TOKENS = 4
"""Output tokens from which on a pace is measured."""


@dataclass(frozen=True, slots=True)
class PlacerConfig:
    """Settings; see ``RouterConfig`` for each.

    Attributes:
        first_turn: where this router's turns begin.
    """

    model: str
    policy: str
    local_prefill: LocalPrefillRule = field(default_factory=LocalPrefillRule)
    slow_start: float = 10.0
    explained_requests: int = 1024
    first_turn: int = 0


class Placer:
    """Chooses workers.

    Args:
        config: settings.
        registry: of the workers.

    Attributes:
        index: of the workers' prefix caches.
        feeds: that keep it.
        explanations: of the last decisions.
        first_turn: where the turns of this router's requests begin.
    """

    def __init__(self, config: PlacerConfig, registry: WorkerRegistry) -> None:
        self.index = BlockIndex()
        self.feeds = KVFeeds(self.index)
        self.explanations = Explanations(config.explained_requests)
        self.first_turn = config.first_turn
        self._config = config
        self._registry = registry
        self._fleet = Fleet(config.model, config.slow_start)
        self._seen = -1

    def heartbeat(self, peer: Peer, kv_sequence: int, now: float) -> KVFollow | None:
        """A worker has beaten; returns what it is to be sent."""
        worker, version = self._registry.find(peer), self._registry.version
        # Seldom has anything else come since all were seen, and a thousand workers beat every half millisecond.
        if self._seen == version - 1 and worker is not None and self._fleet.see_again(worker, now):
            self._seen = version
        else:
            self._see(now)
        row = self._fleet.find(peer)
        return None if row is None else self.feeds.heartbeat(peer, row, kv_sequence, now)

    def told(self, peer: Peer, message: KVEvents | KVSnapshot, now: float) -> KVFollow | None:
        """A worker has told of its prefix cache; returns what it is to be sent."""
        if isinstance(message, KVEvents):
            return self.feeds.events(peer, message, now)
        return self.feeds.snapshot(peer, message, now)

    def look(self, prompt: Prompt, demand: Demand, now: float) -> tuple[Snapshot, Choice]:
        """The best pair for a prompt, and what it was chosen from; nothing is changed by it.

        Raises:
            NoWorkerAvailable: there is none; says which role is missing.
        """
        self._see(now)
        length = prompt.length
        told = forecast(self._fleet, length, self._cached(prompt, now), now, self._config.slow_start)
        snapshot = Snapshot(self._fleet, told)
        return snapshot, decide(self._config.policy, snapshot, demand, self._config.local_prefill)

    def soonest(self, prompt: Prompt, demand: Demand, now: float) -> float:
        """Seconds in which a first token is predicted at the earliest; 0 where nobody could give it."""
        try:
            snapshot, choice = self.look(prompt, demand, now)
        except NoWorkerAvailable:
            return 0.0
        return soonest(snapshot, choice)

    def capacity(self, terms: Terms, now: float) -> Capacity:
        """What the workers have room for."""
        self._see(now)
        return Capacity(self._fleet, prompt_rows(self._fleet, self._config.local_prefill), terms)

    def place(self, prompt: Prompt, demand: Demand, key: RequestKey, now: float) -> tuple[Placement, Decision]:
        """As :meth:`look`, and reckon with the work from now on.

        Raises:
            NoWorkerAvailable: there is none; says which role is missing.
            TargetOutOfReach: there is, but none is predicted to give the first token in time.
        """
        bid = self._bid(prompt, demand, now)
        fleet = self._fleet
        prefill, decode = fleet.workers[bid.prefill], None if bid.decode is None else fleet.workers[bid.decode]
        assert prefill is not None, "it takes work"
        decision = Decision(
            request_id=key.request_id,
            attempt=key.attempt,
            policy=self._config.policy,
            at=now,
            prompt_tokens=prompt.length,
            cached_tokens=prompt.length - int(bid.uncached),
            local_prefill=bid.local,
            prefill=prefill.peer,
            decode=None if decode is None else decode.peer,
            predicted_ttft=bid.ttft,
            predicted_tpot=bid.tpot,
            predicted_transfer=None if bid.blocks is None else bid.blocks.ahead + bid.blocks.alone,
            prefill_candidates=bid.prefill_candidates,
            decode_candidates=bid.decode_candidates,
            charged_tokens=bid.uncached,
            charged_prompt=prompt.length,
            charged_sequences=demand.sequences,
        )
        fleet.send_prompt(bid.prefill, bid.uncached, prompt.length, now)
        if bid.decode is not None:
            fleet.send_sequences(bid.decode, demand.sequences)
            if bid.blocks is not None:
                fleet.links.send(bid.prefill, bid.decode, bid.blocks.alone, now)
            fleet.claim(bid.decode, demand.reserve)
        return Placement(prefill, decode, bid.local), decision

    def first_token(self, decision: Decision, now: float) -> float | None:
        """A first token of an attempt came; returns how far the prediction was off, in seconds.

        Of several that one prompt came to only the first tells anything; None of the others.
        """
        if decision.measured_ttft is not None:
            return None
        decision.measured_ttft = now - decision.at
        work: Work = "local" if decision.local_prefill else "prefill"
        self._correct(decision.prefill, work, decision.predicted_ttft, decision.measured_ttft, now)
        self._prompt_over(decision, now, computed=True)
        return abs(decision.measured_ttft - decision.predicted_ttft)

    def taken_over(self, decision: Decision, nbytes: int, seconds: float, now: float) -> None:
        """Decode's first token of an attempt came, whose blocks have taken so long to cross."""
        if decision.taken_over is not None or decision.decode is None:
            return
        decision.taken_over = now
        here, there = self._fleet.find(decision.prefill), self._fleet.find(decision.decode)
        if nbytes and seconds > 0.0 and here is not None and there is not None:
            self._fleet.links.crossed(here, there, nbytes, seconds, now)

    def ended(self, decision: Decision, tokens: int, now: float) -> None:
        """A sequence of an attempt has ended, and all attempts of it gave so many tokens.

        What passes until decode takes over is a wait for blocks, and says nothing of its steps; nor does one attempt
        of several, since which tokens were its own is not told here.
        """
        began, predicted = decision.taken_over, decision.predicted_tpot
        if tokens < LEAST_TOKENS or decision.attempt or decision.decode is None or began is None or predicted is None:
            return
        decision.measured_tpot = (now - began) / (tokens - 2)
        self._correct(decision.decode, "decode", predicted, decision.measured_tpot, now)

    def release(self, decision: Decision, now: float, *, computed: bool) -> None:
        """A sequence of an attempt is over, however it ended: it is ahead of nobody any more; once for each.

        ``computed`` when its prompt was, though nobody was told of its first token yet.
        """
        assert decision.charged_sequences > 0, "each of them is over once"
        decision.charged_sequences -= 1
        if decision.decode is not None:
            self._fleet.sequence_over(decision.decode)
        if not decision.charged_sequences:
            self._prompt_over(decision, now, computed=computed)

    def _prompt_over(self, decision: Decision, now: float, *, computed: bool) -> None:
        tokens, prompt = decision.charged_tokens, decision.charged_prompt
        if prompt:
            self._fleet.prompt_over(decision.prefill, tokens, prompt, now, computed=computed)
            decision.charged_tokens, decision.charged_prompt = 0.0, 0

    def _correct(self, peer: Peer, work: Work, predicted: float, measured: float, now: float) -> None:
        if predicted > 0 and measured > 0:
            self._fleet.correct(peer, work, measured / predicted, now)

    def _see(self, now: float) -> None:
        if self._seen == self._registry.version:
            return
        self._seen = self._registry.version
        workers: tuple[Worker, ...] = self._registry.workers()
        for name in self._fleet.see(workers, now):
            self.feeds.forget(name)

    def _bid(self, prompt: Prompt, demand: Demand, now: float) -> Bid:
        """What :meth:`look` comes to; the default policy's among few workers in plain numbers."""
        self._see(now)
        config, fleet, bid, earliest = self._config, self._fleet, None, 0.0
        if config.policy == DEFAULT and config.local_prefill.quiet(demand.prompt_tokens) and fleet.small:
            found = glance(fleet, prompt.length, self._cached_by_few(prompt, now), demand, now, config.slow_start)
            if found is not None:
                bid, earliest = found
        if bid is None:
            snapshot, choice = self.look(prompt, demand, now)
            bid = bid_of(snapshot, choice, explained=config.explained_requests > 0)
            earliest = soonest(snapshot, choice) if demand.ttft_target and not bid.local else 0.0
        if demand.ttft_target and earliest > demand.ttft_target:
            late = earliest - demand.ttft_target
            raise TargetOutOfReach(
                f"the first token is predicted in {earliest:.3g} s, and wanted within {demand.ttft_target:g} s", late
            )
        return bid

    def _depths(self, prompt: Prompt, now: float) -> Iterator[tuple[int, int]]:
        """Bits of rows, and how many tokens of the prompt these have; of those that are in none it is none."""
        self.feeds.settle(now)
        if self.index.blocks and prompt.length:
            for size, among in self._fleet.block_sizes().items():
                for bits, depth in self.index.depths(prompt.keys(size), among):
                    yield bits, depth * size

    def _cached(self, prompt: Prompt, now: float) -> Floats:
        """Tokens of the prompt that each worker has."""
        cached = np.zeros(len(self._fleet))
        for bits, tokens in self._depths(prompt, now):
            mark(cached, bits, tokens)
        return cached

    def _cached_by_few(self, prompt: Prompt, now: float) -> dict[int, int]:
        """The same by row, of those that have any."""
        return {row: tokens for bits, tokens in self._depths(prompt, now) for row in rows_of(bits)}
