"""Attention with the C++ kernels: blocks are read where they lie, and rope and the store into them are one pass.

Prompt chunks take a kernel of their own where CPU and model allow it, and go the way of ``sdpa`` where not.
"""

from __future__ import annotations

from ctypes import Array, c_int64

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import Angles, AttentionBackend, AttentionPlan, Scoring, by_token, computed_in, put
from engine.attention.sdpa import Prompt, SDPAttention, prompts
from engine.batch import FlatBatch
from engine.decode_inputs import DecodeRows
from engine.float8 import UNSCALED, Scales, is_float8
from engine.kv_cache import TORCH_DTYPES
from engine.native.library import CACHE_DTYPES, DTYPES, kernels_for
from protocol.errors import ConfigError
from protocol.layout import KVLayout

MAX_HEAD_DIM = 256
_STEP = 32
"""Elements that the prompt kernel sums over at a time: head_dim must be a multiple, contexts are padded to one."""


def serves(layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels are there for ``layout`` on ``device``, with queries of ``dtype``, or the cache's own."""
    return layout.head_dim <= MAX_HEAD_DIM and kernels_for(computed_in(layout, dtype), device) is not None


class NativeAttention(AttentionBackend):
    """Decodes in one call, whatever their lengths.

    Attributes:
        kind: the CPU's products that are used, as :attr:`Kernels.linear_kind`; 0 where element type or head do not fit.

    Raises:
        ConfigError: the kernels do not serve this layout, or cannot be built here.
    """

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(layout, device, dtype)
        kernels = kernels_for(self.dtype, device)
        if kernels is None or not serves(layout, device, self.dtype):
            raise ConfigError(
                f"attention 'native' wants a compiler, float32 or bfloat16 on a CPU, and head_dim <= {MAX_HEAD_DIM}; "
                f"got {self.dtype} on {str(device)!r} and head_dim {layout.head_dim}",
                field="attention",
            )
        self.kernels = kernels
        self.head_dim = layout.head_dim
        self.half = DTYPES.index(self.dtype)
        self.threads = torch.get_num_threads()
        cache_dtype = TORCH_DTYPES[layout.dtype]
        self.eighth = CACHE_DTYPES.index(cache_dtype if is_float8(cache_dtype) else None)
        self.gathering = SDPAttention(layout, device, self.dtype)
        self.kind = kernels.linear_kind if self.dtype == torch.bfloat16 and layout.head_dim % _STEP == 0 else 0

        self._strides: Array[c_int64] | None = None

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        return NativePlan(self, batch)

    def decode_plan(self, rows: DecodeRows) -> AttentionPlan:
        """See :meth:`AttentionBackend.decode_plan`; there is always one."""
        return NativeDecodePlan(self, rows)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        slots: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales,
    ) -> torch.Tensor | None:
        """As the plan's; ``slots`` is the address of an int64 for each token. None where only a part is turned."""
        tokens, heads, dim = qkv.shape
        q_heads = heads - 2 * self.kv_heads
        cos, sin = angles
        if 2 * cos.shape[-1] != dim:
            return None
        assert all(part.is_contiguous() for part in (qkv, cos, sin))
        self.kernels.rope_store(
            *(self.half, self.eighth, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots),
            *(k_cache.data_ptr(), v_cache.data_ptr(), tokens, q_heads, self.kv_heads, dim, self.block_size),
            *(self.strides(k_cache), 1.0 / scales.k, 1.0 / scales.v, self.threads),
        )
        return qkv[:, :q_heads]

    def decode(
        self,
        decodes: Decodes,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
        scales: Scales,
    ) -> None:
        """The rows of ``decodes`` of ``q`` [T, Hq, D], heads contiguous, into those of ``out``, of the same shape."""
        self.kernels.paged_decode(
            *(self.kind, self.half, self.eighth, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
            *(*decodes.addresses, out.data_ptr(), decodes.count, decodes.width, *self.shape_of(q, k_cache)),
            *(scoring.scale * scales.k, scoring.window, scoring.softcap, scales.v, self.threads),
        )

    def shape_of(self, q: torch.Tensor, cache: torch.Tensor) -> tuple[object, ...]:
        """What the kernels want to know of ``q`` [T, Hq, D] and of a layer's ``cache``."""
        _, heads, dim = q.shape
        return (q.stride(0), self.kv_heads, heads // self.kv_heads, dim, self.block_size, self.strides(cache))

    def strides(self, cache: torch.Tensor) -> Array[c_int64]:
        """Elements from block to block, token to token and head to head; one answer, for all layers are laid alike."""
        if self._strides is None:
            self._strides = (c_int64 * 3)(*by_token(cache, self.order).stride()[:3])
        return self._strides


class NativePlan(AttentionPlan):
    """One call for all decodes, and one for each prompt chunk."""

    def __init__(self, backend: NativeAttention, batch: FlatBatch) -> None:
        super().__init__(backend.order)
        self._backend = backend
        counts = np.diff(batch.query_start_loc)
        rows = np.flatnonzero(counts == 1)
        self._batch = batch
        self._chunks = np.flatnonzero(counts > 1)
        self._slots = np.ascontiguousarray(batch.slot_mapping)
        self._decodes = Decodes.of(batch, rows) if len(rows) else None
        tiled = self._chunks.tolist() if backend.kind else []
        self._tiled = {row: Tiled(batch, row) for row in tiled}
        self._gathered: dict[Scoring, list[Prompt]] = {}
        longest = -(-max((chunk.length for chunk in self._tiled.values()), default=0) // _STEP) * _STEP
        self._work = torch.empty(longest * 2 * backend.head_dim, dtype=backend.dtype)

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write K and V of the step's tokens to their slots."""
        block, offset = (torch.from_numpy(part) for part in np.divmod(self._slots, self._backend.block_size))
        put((block, offset), k, k_cache, scales.k, self.order)
        put((block, offset), v, v_cache, scales.v, self.order)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """In one pass; q is turned in place."""
        q = self._backend.rotate_and_store(qkv, angles, self._slots.ctypes.data, k_cache, v_cache, scales)
        return super().rotate_and_store(qkv, angles, k_cache, v_cache, scales) if q is None else q

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D]: [T, Hq, D]."""
        backend = self._backend
        _, heads, dim = q.shape
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        if self._decodes is not None:
            backend.decode(self._decodes, q, k_cache, v_cache, out, scoring, scales)
        item, stride = q.element_size(), q.stride(0)
        for chunk in self._tiled.values():
            if chunk.serves(scoring):
                backend.kernels.prompt_attention(
                    *(backend.kind, backend.eighth, q.data_ptr() + chunk.first * stride * item),
                    *(k_cache.data_ptr(), v_cache.data_ptr(), chunk.table, self._work.data_ptr()),
                    *(out.data_ptr() + chunk.first * heads * dim * item, chunk.count, chunk.length),
                    *backend.shape_of(q, k_cache),
                    *(scoring.scale * scales.k, scales.v, backend.threads),
                )
        for prompt in self._prompts(scoring):
            out[prompt.tokens] = prompt.attend(q[prompt.tokens], k_cache, v_cache, scales)
        return out

    def _prompts(self, scoring: Scoring) -> list[Prompt]:
        """The chunks that go the way of ``sdpa``."""
        found = self._gathered.get(scoring)
        if found is None:
            left = [
                row for row in self._chunks.tolist() if row not in self._tiled or not self._tiled[row].serves(scoring)
            ]
            found = prompts(self._backend.gathering, self._batch, np.array(left, np.intp), scoring)
            self._gathered[scoring] = found
        return found


class NativeDecodePlan(AttentionPlan):
    """Decodes alone, of whatever stands in the same rows when it is their turn."""

    def __init__(self, backend: NativeAttention, rows: DecodeRows) -> None:
        super().__init__(backend.order)
        self._backend = backend
        self._rows = rows
        self._decodes = Decodes(np.arange(len(rows.slots)), rows.block_tables.numpy(), rows.seq_lens.numpy())

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write K and V of the step's tokens to their slots, wherever these are by then."""
        size = self._backend.block_size
        places = (torch.div(self._rows.slots, size, rounding_mode="floor"), torch.remainder(self._rows.slots, size))
        put(places, k, k_cache, scales.k, self.order)
        put(places, v, v_cache, scales.v, self.order)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """In one pass; q is turned in place."""
        q = self._backend.rotate_and_store(qkv, angles, self._rows.slots.data_ptr(), k_cache, v_cache, scales)
        return super().rotate_and_store(qkv, angles, k_cache, v_cache, scales) if q is None else q

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Attention of ``q`` [B, Hq, D]: [B, Hq, D]."""
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        self._backend.decode(self._decodes, q, k_cache, v_cache, out, scoring, scales)
        return out


class Decodes:
    """Sequences with one query token each.

    Args:
        rows: int64 [B], where each one's query is in the batch.
        tables: int32 [B, M], its blocks.
        lengths: int32 [B], its tokens.

    Attributes:
        count: of them.
        width: blocks in a row of their table.
        addresses: of their rows in the batch, their table and their lengths, valid as long as this object is.
    """

    def __init__(self, rows: NDArray[np.int64], tables: NDArray[np.int32], lengths: NDArray[np.int32]) -> None:
        self.count, self.width = tables.shape
        self._arrays = tuple(np.ascontiguousarray(array) for array in (rows, tables, lengths))
        self.addresses = tuple(array.ctypes.data for array in self._arrays)

    @classmethod
    def of(cls, batch: FlatBatch, rows: NDArray[np.intp]) -> Decodes:
        """Those of a batch whose sequences stand in ``rows`` of its table."""
        return cls(batch.query_start_loc[rows], batch.block_table[rows], batch.seq_lens[rows])


class Tiled:
    """A prompt chunk.

    Attributes:
        first: its first token in the batch.
        count: tokens.
        length: tokens of its sequence, up to its last.
        table: address of its block table, valid as long as this object is.
    """

    def __init__(self, batch: FlatBatch, row: int) -> None:
        self.first, end = batch.query_start_loc[row : row + 2].tolist()
        self.count = end - self.first
        self.length = int(batch.seq_lens[row])
        self._table = np.ascontiguousarray(batch.block_table[row])
        self.table = self._table.ctypes.data

    def serves(self, scoring: Scoring) -> bool:
        """Whether the prompt kernel may compute it: it knows no cap and no window."""
        return not scoring.softcap and not 0 < scoring.window < self.length
