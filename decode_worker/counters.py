"""What a decode worker counts, and what it says of its load.

Life cycle: made with the worker, counted up by it, read at every heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode_worker.imports import Imports
from decode_worker.local_prefill import LocalPrefill
from decode_worker.outbox import Outbox
from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculator import Speculator
from decode_worker.swaps import Swaps
from engine.block_pool import BlockPool
from engine.step_watch import StepWatch
from protocol.messages import WorkerLoad

if TYPE_CHECKING:
    from engine.stepper import Stepper


@dataclass(slots=True)
class Counters:
    """Of one incarnation; named as in :class:`protocol.messages.WorkerLoad`."""

    cached_tokens: int = 0
    preemptions: int = 0
    failures: int = 0

    def load(
        self,
        pool: BlockPool,
        stepper: Stepper,
        step_watch: StepWatch,
        scheduler: DecodeScheduler,
        imports: Imports,
        swaps: Swaps,
        speculator: Speculator | None,
        outbox: Outbox,
        local_prefill: LocalPrefill,
        *,
        draining: bool,
    ) -> WorkerLoad:
        """What the worker that has these parts is doing now."""
        blocks = pool.counts()
        return WorkerLoad(
            pool=blocks,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            running=scheduler.running,
            open_imports=imports.book.open_count,
            steps=stepper.steps,
            step_seconds=stepper.step_seconds,
            step_age=step_watch.age,
            step_fixed=stepper.pace.fixed,
            step_per_token=stepper.pace.per_token,
            step_mean_tokens=stepper.pace.mean_tokens,
            step_gaps=stepper.gaps.histogram(),
            prefill_tokens=local_prefill.tokens,
            cached_tokens=self.cached_tokens,
            decode_tokens=outbox.tokens,
            kv_blocks=imports.kv_blocks,
            kv_bytes=imports.kv_bytes,
            kv_seconds=imports.kv_seconds,
            preemptions=self.preemptions,
            failures=self.failures,
            draining=draining,
            swaps=swaps.saved,
            swapped_blocks=swaps.book.used,
            used_slots=blocks.used * pool.block_size,
            empty_slots=scheduler.empty_slots,
            decode_turns=outbox.turns,
            draft_tokens=0 if speculator is None else speculator.drafted,
            accepted_tokens=0 if speculator is None else speculator.accepted,
        )
