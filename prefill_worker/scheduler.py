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
from enum import Enum, auto
from operator import attrgetter

from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.prompt import Progress, Prompt, Work, pack
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
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
        self._trackers: dict[RequestKey, Tracker[PromptState, PromptEvent]] = {}
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
        prompt = Prompt.of(request, router, now)
        self._trackers[request.key] = PROMPTS.start(str(request.key))
        insort(self._waiting, prompt, key=attrgetter("since"))
        return prompt

    def admit(self, now: float) -> list[Progress]:
        """Admit what fits; prefix-hit blocks are reported as complete at once."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sequences:
            prompt = self._waiting[0]
            if not prompt.place(self._pool):
                break
            self._waiting.pop(0)
            self._running[prompt.key] = prompt
            self._trackers[prompt.key].move(PromptEvent.ADMIT)
            prompt.started = now
            admitted.append(Progress(prompt, tuple(prompt.block_table[: prompt.computed // self._block_size]), None))
        return admitted

    def next_step(self) -> tuple[Work, ...]:
        """The next step's work, the senior prompts first; empty when there is none. One step at a time."""
        assert not self._in_step, "the last step has not been completed"
        seniors = sorted(self._running.values(), key=attrgetter("since"))
        self._in_step = tuple(pack(seniors, self._budget, self._block_size))
        return self._in_step

    def complete_step(self, draws: Sequence[Draw | None]) -> list[Progress]:
        """Account for the step that :meth:`next_step` gave; ``draws`` holds one entry per piece of work."""
        progress = []
        for work, draw in zip(self._in_step, draws, strict=True):
            prompt = work.prompt
            if self._trackers[prompt.key].state is PromptState.LEAVING:
                self._leave(prompt)
                continue
            work.complete(self._pool)
            progress.append(Progress(prompt, work.completes(self._block_size), draw))
            if work.last:
                self._end(prompt, PromptEvent.COMPLETE)
                del self._running[prompt.key]
        self._in_step = ()
        return progress

    def fail_step(self) -> list[Prompt]:
        """The step raised: every prompt in it leaves the scheduler. Returns those nobody had cancelled."""
        failed = []
        for work in self._in_step:
            tracker = self._trackers[work.prompt.key]
            if tracker.state is not PromptState.LEAVING:
                tracker.move(PromptEvent.CANCEL_IN_STEP)
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
        if prompt is None or self._trackers[key].state is PromptState.LEAVING:
            return None
        if any(work.prompt is prompt for work in self._in_step):
            self._trackers[key].move(PromptEvent.CANCEL_IN_STEP)
            return prompt
        if self._trackers[key].state is PromptState.WAITING:
            self._waiting.remove(prompt)
        else:
            del self._running[key]
            self._pool.release_all(prompt.owner)
        self._end(prompt, PromptEvent.CANCEL)
        return prompt

    def _leave(self, prompt: Prompt) -> None:
        self._end(prompt, PromptEvent.STEP_ENDED)
        del self._running[prompt.key]
        self._pool.release_all(prompt.owner)

    def _end(self, prompt: Prompt, event: PromptEvent) -> None:
        self._trackers.pop(prompt.key).move(event)
