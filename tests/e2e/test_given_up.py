"""A sequence that stayed swapped out too long goes back to the router, and who waited behind it gets on at once."""

from __future__ import annotations

from pathlib import Path

from pace import allowed
from rack import rack, until

from decode_worker.sequence import SequenceState
from engine.batch import Draw
from engine.block_pool import HolderKind, Owner
from protocol.ids import Peer, RequestKey
from protocol.messages import Cancel, PrefillAddress, Reserve
from protocol.sampling import SamplingParams

NOBODY = Peer("nobody", 1)
ELSEWHERE = PrefillAddress(peer=Peer("prefill-9", 1), endpoint="tcp://127.0.0.1:1")
LONG_AGO = -60.0
OTHERS = Owner(HolderKind.TABLE, "others")


def reserve(name: str, length: int) -> Reserve:
    return Reserve(
        key=RequestKey(name, 0),
        token_ids=tuple(range(3, 3 + length)),
        sampling=SamplingParams(max_tokens=30),
        prefill=ELSEWHERE,
        cache_salt=name,
    )


async def test_who_waits_behind_a_sequence_that_is_given_up_gets_its_turn(tiny_llama_dir: Path) -> None:
    options: dict[str, object] = {"preemption": "swap", "swap_bytes": 1 << 20}
    async with rack(tiny_llama_dir, decode_engine={"num_blocks": 9}, decode_transfer=options) as running:
        (decode,) = running.decode
        scheduler, pool = decode._scheduler, decode.pool
        await until(lambda: not decode._wake.is_set(), "a worker that sleeps")
        # In one go, so that the worker sees only how it ends: one is out, and others hold all but two blocks.
        for name in ("old", "young"):
            scheduler.add(reserve(name, 8), NOBODY, LONG_AGO)
            (sequence,) = scheduler.admit()
            scheduler.commit(sequence.key, 7, LONG_AGO)
        while not (step := scheduler.next_step()).swapped_out:
            scheduler.complete_step([Draw(3)] * len(step.sequences))
        scheduler.complete_step([Draw(3)] * len(step.sequences))
        (young,) = step.swapped_out
        scheduler.copied(young, LONG_AGO)
        scheduler.drop(RequestKey("old", 0))
        pool.allocate(OTHERS, 6)
        behind = scheduler.add(reserve("behind", 4), NOBODY, LONG_AGO)
        assert scheduler.admit() == []
        assert (young.tracker.state, behind.tracker.state) == (SequenceState.SWAPPED, SequenceState.WAITING)

        await until(lambda: young.tracker.state is SequenceState.GONE, "the end of patience")
        await until(lambda: behind.tracker.state is SequenceState.IMPORTING, "the turn of the one behind", allowed(5.0))
        decode._from_router(NOBODY, Cancel(key=behind.key))
        pool.release_all(OTHERS)
