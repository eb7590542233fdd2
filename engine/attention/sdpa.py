"""Attention with torch's scaled_dot_product_attention over gathered blocks; the CPU's backend.

Decodes of similar length are gathered together into one padded call: the group of query heads that shares a KV head
becomes the rows of its query, so each K and V is read once. Prompt chunks are one call each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from engine.attention.backend import AttentionBackend, AttentionPlan, Scoring, by_token, put
from engine.batch import FlatBatch
from engine.float8 import UNSCALED, Scales, as_bytes, is_float8, widened
from protocol.layout import KVLayout, Order

_PADDING_BLOCKS = 8
"""A sequence may always be padded by this much, whatever its length: a further call costs more."""
_GATHER_TOKENS = 1 << 15
"""Tokens gathered at once at most, so that the workspace stays small; one sequence may be longer."""


class SDPAttention(AttentionBackend):
    """Gathers blocks into a workspace that all layers and steps share."""

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(layout, device, dtype)
        self.workspace = Workspace(self.dtype)

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        return SDPAPlan(self, batch)


class SDPAPlan(AttentionPlan):
    """Groups of decodes, and prompt chunks, for each way of scoring among the layers."""

    def __init__(self, backend: SDPAttention, batch: FlatBatch) -> None:
        super().__init__(backend.order)
        self._backend = backend
        self._batch = batch
        slots = torch.from_numpy(batch.slot_mapping).to(backend.device)
        self._places = (slots // backend.block_size, slots % backend.block_size)
        self._parts: dict[Scoring, list[Decodes | Prompt]] = {}

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write K and V of the step's tokens to their slots."""
        put(self._places, k, k_cache, scales.k, self.order)
        put(self._places, v, v_cache, scales.v, self.order)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D]: [T, Hq, D]."""
        parts = self._parts.get(scoring)
        if parts is None:
            parts = self._parts[scoring] = self._arrange(scoring)
        out = q.new_empty(q.shape)
        for part in parts:
            out[part.tokens] = part.attend(q[part.tokens], k_cache, v_cache, scales)
        return out

    def _arrange(self, scoring: Scoring) -> list[Decodes | Prompt]:
        backend, batch = self._backend, self._batch
        counts = np.diff(batch.query_start_loc)
        reached = reach(batch, scoring.window, backend.block_size)
        groups = group_by_length(reached.lengths, np.flatnonzero(counts == 1), backend.block_size)
        return [
            *(Decodes(backend, batch, rows, scoring, reached) for rows in groups),
            *(Prompt(backend, batch, row, scoring, reached) for row in np.flatnonzero(counts > 1).tolist()),
        ]


class Reach(NamedTuple):
    """What of each sequence a step reads.

    Attributes:
        blocks: int64 [B], whole blocks before the first that is read.
        lengths: int64 [B], tokens from that one on.
        blind: int64 [B], how many of them lie before the window of the sequence's first query.
    """

    blocks: NDArray[np.int64]
    lengths: NDArray[np.int64]
    blind: NDArray[np.int64]


def reach(batch: FlatBatch, window: int, block_size: int) -> Reach:
    """What each sequence of a batch reads under a window; 0 reads all."""
    lengths = batch.seq_lens.astype(np.int64)
    if not window:
        return Reach(np.zeros_like(lengths), lengths, np.zeros_like(lengths))
    unseen = np.maximum(lengths - np.diff(batch.query_start_loc) + 1 - window, 0)
    blocks = unseen // block_size
    return Reach(blocks, lengths - blocks * block_size, unseen - blocks * block_size)


class Workspace:
    """Room for gathered K and V; grows to the largest gather and stays.

    Args:
        dtype: that is computed in: an eight-bit cache is widened to it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of ``blocks`` [N] of both caches, each [N, *inner], without scales; valid until the next gather."""
        shape = (blocks.shape[0], *k_cache.shape[1:])
        size = blocks.shape[0] * k_cache[0].numel()
        if self._buffers is None or self._buffers[0].numel() < size:
            # Not a tensor of inference mode, which could not be written outside of it.
            with torch.inference_mode(mode=False):
                self._buffers = (as_bytes(k_cache.new_empty(size)), as_bytes(v_cache.new_empty(size)))
        k, v = (buffer[:size].view(shape) for buffer in self._buffers)
        torch.index_select(as_bytes(k_cache), 0, blocks, out=k)
        torch.index_select(as_bytes(v_cache), 0, blocks, out=v)
        if is_float8(k_cache.dtype):
            return widened(k.view(k_cache.dtype), self._dtype), widened(v.view(v_cache.dtype), self._dtype)
        return k, v


class Decodes:
    """Sequences of similar length, with one query token each.

    Attributes:
        tokens: index of them in the flat batch.
    """

    def __init__(
        self, backend: SDPAttention, batch: FlatBatch, rows: NDArray[np.intp], scoring: Scoring, reached: Reach
    ) -> None:
        self._workspace = backend.workspace
        self._order: Order = backend.order
        self._scoring = scoring
        first, lens, blind = (part[rows] for part in reached)
        self._length = int(lens.max())
        width = -(-self._length // backend.block_size)
        self.tokens = token_index(batch, rows, backend.device)
        # Columns beyond a table's end are read from its last one: their slots are stale in any case.
        columns = np.minimum(first[:, None] + np.arange(width), batch.block_table.shape[1] - 1)
        table = np.take_along_axis(batch.block_table[rows], columns, 1).astype(np.int64)
        self._blocks = torch.from_numpy(table.reshape(-1)).to(backend.device)
        slots = np.arange(width * backend.block_size)
        beyond = slots >= lens[:, None]
        # Slots beyond a sequence's end may hold anything, NaN too, which no mask would stop: they are zeroed.
        block, offset = np.divmod(np.flatnonzero(beyond), backend.block_size)
        self._stale = (torch.from_numpy(block).to(backend.device), torch.from_numpy(offset).to(backend.device))
        self._mask: torch.Tensor | None = None
        hidden = (beyond | (slots < blind[:, None]))[:, : self._length]
        if hidden.any():
            mask = torch.zeros(len(rows), 1, 1, self._length, dtype=backend.dtype)
            mask.masked_fill_(torch.from_numpy(hidden[:, None, None]), -torch.inf)
            self._mask = mask.to(backend.device)

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """[R, Hq, D] of ``q`` [R, Hq, D]."""
        scoring = scaled(self._scoring, scales)
        rows, heads, head_dim = q.shape
        k, v = (self._context(part, rows) for part in self._workspace.gather(k_cache, v_cache, self._blocks))
        folded = q.reshape(rows, k.shape[1], heads // k.shape[1], head_dim)
        if scoring.softcap:
            out = capped_attention(folded, k, v, self._mask, scoring)
        else:
            out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=self._mask, scale=scoring.scale)
        return rescaled(out, scales).reshape(rows, heads, head_dim)

    def _context(self, gathered: torch.Tensor, rows: int) -> torch.Tensor:
        """Gathered blocks as [rows, Hkv, length, D]."""
        tokens = by_token(gathered, self._order)
        if self._stale[0].numel():
            tokens.index_put_(self._stale, tokens.new_zeros(()))
        kv_heads, head_dim = tokens.shape[2:]
        return tokens.reshape(rows, -1, kv_heads, head_dim)[:, : self._length].transpose(1, 2)


class Prompt:
    """One sequence with several query tokens.

    Attributes:
        tokens: their slice of the flat batch.
    """

    def __init__(self, backend: SDPAttention, batch: FlatBatch, row: int, scoring: Scoring, reached: Reach) -> None:
        self._workspace = backend.workspace
        self._order: Order = backend.order
        self._scoring = scoring
        start, end = batch.query_start_loc[row : row + 2].tolist()
        self.tokens = slice(start, end)
        first, length = int(reached.blocks[row]), int(reached.lengths[row])
        self._length = length
        blocks = batch.block_table[row, first : first - (-length // backend.block_size)]
        self._blocks = torch.from_numpy(blocks.astype(np.int64)).to(backend.device)
        count = end - start
        self._mask: torch.Tensor | None = None
        # torch's own causal mask is aligned to the top left, this one to the bottom right
        if length > count or scoring.softcap or (scoring.window and length > scoring.window):
            allowed = torch.ones(count, length, dtype=torch.bool, device=backend.device).tril(length - count)
            if scoring.window:
                allowed = allowed.triu(length - count - scoring.window + 1)
            self._mask = torch.zeros(count, length, dtype=backend.dtype, device=backend.device)
            self._mask.masked_fill_(~allowed, -torch.inf)

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """[n, Hq, D] of ``q`` [n, Hq, D]."""
        scoring = scaled(self._scoring, scales)
        gathered = self._workspace.gather(k_cache, v_cache, self._blocks)
        k, v = (by_token(part, self._order).flatten(0, 1)[: self._length].transpose(0, 1) for part in gathered)
        queries = q.transpose(0, 1)
        if scoring.softcap:
            grouped = queries.reshape(k.shape[0], -1, *queries.shape[1:])
            # One KV head at a time: the scores are held whole.
            heads = [
                capped_attention(grouped[head], k[head], v[head], self._mask, scoring) for head in range(k.shape[0])
            ]
            return rescaled(torch.cat(heads), scales).transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            queries.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[0],
        )
        return rescaled(out, scales).squeeze(0).transpose(0, 1)


def scaled(scoring: Scoring, scales: Scales) -> Scoring:
    """The scoring of keys that are ``scales.k`` times what is given for them."""
    return scoring if scales.k == 1.0 else replace(scoring, scale=scoring.scale * scales.k)


def rescaled(out: torch.Tensor, scales: Scales) -> torch.Tensor:
    """What attention gives for values that are ``scales.v`` times those of ``out``, which is the caller's no more."""
    return out if scales.v == 1.0 else out.mul_(scales.v)


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Attention with capped scores, which torch's own does not know: [..., n, D] of ``q`` [..., n, D].

    Args:
        q: queries.
        k: [..., L, D].
        v: like ``k``.
        mask: added to the scores [..., n, L] once they are capped.
        scoring: scale and cap.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * (scoring.scale / scoring.softcap)
    scores = scores.tanh_().mul_(scoring.softcap)
    if mask is not None:
        scores += mask
    return torch.matmul(functional.softmax(scores, dim=-1).to(v.dtype), v)


