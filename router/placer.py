"""Places attempts on workers, with all that this takes: the fleet, the index of their caches, and what came of it.

No I/O: messages to workers are returned. One for each router, for its whole life.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from protocol.errors import NoWorkerAvailable, TargetOutOfReach
from protocol.ids import Peer, RequestKey
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from router.block_index import BlockIndex
from router.explanations import DECODE_FIELDS, PREFILL_FIELDS, Candidates, Decision, Explanations
from router.fleet import Fleet, Floats, Work
from router.forecast import crossing, forecast, forecast_local
from router.kv_feed import KVFeeds
from router.local_prefill import LocalPrefillRule, decide, prompt_rows
from router.policy import Choice, Demand, Placement, Snapshot
from router.prompt_chain import Prompt
from router.registry import Worker, WorkerRegistry
from router.slo.capacity import Capacity, Terms

LEAST_TOKENS = 4
"""Output tokens from which on a pace is measured."""


@dataclass(frozen=True, slots=True)
class PlacerConfig:
    """Settings; see ``RouterConfig`` for each."""

    model: str
    policy: str
    local_prefill: LocalPrefillRule = field(default_factory=LocalPrefillRule)
    slow_start: float = 10.0
    explained_requests: int = 1024


class Placer:
    """Chooses workers.

    Args:
        config: settings.
        registry: of the workers.

    Attributes:
        index: of the workers' prefix caches.
        feeds: that keep it.
        explanations: of the last decisions.
    """

    def __init__(self, config: PlacerConfig, registry: WorkerRegistry) -> None:
        self.index = BlockIndex()
        self.feeds = KVFeeds(self.index)
        self.explanations = Explanations(config.explained_requests)
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
        told = forecast(self._fleet, length, self._cached(prompt), now, self._config.slow_start)
        snapshot = Snapshot(self._fleet, told)
        return snapshot, decide(self._config.policy, snapshot, demand, self._config.local_prefill)

    def soonest(self, prompt: Prompt, demand: Demand, now: float) -> float:
        """Seconds in which a first token is predicted at the earliest; 0 where nobody could give it."""
        try:
            snapshot, choice = self.look(prompt, demand, now)
        except NoWorkerAvailable:
            return 0.0
        return _soonest(snapshot, choice)

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
        snapshot, choice = self.look(prompt, demand, now)
        fleet, told = self._fleet, snapshot.forecast
        if demand.ttft_target and not choice.local:
            soonest = _soonest(snapshot, choice)
            if soonest > demand.ttft_target:
                raise TargetOutOfReach(
                    f"the first token is predicted in {soonest:.3g} s, and wanted within {demand.ttft_target:g} s",
                    soonest - demand.ttft_target,
                )
        prefill, decode = fleet.workers[choice.prefill], None
        assert prefill is not None, "it takes work"
        names, decode_candidates, blocks = fleet.names, None, None
        if choice.decode is not None and choice.decode_candidates is not None:
            decode = fleet.workers[choice.decode]
            if choice.decode != choice.prefill:
                blocks = crossing(fleet, told, choice.prefill, choice.decode)
            judged_by = (
                told.running,
                told.missing,
                told.transfer,
                told.tpot,
                told.wait,
                told.speed,
                choice.ranking.decode,
            )
            decode_candidates = Candidates(names, choice.decode_candidates, DECODE_FIELDS, judged_by)
        ttft = forecast_local(fleet, told).ttft if choice.local else told.ttft
        columns = (told.queue, told.uncached, ttft, told.wait, told.speed, choice.ranking.prefill)
        uncached = float(told.uncached[choice.prefill])
        decision = Decision(
            request_id=key.request_id,
            attempt=key.attempt,
            policy=self._config.policy,
            at=now,
            prompt_tokens=prompt.length,
            cached_tokens=prompt.length - int(uncached),
            local_prefill=choice.local,
            prefill=prefill.peer,
            decode=None if decode is None else decode.peer,
            predicted_ttft=float(ttft[choice.prefill]),
            predicted_tpot=None if choice.decode is None else float(told.tpot[choice.decode]),
            predicted_transfer=None if blocks is None else blocks.ahead + blocks.alone,
            prefill_candidates=Candidates(names, choice.prefill_candidates, PREFILL_FIELDS, columns),
            decode_candidates=decode_candidates,
            charged_tokens=uncached,
            charged_prompt=prompt.length,
            charged_sequences=demand.sequences,
        )
        fleet.send_prompt(choice.prefill, uncached, prompt.length, now)
        if choice.decode is not None:
            fleet.send_sequences(choice.decode, demand.sequences)
            if blocks is not None:
                fleet.links.send(choice.prefill, choice.decode, blocks.alone, now)
            fleet.claim(choice.decode, demand.reserve)
        return Placement(prefill, decode, choice.local), decision

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

    def _cached(self, prompt: Prompt) -> Floats:
        """Tokens of the prompt that each worker has."""
        cached = np.zeros(len(self._fleet))
        if self.index.blocks and prompt.length:
            for size, rows in self._fleet.block_sizes().items():
                cached += self.index.depths(prompt.keys(size), rows, len(self._fleet)) * size
        return cached


def _soonest(snapshot: Snapshot, choice: Choice) -> float:
    fleet, told = snapshot.fleet, snapshot.forecast
    if choice.local:
        return float(forecast_local(fleet, told).ttft[choice.prefill])
    # Who has nothing to do is judged by its pace alone: were all refused for a correction, nothing would put it right.
    alone = np.where(told.queue < 1.0, fleet.fixed + told.compute, np.inf)
    return float((np.minimum(told.ttft, alone) + told.wait)[fleet.able("prefill")].min())
