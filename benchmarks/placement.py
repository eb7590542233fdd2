"""What placing a request costs: time of a decision, memory of the block index, events taken in, and how fair it is.

    python benchmarks/placement.py [--blocks 10000000] [--workers 16,1000]

One process, no worker and no socket: the fleet is made up, the index and the policy are the router's own. CPU time, so
a busy machine disturbs it less.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Heartbeat, PoolCounts, WorkerLoad, WorkerProfile
from router.block_index import BlockIndex
from router.placer import Placer, PlacerConfig
from router.policy import Demand
from router.prompt_chain import PromptChains
from router.registry import WorkerRegistry

BLOCK = 16
PROMPT_BLOCKS = 64
BATCH = 512
LAYOUT = KVLayout(num_layers=32, kv_heads=8, head_dim=128, block_size=BLOCK)


def microseconds(work: Callable[[int], object], runs: int) -> tuple[float, float]:
    """Median and 99th percentile of CPU time a call."""
    taken = []
    for run in range(runs):
        begun = time.thread_time_ns()
        work(run)
        taken.append((time.thread_time_ns() - begun) / 1e3)
    return float(np.median(taken)), float(np.percentile(taken, 99))


def fleet(count: int, rng: np.random.Generator) -> WorkerRegistry:
    """A registry of made-up workers, half of either role."""
    registry = WorkerRegistry(1e9, 1e9, 1e9)
    for index in range(count):
        role = "prefill" if index % 2 else "decode"
        blocks = 2 * 10**7 // count
        pool = PoolCounts(
            free=blocks, active=0, cached=0, exported=0, importing=0, draining=0, reserved=1, total=blocks + 1
        )
        load = WorkerLoad(
            pool=pool,
            waiting_tokens=int(rng.integers(0, 4000)),
            running=int(rng.integers(0, 32)),
            steps=10_000,
            step_fixed=0.01,
            step_per_token=1e-4 if role == "prefill" else 1e-3,
        )
        profile = WorkerProfile(
            role=role,
            model="m",
            vocab_size=32_000,
            max_model_len=1 << 17,
            layout=LAYOUT,
            num_blocks=blocks + 1,
            peer_endpoint="tcp://host:1" if role == "prefill" else "",
        )
        peer = Peer(f"worker-{index}", 1)
        registry.heartbeat(peer, str(peer).encode(), Heartbeat(profile, load), 0.0)
    return registry


def filled(index: BlockIndex, workers: int, holdings: int, shared: list[np.ndarray], rng: np.random.Generator) -> float:
    """Prompts' blocks on a prefill and a decode worker each; returns seconds of CPU time for each thousand events."""
    for row in range(0, workers, max(4, workers // 16)):
        for chain in shared:
            index.store(row, chain)
    begun, events = time.process_time(), 0
    while index.holdings < holdings:
        # What a worker tells at a time: some prompts' blocks.
        chain = rng.integers(1, 1 << 64, BATCH, dtype=np.uint64)
        for row in rng.integers(0, workers, 2).tolist():
            index.store(row, chain)
        events += 2 * BATCH
    return (time.process_time() - begun) / max(1, events) * 1e6


def measure(workers: int, holdings: int, prompts: int = 64) -> None:
    """Measure one size, and print it. Half of the prompts are known to some workers."""
    rng = np.random.default_rng(7)
    registry = fleet(workers, rng)
    placer = Placer(PlacerConfig("m", "cost"), registry)
    tokens = [tuple(rng.integers(0, 32_000, PROMPT_BLOCKS * BLOCK).tolist()) for _ in range(prompts)]
    known = [next(PromptChains(each).of(BLOCK).pieces()) for each in tokens]
    pace = filled(placer.index, workers, holdings, known[: prompts // 2], rng)
    index = placer.index
    print(f"{workers} workers, {index.holdings:,} holdings of {index.blocks:,} blocks")
    print(f"  index: {index.nbytes / index.holdings:.1f} bytes a holding, {index.nbytes / index.blocks:.1f} a block")
    print(f"  events: {pace:.2f} us each, in batches of {BATCH}")
    chains = [PromptChains(each) for each in tokens]
    hashing = microseconds(lambda run: [*PromptChains(tokens[run % prompts]).of(BLOCK).pieces()], 200)
    print(
        f"  keys of a prompt of {PROMPT_BLOCKS * BLOCK} tokens, once: p50 {hashing[0]:.0f} us, p99 {hashing[1]:.0f} us"
    )
    for chain in chains:
        [*chain.of(BLOCK).pieces()]
    chosen: Counter[str] = Counter()

    def decide(run: int) -> None:
        demand = Demand(needs_decode=True, turn=run, output=256)
        placement, _ = placer.place(chains[run % prompts], demand, RequestKey("r", 0), 0.0)
        chosen[placement.prefill.peer.name] += 1

    decide(0)
    decided = microseconds(decide, 2000)
    print(f"  decision: p50 {decided[0]:.0f} us, p99 {decided[1]:.0f} us; {len(chosen)} prefill workers were chosen")
    begun = time.process_time()
    index.drop(0)
    print(f"  a worker restarts: its blocks are gone in {(time.process_time() - begun) * 1e3:.1f} ms")


def main() -> None:
    """Measure each size that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="16,1000", help="how many, several with commas")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="pairs of a block and a worker that has it")
    asked = parser.parse_args()
    for count in map(int, asked.workers.split(",")):
        measure(count, asked.blocks)


if __name__ == "__main__":
    main()
