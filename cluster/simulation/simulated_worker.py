"""What prefill and decode workers have in common: a pool, a prefix cache that they tell of, a pace, and a heartbeat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulation.agenda import Agenda
from cluster.simulation.block_cache import BlockCache, Stay
from cluster.simulation.job import Job
from cluster.simulation.link import Link
from cluster.simulation.profile import EngineProfile
from engine.step_pace import StepPace
from protocol.ids import Peer, Role
from protocol.kv_events import KVFollow
from protocol.kv_publisher import KVPublisher
from protocol.layout import KVLayout
from protocol.messages import Heartbeat, Message, WorkerLoad, WorkerProfile

MODEL = "simulated"
HEARTBEAT = 0.5
"""Seconds between two heartbeats."""
FLUSH = 0.1
"""Seconds between two messages about the prefix cache."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all workers of a run share.

    Attributes:
        agenda: of the run.
        profile: of each engine.
        latency: seconds that a message takes.
        told_link: bytes a second of each worker's network, as it tells routers.
        tell: takes what a worker sends to its routers, and when it comes.
    """

    agenda: Agenda
    profile: EngineProfile
    latency: float
    told_link: float
    tell: Callable[[Peer, Message], None]


@dataclass(slots=True)
class Tally:
    """What a worker has done, over all its lives.

    Attributes:
        busy: seconds in steps.
        steps, tokens: that it computed: of prompts, or of outputs.
        prompts, prompt_tokens: that it computed.
        found: tokens of prompts that it had.
    """

    busy: float = 0.0
    steps: int = 0
    tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    found: int = 0


class SimulatedWorker(ABC):
    """One life of one worker; a kind of it says what it does with its jobs.

    Attributes:
        peer: its name and incarnation.
        tally: of all lives.
        link: its network.
        alive: whether anything still happens here.
        draining: whether it takes no new work.
    """

    role: Role

    def __init__(self, peer: Peer, site: Site, link: Link, tally: Tally) -> None:
        self.peer = peer
        self.tally = tally
        self.link = link
        self.alive = True
        self.draining = False
        self._site = site
        self._agenda = site.agenda
        self._profile = site.profile
        self._size = site.profile.layout.block_size
        self._cache = BlockCache(site.profile.num_blocks)
        self._publisher = KVPublisher(self._cache.changes.take, self._cache.everything)
        self._pace = StepPace()
        self._flushing = False
        self._told = WorkerProfile(
            role=self.role,
            model=MODEL,
            vocab_size=1 << 17,
            max_model_len=1 << 20,
            layout=site.profile.layout,
            num_blocks=site.profile.num_blocks,
            peer_endpoint="tcp://simulated:1" if self.role == "prefill" else "",
            step_tokens=site.profile.step_tokens if self.role == "prefill" else 0,
            prefills=self.role == "decode",
            max_sequences=site.profile.max_sequences if self.role == "decode" else 0,
            link_rate=site.told_link,
        )

    @property
    def profile(self) -> WorkerProfile:
        """What it tells of itself."""
        return self._told

    @abstractmethod
    def load(self) -> WorkerLoad:
        """As the next heartbeat has it."""

    def beat(self) -> None:
        """Send a heartbeat, and again and again."""
        if self.alive:
            self._announce()
            self._agenda.after(HEARTBEAT, self.beat)

    def _announce(self) -> None:
        self._site.tell(self.peer, Heartbeat(self._told, self.load(), kv_sequence=self._publisher.sequence))

    def drain(self) -> None:
        """Take no new work, and tell every router so at once."""
        self.draining = True
        self._announce()

    @property
    def idle(self) -> bool:
        """Whether it has nothing of anybody's."""
        load = self.load()
        return not (load.waiting or load.running or load.pool.used)

    @property
    def layout(self) -> KVLayout:
        """Of its pool."""
        return self._profile.layout

    def follow(self, router: Peer, message: KVFollow) -> None:
        """A router wants to be told of the prefix cache."""
        if not self.alive:
            return
        self._flush()
        for page in self._publisher.follow(router, message, self._agenda.now):
            self._site.tell(self.peer, page)

    def cached_keys(self) -> bytes:
        """Of all blocks that a prompt finds here, one after the other."""
        return self._cache.everything()

    def die(self) -> None:
        """Nothing happens here any more."""
        self.alive = False

    def _changed(self) -> None:
        """The cache has changed, or may have: tell of it with the next message."""
        if not self._flushing:
            self._flushing = True
            self._agenda.after(FLUSH, self._flush_due)

    def _flush_due(self) -> None:
        self._flushing = False
        if self.alive:
            self._flush()

    def _flush(self) -> None:
        events = self._publisher.flush()
        if events and self._publisher.followers(self._agenda.now):
            for event in events:
                self._site.tell(self.peer, event)

    def _take(self, job: Job, tokens: int) -> Stay | None:
        """Room for so many tokens of which the prompt's first ones may be here; None where there is none."""
        stay = self._cache.take(job.prompt.blocks, job.prompt.length // self._size, -(-tokens // self._size))
        if stay is not None:
            self._changed()
        return stay

    def _seal(self, job: Job, stay: Stay, start: int, stop: int) -> None:
        """What was taken without a name holds these tokens of the job now, as far as they fill blocks."""
        self._cache.seal(stay, job.prompt.blocks, start // self._size, stop // self._size)
        self._changed()

    def _leave(self, stay: Stay) -> None:
        self._cache.release(stay)
