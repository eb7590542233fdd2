"""Attention with torch's scaled_dot_product_attention over gathered blocks; the CPU's backend.

Decodes of similar length are gathered together into one padded call: the group of query heads that shares a KV head
becomes the rows of its query, so each K and V is read once. Prompt chunks are one call each.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from engine.attention.backend import AttentionBackend, AttentionPlan, by_token
from engine.batch import FlatBatch
from protocol.layout import KVLayout, Order

_PADDING_BLOCKS = 8
"""A sequence may always be padded by this much, whatever its length: a further call costs more."""
_GATHER_TOKENS = 1 << 15
"""Tokens gathered at once at most, so that the workspace stays small; one sequence may be longer."""


class SDPAttention(AttentionBackend):
    """Gathers blocks into a workspace that all layers and steps share."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.workspace = Workspace()

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        counts = np.diff(batch.query_start_loc)
        decodes = np.flatnonzero(counts == 1)
        return SDPAPlan(
            self,
            torch.from_numpy(batch.slot_mapping).to(self.device),
            [Decodes(self, batch, rows) for rows in group_by_length(batch, decodes, self.block_size)],
            prompts(self, batch, np.flatnonzero(counts > 1)),
        )


class SDPAPlan(AttentionPlan):
    """Groups of decodes, and prompt chunks."""

    def __init__(
        self, backend: SDPAttention, slots: torch.Tensor, decodes: list[Decodes], prompts: list[Prompt]
    ) -> None:
        super().__init__(backend.order)
        self._blocks = slots // backend.block_size
        self._offsets = slots % backend.block_size
        self._decodes = decodes
        self._prompts = prompts

    def store(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Write K and V of the step's tokens to their slots."""
        by_token(k_cache, self.order).index_put_((self._blocks, self._offsets), k)
        by_token(v_cache, self.order).index_put_((self._blocks, self._offsets), v)

    def forward(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D]: [T, Hq, D]."""
        out = q.new_empty(q.shape)
        for decodes in self._decodes:
            out[decodes.tokens] = decodes.attend(q[decodes.tokens], k_cache, v_cache, scale)
        for prompt in self._prompts:
            out[prompt.tokens] = prompt.attend(q[prompt.tokens], k_cache, v_cache, scale)
        return out


class Workspace:
    """Room for gathered K and V; grows to the largest gather and stays."""

    def __init__(self) -> None:
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of ``blocks`` [N] of both caches, each [N, *inner]; valid until the next gather."""
        shape = (blocks.shape[0], *k_cache.shape[1:])
        size = blocks.shape[0] * k_cache[0].numel()
        if self._buffers is None or self._buffers[0].numel() < size:
            # Not a tensor of inference mode, which could not be written outside of it.
            with torch.inference_mode(mode=False):
                self._buffers = (k_cache.new_empty(size), v_cache.new_empty(size))
        k, v = (buffer[:size].view(shape) for buffer in self._buffers)
        torch.index_select(k_cache, 0, blocks, out=k)
        torch.index_select(v_cache, 0, blocks, out=v)
        return k, v


class Decodes:
    """Sequences of similar length, with one query token each.

    Attributes:
        tokens: index of them in the flat batch.
    """

    def __init__(self, backend: SDPAttention, batch: FlatBatch, rows: NDArray[np.intp]) -> None:
        self._workspace = backend.workspace
        self._order: Order = backend.order
        lens = batch.seq_lens[rows].astype(np.int64)
        width = -(-int(lens.max()) // backend.block_size)
        self.tokens = token_index(batch, rows, backend.device)
        table = batch.block_table[rows, :width].astype(np.int64)
        self._blocks = torch.from_numpy(table.reshape(-1)).to(backend.device)
        self._length = int(lens.max())
        beyond = np.arange(width * backend.block_size) >= lens[:, None]
        # Slots beyond a sequence's end may hold anything, NaN too, which no mask would stop: they are zeroed.
        block, offset = np.divmod(np.flatnonzero(beyond), backend.block_size)
        self._stale = (torch.from_numpy(block).to(backend.device), torch.from_numpy(offset).to(backend.device))
        self._mask: torch.Tensor | None = None
        if len(rows) > 1 and beyond[:, : self._length].any():
            mask = torch.zeros(len(rows), 1, 1, self._length, dtype=backend.dtype)
            mask.masked_fill_(torch.from_numpy(beyond[:, None, None, : self._length]), -torch.inf)
            self._mask = mask.to(backend.device)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """[R, Hq, D] of ``q`` [R, Hq, D]."""
        rows, heads, head_dim = q.shape
        k, v = (self._context(part, rows) for part in self._workspace.gather(k_cache, v_cache, self._blocks))
        folded = q.reshape(rows, k.shape[1], heads // k.shape[1], head_dim)
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=self._mask, scale=scale)
        return out.reshape(rows, heads, head_dim)

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

    def __init__(self, backend: SDPAttention, batch: FlatBatch, row: int) -> None:
        self._workspace = backend.workspace
        self._order: Order = backend.order
        first, end = batch.query_start_loc[row : row + 2].tolist()
        self.tokens = slice(first, end)
        self._length = int(batch.seq_lens[row])
        width = -(-self._length // backend.block_size)
        self._blocks = torch.from_numpy(batch.block_table[row, :width].astype(np.int64)).to(backend.device)
        count = end - first
        self._mask: torch.Tensor | None = None
        if self._length > count:  # torch's own causal mask is aligned to the top left, this one to the bottom right
            ones = torch.ones(count, self._length, dtype=torch.bool, device=backend.device)
            allowed = ones.tril(self._length - count)
            self._mask = torch.zeros(count, self._length, dtype=backend.dtype, device=backend.device)
            self._mask.masked_fill_(~allowed, -torch.inf)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """[n, Hq, D] of ``q`` [n, Hq, D]."""
        gathered = self._workspace.gather(k_cache, v_cache, self._blocks)
        k, v = (
            by_token(part, self._order).flatten(0, 1)[: self._length].transpose(0, 1).unsqueeze(0) for part in gathered
        )
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)


def token_index(batch: FlatBatch, rows: NDArray[np.intp], device: torch.device) -> slice | torch.Tensor:
    """Where the one token of each of ``rows`` stands in a batch; a slice, which copies nothing, where they adjoin."""
    first, count = int(batch.query_start_loc[rows[0]]), len(rows)
    places = batch.query_start_loc[rows]
    if (places == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return torch.from_numpy(places).to(device)


def prompts(backend: SDPAttention, batch: FlatBatch, rows: NDArray[np.intp]) -> list[Prompt]:
    """The prompt chunks in ``rows`` of a batch."""
    return [Prompt(backend, batch, row) for row in rows.tolist()]


def group_by_length(batch: FlatBatch, rows: NDArray[np.intp], block_size: int) -> list[NDArray[np.intp]]:
    """``rows`` in groups of similar length: none is padded to more than twice its own blocks, or by a few."""
    blocks = -(-batch.seq_lens[rows] // block_size)
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
