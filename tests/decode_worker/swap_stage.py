"""A decode scheduler with host memory beside its pool, and everything that both work on."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence
from decode_worker.swap_book import SwapBook
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
STOP = 9


@dataclass
class Stage:
    """See the module."""

    num_blocks: int = 9
    slots: int = 9
    sequences: int = 8
    swaps: bool = True
    now: float = 0.0
    pool: BlockPool = field(init=False)
    book: SwapBook = field(init=False)
    subject: DecodeScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK)
        self.book = SwapBook(self.slots)
        self.subject = DecodeScheduler(
            self.pool,
            block_size=BLOCK,
            max_sequences=self.sequences,
            swaps=self.book,
            prefers_swap=lambda sequence: self.swaps,
        )

    def add(self, name: str, tokens: tuple[int, ...], *, seniority: float = 0.0, max_tokens: int = 20) -> Sequence:
        request = Reserve(
            key=RequestKey(name, 0),
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            prefill=PREFILL,
            seniority=seniority,
        )
        return self.subject.add(request, ROUTER, self.now)

    def running(self, name: str, length: int, *, first: int = 100, **options: float) -> Sequence:
        self.add(name, tuple(range(first, first + length)), **options)  # type: ignore[arg-type]
        (sequence,) = self.subject.admit()
        return self.subject.commit(sequence.key, 7, self.now)

    def step(self) -> list[Sequence]:
        """One step; returns who is swapped out by it."""
        step = self.subject.next_step()
        assert step.preempted == ()
        self.subject.complete_step([Draw(3)] * len(step.sequences))
        return list(step.swapped_out)

    def until_swapped(self) -> Sequence:
        while not (victims := self.step()):
            pass
        (victim,) = victims
        return victim

    def two(self) -> tuple[Sequence, Sequence]:
        """Two sequences that fill the pool, and the junior on its way out."""
        old, young = self.running("old", 8), self.running("young", 8, first=200)
        assert self.until_swapped() is young
        return old, young
