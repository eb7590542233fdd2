"""Steps of decodes, captured once for each size of batch and replayed by one launch.

A decode of a small batch takes the GPU less time than its hundreds of kernels take to be launched one by one. A batch
is padded to the next size that was captured; what is larger, or more than one token of a sequence, is not for this.

Life cycle: :meth:`DecodeGraphs.capture` once, :meth:`DecodeGraphs.logits` per step. One thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.attention.backend import AttentionBackend, AttentionPlan
from engine.batch import FlatBatch
from engine.decode_inputs import DecodeInputs, DecodeRows
from engine.graph_batches import batch_for
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.recorder import Recorder

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """See the module.

    Args:
        model: sealed.
        backend: its attention.
        cache: K and V; what is captured keeps its addresses.
        recorder: of the device.
        batches: sizes, ascending.
        width: blocks of the longest sequence.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        cache: KVCache,
        recorder: Recorder,
        batches: Sequence[int],
        width: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._recorder = recorder
        self._batches = tuple(batches)
        self._width = width
        self._inputs: DecodeInputs | None = None
        self._logits: torch.Tensor | None = None
        self._replays: dict[int, Callable[[], None]] = {}
        self._plans: list[AttentionPlan] = []

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that are replayed; none where nothing could be captured."""
        return tuple(sorted(self._replays))

    def capture(self) -> None:
        """Capture every size, the largest first, whose memory then serves the others. Touches the padding block alone.

        Where that fails nothing is captured, which is logged: steps go on being launched kernel by kernel.
        """
        if not self._model.captures:
            logger.info("decodes are not captured: the model looks at values of its step")
            return
        started = time.monotonic()
        try:
            with torch.inference_mode():
                self._inputs = DecodeInputs(self._batches[-1], self._width, self._recorder)
                self._inputs.rows.seq_lens.fill_(1)
                for size in reversed(self._batches):
                    rows = self._inputs.rows.first(size)
                    plan = self._backend.decode_plan(rows)
                    if plan is None:
                        logger.info("decodes are not captured: the attention backend looks at values of its step")
                        self._inputs = None
                        return
                    self._plans.append(plan)
                    self._replays[size] = self._recorder.record(partial(self._compute, rows, plan))
        except RuntimeError as error:
            self._replays.clear()
            self._plans.clear()
            self._inputs = self._logits = None
            logger.warning("decodes are launched kernel by kernel, for they cannot be captured: %s", error)
            return
        seconds = time.monotonic() - started
        logger.info("captured decodes of %s sequences in %.1f s", ", ".join(map(str, self._batches)), seconds)

    def _compute(self, rows: DecodeRows, plan: AttentionPlan) -> None:
        logits = self._model.logits(self._model.hidden(rows.token_ids, rows.positions, plan, self._cache))
        if self._logits is None:
            # By the largest size, in a run before its capture: one place for all of them.
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)].copy_(logits)

    def logits(self, batch: FlatBatch) -> torch.Tensor | None:
        """One step's logits, [B, vocab]; None, and nothing done, where the step is not for a graph.

        Good until the next call. Within inference mode.
        """
        rows = len(batch.seq_lens)
        if self._inputs is None or not len(batch.token_ids) == len(batch.logits_indices) == rows:
            return None
        size = batch_for(self._batches, rows)
        if size is None:
            return None
        self._inputs.fill(batch, size)
        self._replays[size]()
        assert self._logits is not None, "made with the first capture"
        return self._logits[:rows]
