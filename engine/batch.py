"""One forward step's work: a list of chunks, and the flat arrays that the model and the attention read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.prompt_logprobs import PromptSpan
from protocol.errors import InvariantViolation
from protocol.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence whose KV this step computes: a piece of a prompt, or the one token of a decode.

    Attributes:
        token_ids: tokens to compute, at least one.
        start: tokens of the sequence whose KV is in the cache already.
        block_table: block ids of the sequence; at least as many as ``start + len(token_ids)`` tokens need.
        sampling: how to draw the token after the last one; None when none is wanted.
        position: index of that drawn token in the request's whole output.
        history: all tokens of the request up to here, of which the last ``position`` are output. Needed only where
            ``sampling`` looks back.
        forks: further draws of the same token, each by its own sampling.
        copied: ``(source, target)``, a block that is copied before the step computes anything: ``target`` is in the
            block table in place of a ``source`` that others go on with.
        span: prompt tokens after tokens of this chunk whose log-probabilities are wanted; None where none are.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    position: int = 0
    history: Sequence[int] = ()
    forks: Sequence[SamplingParams] = ()
    copied: tuple[int, int] | None = None
    span: PromptSpan | None = None


class Draw(NamedTuple):
    """One drawn token.

    Attributes:
        token_id: it.
        logprobs: where its sampling asks for them.
        forks: the further draws that its chunk asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    forks: tuple[Draw, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a batch is checked against: an id outside would touch someone else's memory.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of the pool.
        vocab_size: token ids lie below this.
        max_model_len: tokens of one sequence at most.
    """

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All chunks of a step, end to end. ``T`` tokens of ``B`` sequences; numpy arrays on the host.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], index of each token in its sequence.
        slot_mapping: int64 [T], where each token's K and V go.
        query_start_loc: int64 [B + 1]; sequence ``b`` owns tokens ``query_start_loc[b]:query_start_loc[b + 1]``.
        seq_lens: int32 [B], tokens of each sequence that are in the cache once the step has stored its own.
        block_table: int32 [B, M], padded with block 0.
        logits_indices: int64 [N], the last token of each chunk that wants a draw.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start_loc: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    logits_indices: NDArray[np.int64]


def flatten(chunks: Sequence[Chunk], limits: BatchLimits) -> FlatBatch:
    """The flat arrays of ``chunks``.

    Raises:
        InvariantViolation: a chunk is empty, too long, short of blocks, or holds an id outside its range; names it.
    """
    counts = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int64, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    lens = starts + counts
    needed = -(-lens // limits.block_size)
    _check_lengths(chunks, counts, starts, lens, needed, limits)

    block_table = np.zeros((len(chunks), int(needed.max())), np.int32)
    for row, (chunk, need) in enumerate(zip(chunks, needed.tolist(), strict=True)):
        block_table[row, :need] = chunk.block_table[:need]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, total)
    _check_ids("block id", block_table, limits.num_blocks)
    _check_copies(chunks, limits)
    _check_ids("token id", token_ids, limits.vocab_size)

    query_start_loc = np.concatenate((np.zeros(1, np.int64), ends))
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(total, dtype=np.int64) + (starts - query_start_loc[:-1])[rows]
    blocks = block_table[rows, positions // limits.block_size].astype(np.int64)
    wanted = np.fromiter((chunk.sampling is not None for chunk in chunks), np.bool_, len(chunks))
    return FlatBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * limits.block_size + positions % limits.block_size,
        query_start_loc=query_start_loc,
        seq_lens=lens.astype(np.int32),
        block_table=block_table,
        logits_indices=ends[wanted] - 1,
    )


def _check_lengths(
    chunks: Sequence[Chunk],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    lens: NDArray[np.int64],
    needed: NDArray[np.int64],
    limits: BatchLimits,
) -> None:
    if not chunks:
        raise InvariantViolation("a step needs at least one chunk")
    held = np.fromiter((len(chunk.block_table) for chunk in chunks), np.int64, len(chunks))
    wrong = (counts < 1) | (starts < 0) | (lens > limits.max_model_len) | (held < needed)
    for row, chunk in enumerate(chunks):
        if chunk.span is not None and chunk.span.first + len(chunk.span.targets) > counts[row]:
            raise InvariantViolation(f"chunk {row}: {len(chunk.span.targets)} prompt tokens follow none of its tokens")
    if wrong.any():
        row = int(wrong.argmax())
        raise InvariantViolation(
            f"chunk {row}: {counts[row]} tokens after {starts[row]} with {held[row]} blocks of {limits.block_size} "
            f"cannot be computed (max_model_len {limits.max_model_len})"
        )


def _check_copies(chunks: Sequence[Chunk], limits: BatchLimits) -> None:
    for row, chunk in enumerate(chunks):
        if chunk.copied is None:
            continue
        source, target = chunk.copied
        if not 0 < source < limits.num_blocks or source == target or target not in chunk.block_table:
            raise InvariantViolation(f"chunk {row}: block {source} cannot be copied to {target}")


def _check_ids(what: str, ids: NDArray[np.int32] | NDArray[np.int64], bound: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= bound:
        raise InvariantViolation(f"{what} {low if low < 0 else high} is outside [0, {bound})")