def token_index(batch: FlatBatch, rows: NDArray[np.intp], device: torch.device) -> slice | torch.Tensor:
    """Where the one token of each of ``rows`` stands in a batch; a slice, which copies nothing, where they adjoin."""
    first, count = int(batch.query_start_loc[rows[0]]), len(rows)
    places = batch.query_start_loc[rows]
    if (places == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return torch.from_numpy(places).to(device)


def prompts(backend: SDPAttention, batch: FlatBatch, rows: NDArray[np.intp], scoring: Scoring) -> list[Prompt]:
    """The prompt chunks in ``rows`` of a batch."""
    reached = reach(batch, scoring.window, backend.block_size)
    return [Prompt(backend, batch, row, scoring, reached) for row in rows.tolist()]


def group_by_length(lengths: NDArray[np.int64], rows: NDArray[np.intp], block_size: int) -> list[NDArray[np.intp]]:
    """``rows`` in groups of similar length: none is padded to more than twice its own blocks, or by a few.

    Args:
        lengths: [B], of every sequence of the batch.
        rows: some of them.
        block_size: tokens per block.
    """
    blocks = -(-lengths[rows] // block_size)
    order = np.argsort(-blocks, kind="stable")
    groups: list[NDArray[np.intp]] = []
    first = 0
    while first < len(order):
        width = int(blocks[order[first]])
        least = min(width - _PADDING_BLOCKS, -(-width // 2))
        fitting = int((blocks[order[first:]] >= least).sum())
        count = min(fitting, max(1, _GATHER_TOKENS // (width * block_size)))
        groups.append(np.sort(rows[order[first : first + count]]))
        first += count
    return groups
