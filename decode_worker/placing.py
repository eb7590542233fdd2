"""Gives a sequence the blocks that it begins with, or comes back to: all of them, or none."""

from __future__ import annotations

from decode_worker.sequence import Sequence, SequenceState, import_owner, table_owner
from engine.block_pool import BlockPool
from engine.prompt import Prompt
from protocol.layout import PADDING_BLOCK


def place(sequence: Sequence, pool: BlockPool, spare: int) -> bool:
    """Take the blocks of a sequence that waits, those of a prefix hit among them; False when there are not so many.

    Args:
        sequence: without blocks.
        pool: that the blocks are of.
        spare: blocks that are left for others.
    """
    if sequence.prompt is not None:
        return _place_prompt(sequence, sequence.prompt, pool, spare)
    key, back = sequence.key, sequence.tracker.state is SequenceState.SWAPPED
    # What a window has passed is not wanted, and what comes after it is not looked for without it.
    hit = [] if sequence.passed else pool.match(sequence.hashes)
    pool.share(table_owner(key), hit)
    wanted = (len(sequence.slots) if back else -(-len(sequence.token_ids) // pool.block_size)) - len(hit)
    if pool.available < wanted + spare:
        pool.release_all(table_owner(key))
        return False
    fresh = pool.allocate(table_owner(key) if back else import_owner(key), wanted)
    sequence.block_table = [*[PADDING_BLOCK] * sequence.passed, *hit, *fresh]
    sequence.cached_blocks = sequence.passed + len(hit)
    return True


def _place_prompt(sequence: Sequence, prompt: Prompt, pool: BlockPool, spare: int) -> bool:
    prompt.hashes = sequence.hashes
    if not prompt.place(pool, spare):
        return False
    sequence.block_table = prompt.block_table
    sequence.computed = prompt.computed
    sequence.cached_blocks = prompt.computed // pool.block_size
    return True
