"""Random histories of the block pool beside a plain model of it."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool, BlockState, HolderKind, Owner
from engine.prefix_index import block_hashes
from protocol.errors import InvariantViolation, PoolExhausted

KEYS = st.sampled_from("abc")
STRENGTH = (
    (HolderKind.QUARANTINE, BlockState.DRAINING),
    (HolderKind.IMPORT, BlockState.IMPORTING),
    (HolderKind.LEASE, BlockState.EXPORTED),
    (HolderKind.TABLE, BlockState.ACTIVE),
)
MOVES = {
    (HolderKind.IMPORT, HolderKind.TABLE),
    (HolderKind.IMPORT, HolderKind.QUARANTINE),
    (HolderKind.LEASE, HolderKind.QUARANTINE),
}


class PoolHistory(RuleBasedStateMachine):
    """The model: a set of (owner, block) holds, a map of hashes, and a list of cached blocks in eviction order."""

    @initialize(num_blocks=st.integers(2, 16), prefix_cache=st.sampled_from([True, True, True, False]))
    def begin(self, num_blocks, prefix_cache):
        self.pool = BlockPool(num_blocks, 2, prefix_cache)
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.holds = {}
        self.hash_of = {}
        self.cached = []
        self.written = set()
        self.generations = Counter()
        self.chain = block_hashes(range(48), 2)

    def held(self, block):
        return [owner for owner, blocks in self.holds.items() if block in blocks]

    def expected_state(self, block):
        kinds = {owner.kind for owner in self.held(block)}
        for kind, state in STRENGTH:
            if kind in kinds:
                return state
        return BlockState.CACHED if block in self.hash_of else BlockState.FREE

    def let_go(self, owner, blocks):
        for block in blocks:
            self.holds[owner].remove(block)
        for block in reversed(blocks):
            if not self.held(block):
                self.written.discard(block)
                if block in self.hash_of:
                    self.cached.append(block)
        if not self.holds[owner]:
            del self.holds[owner]

    def attempt(self, legal, call, *args):
        try:
            call(*args)
        except InvariantViolation:
            assert not legal, f"{call.__name__}{args} was refused"
            return False
        assert legal, f"{call.__name__}{args} was not refused"
        return True

    @rule(kind=st.sampled_from([HolderKind.TABLE, HolderKind.IMPORT]), key=KEYS, n=st.integers(0, 12))
    def allocate(self, kind, key, n):
        self.take(kind, key, n)

    def take(self, kind, key, n):
        owner = Owner(kind, key)
        free = {b for b in range(1, self.num_blocks) if self.expected_state(b) is BlockState.FREE}
        try:
            taken = self.pool.allocate(owner, n)
        except PoolExhausted:
            assert n > len(free) + len(self.cached)
            return []
        assert len(taken) == len(set(taken)) == n
        evicted = self.cached[: max(0, n - len(free))]
        del self.cached[: len(evicted)]
        for block in evicted:
            del self.hash_of[block]
        assert set(taken) <= free | set(evicted)
        for block in taken:
            self.generations[block] += 1
        if n:
            self.holds.setdefault(owner, []).extend(taken)
        if kind is HolderKind.IMPORT:
            self.written.update(taken)
        return taken

    @rule(key=KEYS, n=st.integers(1, 6))
    def compute_a_prompt(self, key, n):
        """Fresh blocks for the chain's first ``n`` hashes, sealed one by one."""
        for block, block_hash in zip(self.take(HolderKind.TABLE, key, n), self.chain, strict=False):
            self.seal_one(block, block_hash)

    @rule(kind=st.sampled_from(HolderKind), key=KEYS, data=st.data())
    def share(self, kind, key, data):
        blocks = data.draw(st.lists(st.integers(1, self.num_blocks - 1), max_size=4))
        self.share_blocks(Owner(kind, key), blocks)

    def share_blocks(self, owner, blocks):
        legal = (
            owner.kind in (HolderKind.TABLE, HolderKind.LEASE)
            and len(set(blocks)) == len(blocks)
            and not any(block in self.holds.get(owner, ()) or block in self.written for block in blocks)
            and all(self.expected_state(block) is not BlockState.FREE for block in blocks)
        )
        if self.attempt(legal, self.pool.share, owner, blocks) and blocks:
            self.cached = [block for block in self.cached if block not in blocks]
            self.holds.setdefault(owner, []).extend(blocks)

    @rule(key=KEYS, n=st.integers(0, 24))
    def share_a_prefix(self, key, n):
        owner = Owner(HolderKind.TABLE, key)
        by_hash = {block_hash: block for block, block_hash in self.hash_of.items()}
        expected = []
        for block_hash in self.chain[:n]:
            if block_hash not in by_hash:
                break
            expected.append(by_hash[block_hash])
        found = self.pool.match(self.chain[:n])
        assert found == expected
        fresh = [block for block in found if block not in self.holds.get(owner, ())]
        self.pool.share(owner, fresh)
        if fresh:
            self.cached = [block for block in self.cached if block not in fresh]
            self.holds.setdefault(owner, []).extend(fresh)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.holds)))
        blocks = data.draw(st.lists(st.sampled_from(self.holds[owner]), unique=True))
        self.pool.release(owner, blocks)
        if blocks:
            self.let_go(owner, blocks)

    @rule(kind=st.sampled_from(HolderKind), key=KEYS, data=st.data())
    def release_anything(self, kind, key, data):
        owner = Owner(kind, key)
        blocks = data.draw(st.lists(st.integers(1, self.num_blocks - 1), min_size=1, max_size=3))
        held = self.holds.get(owner, ())
        legal = len(set(blocks)) == len(blocks) and all(block in held for block in blocks)
        if self.attempt(legal, self.pool.release, owner, blocks):
            self.let_go(owner, blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release_all(self, data):
        owner = data.draw(st.sampled_from(sorted(self.holds)))
        blocks = list(self.holds[owner])
        assert self.pool.release_all(owner) == blocks
        self.let_go(owner, blocks)

    @precondition(lambda self: self.holds)
    @rule(kind=st.sampled_from(HolderKind), key=KEYS, data=st.data())
    def move(self, kind, key, data):
        source, target = data.draw(st.sampled_from(sorted(self.holds))), Owner(kind, key)
        blocks = data.draw(st.lists(st.sampled_from(self.holds[source]), unique=True))
        legal = (source.kind, kind) in MOVES and not set(blocks) & set(self.holds.get(target, ()))
        if self.attempt(legal, self.pool.move, source, target, blocks) and blocks:
            self.holds.setdefault(target, []).extend(blocks)
            self.holds[source] = [block for block in self.holds[source] if block not in blocks]
            if not self.holds[source]:
                del self.holds[source]
            if kind is HolderKind.TABLE:
                self.written.difference_update(blocks)

    @rule(data=st.data(), at=st.integers(0, 5))
    def seal(self, data, at):
        self.seal_one(data.draw(st.integers(1, self.num_blocks - 1)), self.chain[at])

    def seal_one(self, block, block_hash):
        state = self.expected_state(block)
        only_read = state is BlockState.DRAINING and block not in self.written
        legal = only_read or state in (BlockState.ACTIVE, BlockState.EXPORTED)
        if legal and self.prefix_cache:
            legal = self.hash_of.get(block, block_hash) == block_hash
        taken = block_hash in self.hash_of.values()
        if self.attempt(legal, self.pool.seal, block, block_hash) and self.prefix_cache and not taken:
            self.hash_of[block] = block_hash

    @precondition(lambda self: self.holds)
    @rule(kind=st.sampled_from(HolderKind), key=KEYS, data=st.data())
    def share_what_another_holds(self, kind, key, data):
        other = data.draw(st.sampled_from(sorted(self.holds)))
        self.share_blocks(Owner(kind, key), data.draw(st.lists(st.sampled_from(self.holds[other]), unique=True)))

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.leaked == 0
        states = [self.expected_state(block) for block in range(1, self.num_blocks)]
        assert [self.pool.state(block) for block in range(1, self.num_blocks)] == states
        tally = Counter(state.name.lower() for state in states)
        for name in ("free", "active", "cached", "exported", "importing", "draining"):
            assert getattr(counts, name) == tally[name]
        assert (counts.reserved, counts.total) == (1, self.num_blocks)
        assert self.pool.available == tally["free"] + len(self.cached)
        for block in range(1, self.num_blocks):
            assert self.pool.generation(block) == self.generations[block]
        for kind in HolderKind:
            for key in "abc":
                assert self.pool.holdings(Owner(kind, key)) == self.holds.get(Owner(kind, key), [])
        for owner, blocks in self.holds.items():
            if owner.kind is HolderKind.IMPORT:
                assert all(self.held(block) == [owner] for block in blocks)


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
