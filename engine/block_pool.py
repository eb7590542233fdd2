"""Who holds which block of the KV pool: pure bookkeeping, no memory.

Life of a block: FREE, taken by a block table (ACTIVE) or by an import (IMPORTING); shared by further tables and by
leases (EXPORTED); a full one is sealed, so that it is found by its hash, and immutable from then on; when its last
holder lets go it is CACHED (sealed) or FREE. A hold that the transport may still act on when its lease or import ends
moves to quarantine (DRAINING) and is released once the channel is quiet. A block's state is that of its strongest
holder.

Nothing here is thread-safe: one event loop owns the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.block_state import STATE_OF_HOLDER, BlockState, HolderKind, Owner
from engine.free_runs import FreeRuns
from engine.prefix_index import BlockHash, PrefixIndex
from protocol.errors import ConfigError, InvariantViolation, PoolExhausted
from protocol.kv_publisher import KVPublisher, keys_of
from protocol.layout import PADDING_BLOCK
from protocol.messages import PoolCounts

__all__ = ["BlockPool", "BlockState", "HolderKind", "Owner"]

_FREE, _ACTIVE, _CACHED, _EXPORTED = BlockState.FREE, BlockState.ACTIVE, BlockState.CACHED, BlockState.EXPORTED
_IMPORTING, _DRAINING = BlockState.IMPORTING, BlockState.DRAINING
_UNSHARED = (_FREE, _IMPORTING)
_ALLOCATES = frozenset({HolderKind.TABLE, HolderKind.IMPORT})
_SHARES = frozenset({HolderKind.TABLE, HolderKind.LEASE})
_MOVES = frozenset(
    {
        (HolderKind.IMPORT, HolderKind.TABLE),
        (HolderKind.IMPORT, HolderKind.QUARANTINE),
        (HolderKind.LEASE, HolderKind.QUARANTINE),
    }
)


class BlockPool:
    """Holds on ``num_blocks`` blocks of ``block_size`` tokens; block 0 is reserved for padding.

    A call that raises changes nothing.

    Attributes:
        num_blocks: blocks in the pool, the reserved one included.
        block_size: tokens per block.
        prefix_cache: whether sealed blocks stay findable.

    Raises:
        ConfigError: a value is outside its range.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is reserved), got {num_blocks}", field="num_blocks")
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}", field="block_size")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._free = FreeRuns(PADDING_BLOCK + 1, num_blocks)
        self._index = PrefixIndex()
        self._holdings: dict[Owner, dict[int, None]] = {}
        # How many holders of each kind each block has: plain lists, as a prompt has hundreds of blocks to go over.
        self._holders = [[0] * num_blocks for _ in HolderKind]
        self._generations = [0] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._states[PADDING_BLOCK] = BlockState.RESERVED
        self._totals = [0] * len(BlockState)
        self._totals[BlockState.RESERVED] = 1
        self._totals[BlockState.FREE] = num_blocks - 1
        # In quarantine after an import: the transport may still write there, so nobody may share it.
        self._tainted: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` could give now: the free and the evictable."""
        return len(self._free) + self._index.parked

    def allocate(self, owner: Owner, n: int) -> list[int]:
        """Take ``n`` blocks for ``owner``, in as few runs of adjacent ids as can be had, and bump their generations.

        Free blocks go first, then the cached ones that were released longest ago.

        Raises:
            PoolExhausted: fewer than ``n`` are available; none was taken.
            InvariantViolation: ``owner`` is not a table or an import, or ``n`` is negative.
        """
        if owner.kind not in _ALLOCATES or n < 0:
            raise InvariantViolation(f"{owner} cannot allocate {n} blocks")
        if n > self.available:
            raise PoolExhausted(f"{owner} wants {n} blocks, {self.available} of {self.num_blocks} are available")
        if n == 0:
            return []
        self._settle([self._index.evict() for _ in range(n - len(self._free))])
        held = self._holdings.setdefault(owner, {})
        taken = self._free.take(n, after=next(reversed(held), None))
        generations, holders = self._generations, self._holders[owner.kind]
        for block in taken:
            generations[block] += 1
            holders[block] = 1
        self._settle(taken)
        held.update(dict.fromkeys(taken))
        return taken

    def share(self, owner: Owner, blocks: Sequence[int]) -> None:
        """Add a hold of ``owner`` on blocks that are held or cached.

        Raises:
            InvariantViolation: ``owner`` is not a table or a lease, or holds one of them already; or a block is free,
                reserved, or one that the transport may write.
        """
        if owner.kind not in _SHARES:
            raise InvariantViolation(f"{owner} cannot share blocks")
        self._check_distinct(blocks)
        self._check_not_held(owner, blocks)
        states, tainted = self._states, self._tainted
        for block in blocks:
            if states[block] in _UNSHARED or block in tainted:
                raise InvariantViolation(f"{owner} cannot share {self._describe(block)}")
        self._take(owner, blocks)

    def release(self, owner: Owner, blocks: Sequence[int]) -> None:
        """Drop the holds of ``owner``; a block with no holder left is cached when sealed, else free.

        Give the blocks in the sequence's order: the later ones are then evicted before those they build on.

        Raises:
            InvariantViolation: ``owner`` does not hold one of them.
        """
        self._check_held(owner, blocks)
        self._drop(owner, blocks)
        self._settle(reversed(blocks))

    def move(self, source: Owner, target: Owner, blocks: Sequence[int]) -> None:
        """Change the holds of ``source`` into holds of ``target``.

        An import moves to a table (commit) or to quarantine, a lease to quarantine.

        Raises:
            InvariantViolation: any other pair of kinds, ``source`` does not hold one of them, or ``target`` does.
        """
        if (source.kind, target.kind) not in _MOVES:
            raise InvariantViolation(f"holds cannot move from {source} to {target}")
        self._check_held(source, blocks)
        self._check_not_held(target, blocks)
        self._drop(source, blocks)
        if (source.kind, target.kind) == (HolderKind.IMPORT, HolderKind.QUARANTINE):
            self._tainted.update(blocks)
        self._take(target, blocks)

    def holders(self, block: int) -> int:
        """How many hold ``block``: one that is alone may write it, as long as it is not sealed."""
        return sum([counts[block] for counts in self._holders])

    def holdings(self, owner: Owner) -> list[int]:
        """The blocks ``owner`` holds, in the order it got them."""
        return list(self._holdings.get(owner, ()))

    def release_all(self, owner: Owner) -> list[int]:
        """Drop every hold of ``owner`` and return the blocks; an unknown owner holds none."""
        blocks = self.holdings(owner)
        self.release(owner, blocks)
        return blocks

    def move_all(self, source: Owner, target: Owner) -> list[int]:
        """As :meth:`move`, for every hold of ``source``; returns the blocks."""
        blocks = self.holdings(source)
        self.move(source, target, blocks)
        return blocks

    def seal(self, block: int, block_hash: BlockHash) -> None:
        """A full block: immutable from now on, and findable under ``block_hash``.

        Where another block already stands for the hash, that one keeps it and nothing changes.

        Raises:
            InvariantViolation: nobody holds it, the transport may write it, or it is sealed under another hash.
        """
        self._check_distinct((block,))
        # A lease that closed in mid-step may leave a block in quarantine that a table still fills; that only reads it.
        drains_to_cache = self._states[block] is BlockState.DRAINING and block not in self._tainted
        if self._states[block] not in (BlockState.ACTIVE, BlockState.EXPORTED) and not drains_to_cache:
            raise InvariantViolation(f"cannot seal {self._describe(block)}")
        if self.prefix_cache:
            self._index.insert(block, block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest indexed prefix of the chain; takes no hold and leaves the LRU order alone."""
        return self._index.find(hashes)

    @property
    def index(self) -> PrefixIndex:
        """What :meth:`match` looks into."""
        return self._index

    def publisher(self) -> KVPublisher:
        """Tells routers, from now on, what :meth:`match` finds."""
        changes, index = self._index.watch(), self._index
        return KVPublisher(changes.take_keys, lambda: keys_of(index.hashes()))

    def generation(self, block: int) -> int:
        """How often ``block`` was allocated."""
        return self._generations[block]

    def state(self, block: int) -> BlockState:
        """The state of ``block``, that of its strongest holder."""
        return self._states[block]

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        totals = self._totals
        return PoolCounts(
            free=totals[BlockState.FREE],
            active=totals[BlockState.ACTIVE],
            cached=totals[BlockState.CACHED],
            exported=totals[BlockState.EXPORTED],
            importing=totals[BlockState.IMPORTING],
            draining=totals[BlockState.DRAINING],
            reserved=totals[BlockState.RESERVED],
            total=self.num_blocks,
        )

    def check_integrity(self) -> None:
        """Recount everything from the owners' holdings.

        Raises:
            InvariantViolation: names the block and its holders.
        """
        counted = [[0] * self.num_blocks for _ in HolderKind]
        for owner, blocks in self._holdings.items():
            if not blocks:
                raise InvariantViolation(f"{owner} holds nothing, but is kept")
            for block in blocks:
                counted[owner.kind][block] += 1
        self._free.check_integrity()
        self._index.check_integrity()
        free = {block for start, stop in self._free.runs() for block in range(start, stop)}
        totals = [0] * len(BlockState)
        for block, state in enumerate(self._states):
            totals[state] += 1
            if fault := self._fault(block, [counts[block] for counts in counted], block in free):
                raise InvariantViolation(f"{self._describe(block)}: {fault}")
        if totals != self._totals:
            raise InvariantViolation(f"blocks by state are {totals}, counted as {self._totals}")

    def _fault(self, block: int, counted: list[int], free: bool) -> str | None:
        state, idle = self._states[block], not any(counted)
        kept = [counts[block] for counts in self._holders]
        if counted != kept:
            return f"holders by kind are {counted}, counted as {kept}"
        if block == PADDING_BLOCK:
            return None if idle and not free and state is BlockState.RESERVED else "the padding block is in use"
        exclusive = bool(counted[HolderKind.IMPORT]) or block in self._tainted
        checks = (
            (state is self._derive(block), "not the state of its strongest holder"),
            ((state is BlockState.FREE) == free, "free and not in a free run, or the other way round"),
            ((state is BlockState.CACHED) == self._index.is_parked(block), "cached and not parked, or the other way"),
            (not (exclusive and sum(counted) != 1), "writable by the transport and shared"),
            (not (exclusive and block in self._index), "writable by the transport and sealed"),
            (not (free and block in self._index), "free and sealed"),
        )
        return next((fault for good, fault in checks if not good), None)

    def _derive(self, block: int) -> BlockState:
        for kind in reversed(HolderKind):
            if self._holders[kind][block]:
                return STATE_OF_HOLDER[kind]
        return BlockState.CACHED if block in self._index else BlockState.FREE

    def _settle(self, blocks: Iterable[int]) -> None:
        # As :meth:`_derive` has it, which the checks use; a commit waits for this, so no block costs a call here.
        tables, leases, imports, quarantined = self._holders
        states, totals, index = self._states, self._totals, self._index
        freed: list[int] = []
        for block in blocks:
            before = states[block]
            if quarantined[block]:
                after = _DRAINING
            elif imports[block]:
                after = _IMPORTING
            elif leases[block]:
                after = _EXPORTED
            elif tables[block]:
                after = _ACTIVE
            else:
                after = _CACHED if block in index else _FREE
            if before is after:
                continue
            states[block] = after
            totals[before] -= 1
            totals[after] += 1
            if after is _CACHED:
                index.park(block)
            elif after is _FREE:
                freed.append(block)
            elif before is _CACHED:
                index.unpark(block)
        if freed:
            self._tainted.difference_update(freed)
            self._free.add(freed)

    def _take(self, owner: Owner, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        holders = self._holders[owner.kind]
        for block in blocks:
            holders[block] += 1
        self._settle(blocks)
        self._holdings.setdefault(owner, {}).update(dict.fromkeys(blocks))

    def _drop(self, owner: Owner, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        held, holders = self._holdings[owner], self._holders[owner.kind]
        for block in blocks:
            del held[block]
            holders[block] -= 1
        if not held:
            del self._holdings[owner]

    def _check_distinct(self, blocks: Sequence[int]) -> None:
        if blocks and not PADDING_BLOCK < min(blocks) <= max(blocks) < self.num_blocks:
            block = next(block for block in blocks if not PADDING_BLOCK < block < self.num_blocks)
            raise InvariantViolation(f"block {block} is reserved or outside the pool of {self.num_blocks}")
        if len(set(blocks)) != len(blocks):
            raise InvariantViolation(f"a block is named twice in {list(blocks)}")

    def _check_held(self, owner: Owner, blocks: Sequence[int]) -> None:
        self._check_distinct(blocks)
        held = self._holdings.get(owner, {}).keys()
        if not held >= set(blocks):
            block = next(block for block in blocks if block not in held)
            raise InvariantViolation(f"{owner} does not hold {self._describe(block)}")

    def _check_not_held(self, owner: Owner, blocks: Sequence[int]) -> None:
        held = self._holdings.get(owner)
        if held is not None and not held.keys().isdisjoint(blocks):
            block = next(block for block in blocks if block in held)
            raise InvariantViolation(f"{owner} already holds block {block}")

    def _describe(self, block: int) -> str:
        holders = sorted(str(owner) for owner, blocks in self._holdings.items() if block in blocks)
        return f"{self._states[block].name.lower()} block {block} (held by {', '.join(holders) or 'nobody'})"
