"""How prompt chunks are cut into the tiles that the programs of :mod:`engine.kernels.paged_prefill` compute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

_THREADS = 256
"""Of a program: with fewer, a tile of 128 queries finds no room in their registers."""
EDGE_STAGES = 2
"""Of the loop whose keys not all queries see; it is short, and registers are scarce."""
ON_AMD = torch.version.hip is not None
"""Whether this torch is for AMD's GPUs."""


class Launch(NamedTuple):
    """How the kernel is launched for one dtype, head dimension and group.

    Attributes:
        block_m: queries of a tile, a power of two; a token has one by each head of the group.
        block_n: keys of a step.
        num_warps: of a program.
        num_stages: of the loop whose keys all queries see. The address of a key is read from memory too: at 5 the keys
            of two steps are under way at once, at 4 and below those of the next step only once the last are used.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def launch(dtype: torch.dtype, head_dim: int, group: int, eighth: int = 0, *, amd: bool = ON_AMD) -> Launch:
    """Tile, warps and stages that stay within the budget on every chip of the maker's.

    Args:
        dtype: that is computed in.
        head_dim: of queries and cache.
        group: query heads of a KV head.
        eighth: what the kernels call the type of an eight-bit cache.
        amd: for a GPU of AMD's, whose warps are twice as wide, and which has 64 KiB of shared memory only.
    """
    if dtype == torch.float32:
        # Exact float32 dots run without tensor cores and hold their operands in registers.
        block_m, block_n, num_stages = 32, 16, 2
    else:
        block_m, block_n = (128, 64) if head_dim <= 128 else (64, 32)
        if eighth and 64 < head_dim <= 128 and not amd:
            # Elements that are widened pass through registers: longer steps spill on sm_80, at 32 when head_dim is 80.
            block_n = 16
        num_stages = 2 if amd else 5
    num_warps = _THREADS // (64 if amd else 32)
    return Launch(max(block_m, triton.next_power_of_2(group)), block_n, num_warps, num_stages)


def tile_constants(
    launched: Launch, group: int, head_dim: int, block_size: int, *, capped: bool, eighth: int = 0
) -> dict[str, int]:
    """Compile-time arguments of the kernel."""
    return {
        "GROUP": group,
        "TILE_TOKENS": launched.block_m // group,
        "D": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launched.block_m,
        "BLOCK_N": launched.block_n,
        "STAGES": launched.num_stages,
        "CAPPED": capped,
        "FORMAT": eighth,
    }


def plan_tiles(
    query_start: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
    rows: NDArray[np.intp],
    dtype: torch.dtype,
    head_dim: int,
    group: int,
) -> NDArray[np.int32]:
    """The tiles of a batch's prompt chunks: the one with most keys first, so that no long one is left for the end.

    Args:
        query_start: [B + 1]; sequence ``b`` owns tokens ``query_start[b]:query_start[b + 1]``.
        seq_lens: [B], tokens of each sequence up to the last of its chunk.
        rows: of the sequences that are wanted.
        dtype: that is computed in; tiles are the same whatever the cache keeps.
        head_dim: of queries and cache.
        group: query heads of a KV head.

    Returns:
        [N, 2]: a sequence, and the first token of the tile within its chunk.
    """
    tokens = launch(dtype, head_dim, group).block_m // group
    counts = np.diff(query_start)[rows]
    tiles = -(-counts // tokens)
    owners = np.repeat(np.arange(len(rows)), tiles)
    firsts = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    ends = np.minimum(firsts + tokens, counts[owners]) + (seq_lens[rows] - counts)[owners]
    order = np.argsort(-ends, kind="stable")
    return np.stack((rows[owners], firsts), 1)[order].astype(np.int32)
