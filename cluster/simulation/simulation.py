"""Wires routers, workers and links together and lets time pass until every request of a trace has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from itertools import cycle

from cluster.bench.traces.request import TraceRequest
from cluster.simulation.agenda import Agenda
from cluster.simulation.decode_worker import DecodeWorker
from cluster.simulation.elastic_fleet import ElasticFleet
from cluster.simulation.figures import Figures, figures_of
from cluster.simulation.job import Job
from cluster.simulation.link import Link
from cluster.simulation.prefill_worker import PrefillWorker
from cluster.simulation.prompt import Prompts, SimulatedPrompt
from cluster.simulation.record import Outcome, Records, Request
from cluster.simulation.scenario import Failure, Scenario
from cluster.simulation.simulated_router import SimulatedRouter
from cluster.simulation.simulated_worker import HEARTBEAT, MODEL, Site, Tally
from cluster.simulation.tenants import Tenants
from protocol.ids import Peer, Role
from protocol.kv_events import KVFollow
from protocol.messages import Message
from router.config import RouterConfig
from router.policy import Placement

BEGIN = 1.0
"""Seconds in which routers get to know the workers before the trace begins."""
LONGEST = 1e7
"""Seconds after which a run ends whatever is left."""

AnyWorker = PrefillWorker | DecodeWorker


class Simulation:
    """One run.

    Args:
        scenario: what is simulated.
        trace: the requests, by their times.
        count: how many at most.

    Attributes:
        fleet: what makes workers come and go; None where nothing does.
    """

    def __init__(self, scenario: Scenario, trace: Iterable[TraceRequest], count: int) -> None:
        self._scenario = scenario
        self._agenda = Agenda()
        self._trace = iter(trace)
        self._prompts = Prompts(scenario.profile.layout.block_size)
        self._tenants = Tenants(scenario.tenants, scenario.seed)
        self._records = Records(count, self._tenants.names)
        self._count = count
        self._arrived = 0
        self._messages = 0
        told = scenario.link if scenario.told_link is None else scenario.told_link
        self._site = Site(self._agenda, scenario.profile, scenario.latency, told, self._tell)
        self._workers: dict[str, AnyWorker] = {}
        self._tallies = {name: Tally() for name in scenario.names}
        config = RouterConfig(
            model=MODEL,
            tokenizer=MODEL,
            policy=scenario.policy,
            ttft_target=scenario.ttft_target,
            local_prefill=scenario.local_prefill,
            slo=scenario.slo,
            max_requests=scenario.max_requests,
            explained_requests=0,
        )
        self._routers = {
            name: SimulatedRouter(name, config, self._agenda, self._records, self._send, self._open, self._close)
            for name in (f"router-{number}" for number in range(scenario.routers))
        }
        self._turns = cycle(self._routers.values())
        self.fleet: ElasticFleet | None = None
        if scenario.elasticity is not None:
            self.fleet = ElasticFleet(
                scenario.elasticity,
                scenario.names,
                self._agenda,
                self._records,
                self._workers,
                lambda: [request for router in self._routers.values() for request in router.queue()],
                self._start,
                self._stop,
            )

    def run(self, progress: Callable[[int], None] | None = None) -> Figures:
        """Let time pass; ``progress`` is told now and then how many requests have ended."""
        begun = time.process_time()
        rng = random.Random(self._scenario.seed)  # noqa: S311
        for name in self._scenario.names:
            role = "prefill" if name.startswith("prefill") else "decode"
            self._agenda.at(rng.random() * HEARTBEAT, self._start, name, 1, role)
        for router in self._routers.values():
            router.tick()
        for failure in self._scenario.failures:
            self._agenda.at(BEGIN + failure.at, self._fail, failure)
        if self.fleet is not None:
            self._agenda.at(BEGIN, self.fleet.tick)
        self._next_arrival()
        step = max(1, self._count // 100)
        told = 0
        while self._records.ended < self._count and self._agenda.now < LONGEST:
            goal = min(self._count, told + step)
            self._agenda.run(lambda goal=goal: self._records.ended < goal, LONGEST)  # type: ignore[misc]
            told = self._records.ended
            if progress is not None:
                progress(told)
        return figures_of(
            self._scenario,
            self._records,
            self._tallies,
            simulated=self._agenda.now - BEGIN,
            seconds=time.process_time() - begun,
            events=self._agenda.done,
            messages=self._messages,
            placers=[router.placer for router in self._routers.values()],
        )

    @property
    def routers(self) -> tuple[SimulatedRouter, ...]:
        """All of them."""
        return tuple(self._routers.values())

    @property
    def workers(self) -> tuple[AnyWorker, ...]:
        """The last life of each."""
        return tuple(self._workers.values())

    def settle(self, seconds: float) -> None:
        """Let so much more time pass, with no further request."""
        self._agenda.run(lambda: True, self._agenda.now + seconds)

    def _next_arrival(self) -> None:
        request = next(self._trace, None) if self._arrived < self._count else None
        if request is None:
            self._count = self._arrived
            return
        self._agenda.at(BEGIN + request.at, self._arrive, request)

    def _arrive(self, trace: TraceRequest) -> None:
        router = next(self._turns)
        tenant = self._tenants.of(trace.session)
        request = Request(self._arrived, trace, self._prompts.of(trace), router, self._agenda.now, tenant)
        self._arrived += 1
        profile = self._scenario.profile
        if trace.prompt_tokens + trace.output_tokens > profile.num_blocks * profile.layout.block_size:
            self._records.end(request, Outcome.REFUSED, self._agenda.now)
        else:
            router.arrive(request)
        self._next_arrival()

    def _start(self, name: str, incarnation: int, role: Role) -> None:
        # One that has changed its role keeps its name, and what it does counts for each role by itself.
        tallied = name if name.startswith(role) else f"{role}:{name}"
        peer, tally = Peer(name, incarnation), self._tallies.setdefault(tallied, Tally())
        link = Link(self._scenario.link)
        worker: AnyWorker
        if role == "prefill":
            worker = PrefillWorker(peer, self._site, link, tally, self._computed)
        else:
            tell = (self._hand_over, self._told_first, self._taken_over, self._ended)
            worker = DecodeWorker(peer, self._site, link, tally, *tell)
        self._workers[name] = worker
        worker.beat()

    def _stop(self, name: str) -> None:
        worker = self._workers[name]
        worker.die()
        for router in self._routers.values():
            self._agenda.after(self._scenario.latency, router.disconnected, worker.peer)

    def _fail(self, failure: Failure) -> None:
        worker = self._workers[failure.worker]
        self._stop(failure.worker)
        if failure.back:
            self._agenda.after(failure.back, self._start, failure.worker, worker.peer.incarnation + 1, worker.role)

    def _tell(self, sender: Peer, message: Message) -> None:
        for router in self._routers.values():
            self._messages += 1
            self._agenda.after(self._scenario.latency, router.hear, sender, message)

    def _send(self, router: Peer, peer: Peer, message: KVFollow) -> None:
        worker = self._workers[peer.name]
        self._agenda.after(self._scenario.latency, worker.follow, router, message)

    def _open(self, request: Request, prompt: SimulatedPrompt, placement: Placement) -> Job:
        prefill = self._workers[placement.prefill.peer.name]
        decode = None if placement.decode is None else self._workers[placement.decode.peer.name]
        assert not isinstance(decode, PrefillWorker), "no prefill worker decodes"
        job = Job(request, request.attempt, prompt, request.trace.output_tokens - request.emitted, prefill, decode)
        if decode is not None and decode is not prefill:
            self._agenda.after(self._scenario.latency, decode.receive, job)
        self._agenda.after(self._scenario.latency, prefill.receive, job)
        return job

    def _close(self, job: Job) -> int:
        came = 0 if job.decode is None else job.decode.emitted(job)
        job.given_up = True
        self._agenda.after(self._scenario.latency, job.prefill.drop, job)
        if job.decode is not None and job.decode is not job.prefill:
            self._agenda.after(self._scenario.latency, job.decode.drop, job)
        return came

    def _told_first(self, job: Job) -> None:
        self._agenda.after(self._scenario.latency, job.request.router.first_token, job)

    def _computed(self, job: Job) -> None:
        self._told_first(job)
        self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        """The blocks have gone while they were computed, as far as there was room for them and the link was free."""
        if job.first is None or job.reserved is None or job.there is None or job.decode is None:
            return
        profile, now, latency = self._scenario.profile, self._agenda.now, self._scenario.latency
        size = profile.layout.block_size
        missing = max(0, job.prompt.length - job.there.found * size)
        nbytes = int(missing * profile.token_bytes)
        granted = max(job.begun, job.reserved + latency)
        assert isinstance(job.prefill, PrefillWorker), "what a decode worker computes is there"
        job.nbytes, job.crossed = nbytes, job.prefill.link.takes(job.decode.link, nbytes)
        end = job.prefill.link.carry(job.decode.link, nbytes, granted) if nbytes else now
        # The last layers of all cannot have gone before they were computed.
        last = now + nbytes / profile.layout.num_layers / self._scenario.link
        self._agenda.at(max(end, last) + latency, self._landed, job)

    def _landed(self, job: Job) -> None:
        assert job.decode is not None, "it was reserved for"
        assert isinstance(job.prefill, PrefillWorker), "what a decode worker computes is there"
        if job.prefill.alive:
            job.decode.land(job)
            self._agenda.after(self._scenario.latency, job.prefill.release, job)

    def _taken_over(self, job: Job, seconds: float) -> None:
        self._agenda.after(seconds + self._scenario.latency, job.request.router.taken_over, job)

    def _ended(self, job: Job) -> None:
        self._agenda.after(self._scenario.latency, job.request.router.last_token, job)


def simulate(
    scenario: Scenario,
    trace: Iterable[TraceRequest],
    count: int,
    progress: Callable[[int], None] | None = None,
) -> Figures:
    """One run of at most ``count`` requests of a trace."""
    return Simulation(scenario, trace, count).run(progress)
