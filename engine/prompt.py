"""A prompt that is being computed, chunk by chunk: what prefill workers do, and decode workers that prefill themselves.

Life cycle of a :class:`Prompt` here: :meth:`Prompt.place` gives it all of its blocks or none, :func:`pack` its share of
a step, :meth:`Work.complete` accounts for that once the step has ended. Who is computed when, and who is dropped, is
the worker's own scheduler's to say. Pure bookkeeping over the block pool: no I/O, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.batch import Chunk, Draw
from engine.block_pool import BlockPool, HolderKind, Owner
from engine.prefix_index import BlockHash, block_hashes
from engine.prompt_logprobs import PromptSpan
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import SamplingParams


@dataclass(slots=True)
class Prompt:
    """One prompt being prefilled.

    Attributes:
        request: as it came from the router.
        router: who asked.
        arrived, started: on the injected clock.
        since: when it would have arrived had it got its seniority by waiting; who has the least is the senior.
        hashes: of its full blocks.
        block_table: physical blocks, empty until it is placed.
        cached_tokens: skipped by a prefix hit.
        computed: tokens whose KV is in the pool.
        tables: of prompt tokens, in order, as a step has told them and nobody has taken yet.
        told: index of the first prompt token after those that were taken.
    """

    request: Prefill
    router: Peer
    arrived: float
    since: float
    hashes: Sequence[BlockHash] = ()
    block_table: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed: int = 0
    started: float = 0.0
    tables: list[LogprobTable] = field(default_factory=list)
    told: int = 1

    @classmethod
    def of(cls, request: Prefill, router: Peer, now: float) -> Prompt:
        """A prompt that ``router`` asks for at ``now``."""
        told = request.prompt_logprobs_from
        return cls(request=request, router=router, arrived=now, since=now - request.seniority, told=told)

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

    def place(self, pool: BlockPool, spare: int = 0) -> bool:
        """Take all the blocks that it needs, those of a prefix hit among them; False when there are not so many.

        Args:
            pool: that the blocks are of.
            spare: blocks that are left for others.
        """
        if not self.hashes:
            self.hashes = block_hashes(self.request.token_ids, pool.block_size, self.request.cache_salt.encode())
        hit = pool.match(self.hashes[: self.skippable // pool.block_size])
        wanted = -(-self.length // pool.block_size) - len(hit)
        pool.share(self.owner, hit)
        if pool.available < wanted + spare:
            pool.release_all(self.owner)
            return False
        fresh = pool.allocate(self.owner, wanted)
        self.block_table = [*hit, *fresh]
        self.computed = self.cached_tokens = len(hit) * pool.block_size
        return True

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

    @property
    def chunk(self) -> Chunk:
        """The engine's view of it."""
        request = self.prompt.request
        return Chunk(
            token_ids=request.token_ids[self.start : self.stop],
            start=self.start,
            block_table=self.prompt.block_table,
            sampling=request.sampling if self.last else None,
            forks=self.prompt.fork_samplings if self.last else (),
            position=request.emitted,
            history=request.token_ids if request.sampling.looks_back else (),
            span=self.span,
        )

    def completes(self, block_size: int) -> tuple[int, ...]:
        """Physical blocks that are complete once it is computed, in logical order."""
        table = self.prompt.block_table
        end = len(table) if self.last else self.stop // block_size
        return tuple(table[self.start // block_size : end])

    def complete(self, pool: BlockPool) -> None:
        """Its step has ended well: seal the blocks that are full now."""
        prompt = self.prompt
        prompt.computed = self.stop
        for index in range(self.start // pool.block_size, self.stop // pool.block_size):
            pool.seal(prompt.block_table[index], prompt.hashes[index])


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


def pack(prompts: Iterable[Prompt], budget: int, block_size: int) -> list[Work]:
    """What a step of at most ``budget`` tokens computes of prompts that have their blocks, the first of them first.

    A chunk that is not a prompt's last ends on a block's border, so that its blocks are complete.
    """
    chosen = []
    for prompt in prompts:
        stop = min(prompt.length, prompt.computed + budget)
        if stop < prompt.length:
            stop -= stop % block_size
        if stop > prompt.computed:
            chosen.append(Work(prompt, prompt.computed, stop))
            budget -= stop - prompt.computed
    return chosen
