"""What a step of decodes reads, at addresses that stay: a captured step finds its batch there.

Life cycle: allocated once, :meth:`DecodeInputs.fill` before each replay. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import FlatBatch
from engine.recorder import Recorder


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token of each of ``B`` sequences, on the device that computes.

    Attributes:
        token_ids: int64 [B].
        positions: int64 [B].
        slots: int64 [B], where each token's K and V go.
        seq_lens: int32 [B], tokens of each sequence once the step has stored its own.
        block_tables: int32 [B, M]; what lies behind a row's length is not to be read.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in order."""
        return (self.token_ids, self.positions, self.slots, self.seq_lens, self.block_tables)

    def first(self, rows: int) -> DecodeRows:
        """The first so many rows; views."""
        return DecodeRows(*(tensor[:rows] for tensor in self.tensors()))


class DecodeInputs:
    """See the module.

    Args:
        rows: at most.
        width: blocks of the longest sequence.
        recorder: of the device.

    Attributes:
        rows: on the device, as many as there may be.
    """

    def __init__(self, rows: int, width: int, recorder: Recorder) -> None:
        self._recorder = recorder
        # Not tensors of inference mode, which could not be written outside of it.
        with torch.inference_mode(mode=False):
            self._host = _allocated(rows, width, torch.device("cpu"), pinned=recorder.device.type == "cuda")
            self.rows = _allocated(rows, width, recorder.device, pinned=False)

    def fill(self, batch: FlatBatch, size: int) -> None:
        """Bring a batch of single tokens to the device, and padding up to ``size`` rows.

        A row of padding is a sequence of one token in the reserved block: it stores there and reads what it stored.
        """
        count, width = batch.block_table.shape
        # The copies of the step before may not have been queued to their end.
        self._recorder.wait_for_uploads()
        host = self._host
        for target, source in (
            (host.token_ids, batch.token_ids),
            (host.positions, batch.positions),
            (host.slots, batch.slot_mapping),
            (host.seq_lens, batch.seq_lens),
        ):
            target[:count] = torch.from_numpy(source)
            target[count:size] = 0
        host.seq_lens[count:size] = 1
        host.block_tables[:count, :width] = torch.from_numpy(batch.block_table)
        host.block_tables[count:size, 0] = 0
        self._recorder.upload(list(zip(self.rows.first(size).tensors(), host.first(size).tensors(), strict=True)))


def _allocated(rows: int, width: int, device: torch.device, *, pinned: bool) -> DecodeRows:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)

    return DecodeRows(
        token_ids=zeros(rows, dtype=torch.int64),
        positions=zeros(rows, dtype=torch.int64),
        slots=zeros(rows, dtype=torch.int64),
        seq_lens=zeros(rows, dtype=torch.int32),
        block_tables=zeros(rows, width, dtype=torch.int32),
    )
