r"""Which prompt tokens the next step computes. Pure bookkeeping over the block pool: no I/O, no tensors.

Life cycle of a prompt::

    WAITING --admit--> RUNNING --complete--> FINISHED
       |                  |  \--cancel while a step computes it--> LEAVING --step ends--> GONE
       \------cancel-----/---cancel--> GONE

A prompt is admitted with all its blocks or not at all, the senior first, so an admitted prompt can always finish. The
senior ones of those admitted are also the first to be computed. Seniority is what the request has waited, its priority
included (:mod:`router.priority`): two prompts never change places, so who waits becomes the senior and gets on. Blocks
of a prompt that a running step still writes are kept until that step has ended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from engine.batch import Chunk, Draw
from engine.block_pool import BlockPool, HolderKind, Owner
from engine.prefix_index import BlockHash, block_hashes
from engine.prompt_logprobs import PromptSpan
from protocol.errors import PoolExhausted
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import SamplingParams
from protocol.transitions import Tracker, TransitionTable


class PromptState(Enum):
    """Where a prompt stands."""

    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    FINISHED = auto()
    GONE = auto()


class PromptEvent(Enum):
    """What moves a prompt."""

    ADMIT = auto()
    COMPLETE = auto()
    CANCEL = auto()
    CANCEL_IN_STEP = auto()
    STEP_ENDED = auto()


PROMPTS = TransitionTable(
    "prompt",
    PromptState.WAITING,
    {
        (PromptState.WAITING, PromptEvent.ADMIT): PromptState.RUNNING,
        (PromptState.WAITING, PromptEvent.CANCEL): PromptState.GONE,
        (PromptState.RUNNING, PromptEvent.COMPLETE): PromptState.FINISHED,
        (PromptState.RUNNING, PromptEvent.CANCEL): PromptState.GONE,
        (PromptState.RUNNING, PromptEvent.CANCEL_IN_STEP): PromptState.LEAVING,
        (PromptState.LEAVING, PromptEvent.STEP_ENDED): PromptState.GONE,
    },
)
"""The one transition table of a prompt."""


@dataclass(slots=True)
class Prompt:
    """One prompt being prefilled.

    Attributes:
        request: as it came from the router.
        router: who asked.
        arrived, started: on the injected clock.
        since: when it would have arrived had it got its seniority by waiting; who has the least is the senior.
        hashes: of its full blocks.
        block_table: physical blocks, empty until admitted.
        cached_tokens: skipped by a prefix hit.
        computed: tokens whose KV is in the pool.
        tables: of prompt tokens, in order, as a step has told them and nobody has taken yet.
        told: index of the first prompt token after those that were taken.
    """

    request: Prefill
    router: Peer
    arrived: float
    since: float
    tracker: Tracker[PromptState, PromptEvent]
    hashes: Sequence[BlockHash] = ()
    block_table: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed: int = 0
    started: float = 0.0
    tables: list[LogprobTable] = field(default_factory=list)
    told: int = 1

    @property
    def key(self) -> RequestKey:
        """Request and attempt."""
        return self.request.key

    @property
    def owner(self) -> Owner:
        """Holds its blocks while it computes."""
        return Owner(HolderKind.TABLE, str(self.request.key))

    @property
    def fork_samplings(self) -> tuple[SamplingParams, ...]:
        """How the prompt's further continuations draw."""
        return tuple(fork.sampling(self.request.sampling) for fork in self.request.forks)

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.request.token_ids)

    @property
    def skippable(self) -> int:
        """Tokens at its beginning whose logits nobody needs, so that a prefix hit may stand for them.

        The last one's give the first output token, and those before a prompt token give its log-probability.
        """
        last = self.length - 1
        return last if self.request.prompt_logprobs is None else min(last, self.request.prompt_logprobs_from - 1)

    def take_tables(self) -> list[tuple[int, LogprobTable]]:
        """What was told of prompt tokens since the last call, each with the index of its first."""
        taken = []
        for table in self.tables:
            taken.append((self.told, table))
            self.told += len(table)
        self.tables.clear()
        return taken


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt's share of a step: tokens ``[start, stop)``."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the first output token is drawn in this step."""
        return self.stop == self.prompt.length

    @property
    def span(self) -> PromptSpan | None:
        """The prompt tokens that it shall tell of: those that follow its own, as far as they are not known."""
        request = self.prompt.request
        if request.prompt_logprobs is None:
            return None
        first = max(self.start + 1, request.prompt_logprobs_from)
        targets = request.token_ids[first : self.stop + 1]
        if not targets:
            return None
        return PromptSpan(first - 1 - self.start, targets, request.prompt_logprobs, self.prompt.tables.append)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one prompt gained in a step.

    Attributes:
        prompt: whose.
        blocks: physical blocks that became complete, in logical order.
        draw: the first token, when the prompt is finished.
    """

    prompt: Prompt
    blocks: tuple[int, ...]
    draw: Draw | None


class PrefillScheduler:
    """Packs waiting prompts into steps of at most ``max_batch_tokens`` tokens, in chunks that end on block borders.

    Args:
        pool: holds the blocks.
        block_size: tokens per block.
        max_batch_tokens: token budget of one step.
        max_sequences: prompts computed side by side.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_batch_tokens: int, max_sequences: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budget = max(max_batch_tokens, block_size)
        self._max_sequences = max_sequences
        self._waiting: list[Prompt] = []
        self._running: dict[RequestKey, Prompt] = {}
        self._in_step: tuple[Work, ...] = ()

    @property
    def waiting(self) -> int:
        """Prompts not yet admitted."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        running = sum(prompt.length - prompt.computed for prompt in self._running.values())
        return running + sum(prompt.length for prompt in self._waiting)

    @property
    def running(self) -> int:
        """Prompts being computed."""
        return len(self._running)

    @property
    def empty_slots(self) -> dict[int, int]:
        """Slots behind the last token of each prompt being computed, by the prompt's last block."""
        prompts = self._running.values()
        return {
            prompt.block_table[-1]: len(prompt.block_table) * self._block_size - prompt.length for prompt in prompts
        }

    @property
    def blocked(self) -> Prompt | None:
        """The prompt that is next, when nothing is computed and it still does not fit: only leases are in its way."""
        return self._waiting[0] if self._waiting and not self._running else None

    def find(self, key: RequestKey) -> Prompt | None:
        """The live prompt of ``key``."""
        found = self._running.get(key)
        if found is None:
            found = next((prompt for prompt in self._waiting if prompt.key == key), None)
        return found

    def add(self, request: Prefill, router: Peer, now: float) -> Prompt:
        """Queue a prompt, behind those that are its seniors or its equals."""
        prompt = Prompt(
            request=request,
            router=router,
            arrived=now,
            since=now - request.seniority,
            tracker=PROMPTS.start(str(request.key)),
            told=request.prompt_logprobs_from,
        )
        insort(self._waiting, prompt, key=attrgetter("since"))
        return prompt

    def admit(self, now: float) -> list[Progress]:
        """Admit what fits; prefix-hit blocks are reported as complete at once."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sequences:
            prompt = self._waiting[0]
            if not self._place(prompt):
                break
            self._waiting.pop(0)
            self._running[prompt.key] = prompt
            prompt.tracker.move(PromptEvent.ADMIT)
            prompt.started = now
            admitted.append(Progress(prompt, tuple(prompt.block_table[: prompt.computed // self._block_size]), None))
        return admitted

    def next_step(self) -> tuple[Work, ...]:
        """The next step's work, the senior prompts first; empty when there is none. One step at a time."""
        assert not self._in_step, "the last step has not been completed"
        left = self._budget
        chosen = []
        for prompt in sorted(self._running.values(), key=attrgetter("since")):
            stop = min(prompt.length, prompt.computed + left)
            if stop < prompt.length:
                stop -= stop % self._block_size
            if stop > prompt.computed:
                chosen.append(Work(prompt, prompt.computed, stop))
                left -= stop - prompt.computed
        self._in_step = tuple(chosen)
        return self._in_step

    def completes(self, work: Work) -> tuple[int, ...]:
        """Physical blocks that are complete once ``work`` is computed, in logical order."""
        table = work.prompt.block_table
        end = len(table) if work.last else work.stop // self._block_size
        return tuple(table[work.start // self._block_size : end])

    def complete_step(self, draws: Sequence[Draw | None]) -> list[Progress]:
        """Account for the step that :meth:`next_step` gave; ``draws`` holds one entry per piece of work."""
        progress = []
        for work, draw in zip(self._in_step, draws, strict=True):
            prompt = work.prompt
            if prompt.tracker.state is PromptState.LEAVING:
                self._leave(prompt)
                continue
            prompt.computed = work.stop
            for index in range(work.start // self._block_size, work.stop // self._block_size):
                self._pool.seal(prompt.block_table[index], prompt.hashes[index])
            progress.append(Progress(prompt, self.completes(work), draw))
            if work.last:
                prompt.tracker.move(PromptEvent.COMPLETE)
                del self._running[prompt.key]
        self._in_step = ()
        return progress

    def fail_step(self) -> list[Prompt]:
        """The step raised: every prompt in it leaves the scheduler. Returns those nobody had cancelled."""
        failed = []
        for work in self._in_step:
            if work.prompt.tracker.state is not PromptState.LEAVING:
                work.prompt.tracker.move(PromptEvent.CANCEL_IN_STEP)
                failed.append(work.prompt)
            self._leave(work.prompt)
        self._in_step = ()
        return failed

    def release(self, prompt: Prompt) -> None:
        """Give back a finished prompt's blocks; a lease that shares them keeps them."""
        self._pool.release_all(prompt.owner)

    def cancel(self, key: RequestKey) -> Prompt | None:
        """Drop a live prompt; its blocks go once no step writes them. Returns it, or None when there is none."""
        prompt = self.find(key)
        if prompt is None or prompt.tracker.state is PromptState.LEAVING:
            return None
        if any(work.prompt is prompt for work in self._in_step):
            prompt.tracker.move(PromptEvent.CANCEL_IN_STEP)
            return prompt
        if prompt.tracker.state is PromptState.WAITING:
            self._waiting.remove(prompt)
        else:
            del self._running[key]
            self._pool.release_all(prompt.owner)
        prompt.tracker.move(PromptEvent.CANCEL)
        return prompt

    def _leave(self, prompt: Prompt) -> None:
        prompt.tracker.move(PromptEvent.STEP_ENDED)
        del self._running[prompt.key]
        self._pool.release_all(prompt.owner)

    def _place(self, prompt: Prompt) -> bool:
        if not prompt.hashes:
            prompt.hashes = block_hashes(prompt.request.token_ids, self._block_size, prompt.request.cache_salt.encode())
        hit = self._pool.match(prompt.hashes[: prompt.skippable // self._block_size])
        blocks = -(-prompt.length // self._block_size)
        self._pool.share(prompt.owner, hit)
        try:
            fresh = self._pool.allocate(prompt.owner, blocks - len(hit))
        except PoolExhausted:
            self._pool.release_all(prompt.owner)
            return False
        prompt.block_table = [*hit, *fresh]
        prompt.computed = prompt.cached_tokens = len(hit) * self._block_size
        return True


def chunks_of(step: Sequence[Work]) -> list[Chunk]:
    """The engine's view of a step."""
    return [
        Chunk(
            token_ids=work.prompt.request.token_ids[work.start : work.stop],
            start=work.start,
            block_table=work.prompt.block_table,
            sampling=work.prompt.request.sampling if work.last else None,
            forks=work.prompt.fork_samplings if work.last else (),
            position=work.prompt.request.emitted,
            history=work.prompt.request.token_ids if work.prompt.request.sampling.looks_back else (),
            span=work.span,
        )
        for work in step
    ]
