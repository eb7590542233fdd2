"""Steps of decodes recorded on a CPU: what is recorded is run again, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.attention.backend import AttentionPlan, Scoring, by_token
from engine.attention.sdpa import SDPAttention
from engine.decode_inputs import DecodeRows
from engine.float8 import UNSCALED, Scales
from engine.recorder import Recorder

CPU = torch.device("cpu")


class Rerun(Recorder):
    """Runs again what it was given, and counts."""

    def __init__(self) -> None:
        self.device = CPU
        self.recorded = 0
        self.replayed: list[int] = []
        self.uploads = self.waits = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        number = self.recorded
        self.recorded += 1

        def replay() -> None:
            self.replayed.append(number)
            run()

        return replay

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert self.waits == self.uploads + 1, "host memory was filled while it may have been read"
        self.uploads += 1
        for there, here in pairs:
            there.copy_(here)

    def wait_for_uploads(self) -> None:
        self.waits += 1


class StaticPlan(AttentionPlan):
    """Attention whose work depends on shapes alone, as a captured one must."""

    def __init__(self, backend: SDPAttention, rows: DecodeRows) -> None:
        super().__init__(backend.order)
        self._rows = rows

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        assert scales == UNSCALED, "a plan for the caches of these tests"
        for values, cache in ((k, k_cache), (v, v_cache)):
            tokens = by_token(cache, self.order)
            tokens[self._rows.slots // tokens.shape[1], self._rows.slots % tokens.shape[1]] = values

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        assert scales == UNSCALED, "a plan for the caches of these tests"
        lens = self._rows.seq_lens[:, None]
        tables = self._rows.block_tables.long()
        k, v = (by_token(cache, self.order)[tables].flatten(1, 2) for cache in (k_cache, v_cache))
        place = torch.arange(k.shape[1])[None]
        seen = place < lens
        if scoring.window:
            seen &= place >= lens - scoring.window
        heads = q.view(len(q), k.shape[2], -1, q.shape[-1])
        scores = torch.einsum("bgqd,btgd->bgqt", heads, k.nan_to_num()) * scoring.scale
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        # A token that is not seen may hold anything, and one that is seen has to show it.
        values = torch.where(seen[:, :, None, None], v, 0.0)
        return torch.einsum("bgqt,btgd->bgqd", weights, values).reshape(q.shape)


class StaticAttention(SDPAttention):
    def decode_plan(self, rows: DecodeRows) -> AttentionPlan:
        return StaticPlan(self, rows)
