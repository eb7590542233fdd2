"""How much of the pool's used memory holds no token, on requests as long as those people send.

The lengths are drawn: log-normal, with the means published for ShareGPT in the PagedAttention paper (Kwon et al., 2023:
161 tokens in, 338 out), cut at 1,024 as there. The decode worker's own scheduler and pool serve them, without a model;
the share is taken at every step. "whole" is the same requests with memory for their longest possible output set aside,
as was done before paging.
Usage: ``python benchmarks/pool_waste.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from decode_worker.scheduler import DecodeScheduler
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

MEAN_IN, MEAN_OUT = 161.31, 337.99
SPREAD_IN, SPREAD_OUT = 1.2, 0.9
LONGEST = 1024
ROUTER = Peer("router", 1)
PREFILL = PrefillAddress(peer=Peer("prefill", 1), endpoint="tcp://127.0.0.1:1")


@dataclass(frozen=True)
class Waste:
    """What a run came to.

    Attributes:
        share: of the used slots that held no token, over the whole run.
        most: the most empty slots per sequence at any step.
        whole: the share that would have been empty, had each request had all its slots from the start.
        preemptions: sequences given back for want of blocks.
    """

    share: float
    most: float
    whole: float
    preemptions: int


def lengths(requests: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of so many requests; the same ones for the same seed."""
    rng = np.random.default_rng(seed)

    def drawn(mean: float, spread: float) -> list[int]:
        values = rng.lognormal(np.log(mean) - spread**2 / 2, spread, requests)
        return [int(value) for value in np.clip(np.rint(values), 2, LONGEST)]

    return list(zip(drawn(MEAN_IN, SPREAD_IN), drawn(MEAN_OUT, SPREAD_OUT), strict=True))


def measure(block_size: int, *, requests: int, sequences: int, num_blocks: int, seed: int = 0) -> Waste:
    """Serve the requests, as many at once as there is room for."""
    pool = BlockPool(num_blocks, block_size)
    scheduler = DecodeScheduler(pool, block_size=block_size, max_sequences=sequences)
    for index, (prompt, output) in enumerate(lengths(requests, seed)):
        # Prompts that differ from their first token on: what is shared would only make the share smaller.
        ids = (index, *range(1, prompt))
        asked = Reserve(
            key=RequestKey(f"r{index}", 0), token_ids=ids, sampling=SamplingParams(max_tokens=output), prefill=PREFILL
        )
        scheduler.add(asked, ROUTER, 0.0)
    used = empty = held = preemptions = 0
    most = 0.0
    while scheduler.waiting or not scheduler.idle:
        for sequence in scheduler.admit():
            scheduler.commit(sequence.key, 1, 0.0)
        step = scheduler.next_step()
        preemptions += len(step.preempted)
        count = len(step.sequences)
        used += pool.counts().used * block_size
        empty += scheduler.empty_slots
        held += sum(len(sequence.request.token_ids) + LONGEST for sequence in step.sequences)
        most = max(most, scheduler.empty_slots / max(1, count))
        scheduler.complete_step([Draw(3)] * count)
    return Waste(empty / used, most, 1 - (used - empty) / held, preemptions)


def main() -> None:
    """Print a line for each block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=64)
    options = parser.parse_args()
    print(f"{'block':>5} {'empty':>7} {'a sequence':>11} {'whole':>7} {'preempted':>10}")
    for block_size in (8, 16, 32):
        found = measure(
            block_size,
            requests=options.requests,
            sequences=options.sequences,
            num_blocks=1 + options.sequences * 640 // block_size,
        )
        print(f"{block_size:5} {found.share:7.2%} {found.most:11.1f} {found.whole:7.1%} {found.preemptions:10}")


if __name__ == "__main__":
    main()
