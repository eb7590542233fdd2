"""What placing a request costs: time of a decision, memory of the block index, events taken in, and how fair it is.

    python benchmarks/placement.py [--blocks 10000000] [--workers 16,1000] [--link-gbit 100] [--load 0.7]

One process, no worker and no socket: the fleet is made up, the index and the policy are the router's own. CPU time, so
a busy machine disturbs it less. Between two decisions a worker beats, and an older request gets its first token, or
ends: what a decision finds is never just as the last one left it. Requests come as fast as the prefill workers compute
them, times the load; with links that cannot carry their blocks (``--link-gbit 8``) each pair has to be looked at.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import count

import msgspec
import numpy as np

from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Heartbeat, PoolCounts, WorkerLoad, WorkerProfile
from router.block_index import BlockIndex
from router.explanations import Decision
from router.placer import Placer, PlacerConfig
from router.policy import Demand
from router.prompt_chain import PromptChains
from router.registry import WorkerRegistry

BLOCK = 16
PROMPT_BLOCKS = 64
BATCH = 512
TOKEN_SECONDS = 1e-4
"""Of prefill."""
LIVE = 512
"""Requests under way, of which the older half decodes."""
LAYOUT = KVLayout(num_layers=32, kv_heads=8, head_dim=128, block_size=BLOCK)


def microseconds(runs: int, *turns: Callable[[int], object]) -> list[tuple[float, float]]:
    """Median and 99th percentile of CPU time a call of each of some that take turns."""
    taken: list[list[float]] = [[] for _ in turns]
    for run in range(runs):
        for work, times in zip(turns, taken, strict=True):
            begun = time.thread_time_ns()
            work(run)
            times.append((time.thread_time_ns() - begun) / 1e3)
    return [(float(np.median(times)), float(np.percentile(times, 99))) for times in taken]


class Workers:
    """Made-up ones in a registry, half of either role.

    Args:
        size: how many.
        rng: of their loads.
        link_rate: bytes per second of each one's network.
    """

    def __init__(self, size: int, rng: np.random.Generator, link_rate: float) -> None:
        self.registry = WorkerRegistry(1e9, 1e9, 1e9)
        self._rng = rng
        blocks = 2 * 10**7 // size
        self._pool = PoolCounts(
            free=blocks, active=0, cached=0, exported=0, importing=0, draining=0, reserved=1, total=blocks + 1
        )
        self._profiles = [
            WorkerProfile(
                role="prefill" if index % 2 else "decode",
                model="m",
                vocab_size=32_000,
                max_model_len=1 << 17,
                layout=LAYOUT,
                num_blocks=blocks + 1,
                peer_endpoint=f"tcp://host-{index}:1" if index % 2 else "",
                kv_addresses=() if index % 2 else (f"tcp://host-{index}:2",),
                link_rate=link_rate,
            )
            for index in range(size)
        ]
        for index in range(size):
            self.beat(index)

    def beat(self, index: int) -> Peer:
        """A worker beats, as over a wire; returns who."""
        peer, profile = Peer(f"worker-{index}", 1), self._profiles[index]
        load = WorkerLoad(
            pool=self._pool,
            waiting_tokens=int(self._rng.integers(0, 4000)),
            running=int(self._rng.integers(0, 32)),
            steps=10_000 + int(self._rng.integers(0, 1000)),
            step_fixed=0.01,
            step_per_token=TOKEN_SECONDS if profile.role == "prefill" else 1e-3,
            step_mean_tokens=500.0 if profile.role == "prefill" else 16.0,
        )
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(Heartbeat(profile, load)), type=Heartbeat)
        self.registry.heartbeat(peer, str(peer).encode(), message, 0.0)
        return peer


def filled(index: BlockIndex, workers: int, blocks: int, shared: list[np.ndarray], rng: np.random.Generator) -> float:
    """Prompts' blocks on a prefill and a decode worker each; returns seconds of CPU time for each thousand events."""
    for row in range(0, workers, max(4, workers // 16)):
        for chain in shared:
            index.store(row, chain)
    begun, events = time.process_time(), 0
    while index.blocks < blocks:
        # What a worker tells at a time: some prompts' blocks.
        chain = rng.integers(1, 1 << 64, BATCH, dtype=np.uint64)
        for row in rng.integers(0, workers, 2).tolist():
            index.store(row, chain)
        events += 2 * BATCH
    return (time.process_time() - begun) / max(1, events) * 1e6


def measure(workers: int, blocks: int, link_rate: float, load: float, prompts: int = 64) -> None:
    """Measure one size, and print it. Half of the prompts are known to some workers."""
    rng = np.random.default_rng(7)
    fleet = Workers(workers, rng, link_rate)
    placer = Placer(PlacerConfig("m", "cost"), fleet.registry)
    tokens = [tuple(rng.integers(0, 32_000, PROMPT_BLOCKS * BLOCK).tolist()) for _ in range(prompts)]
    known = [next(PromptChains(each).of(BLOCK).pieces()) for each in tokens]
    pace = filled(placer.index, workers, blocks, known[: prompts // 2], rng)
    index = placer.index
    print(f"{workers} workers, {index.blocks:,} blocks, {index.holdings:,} pairs of a block and one who has it")
    print(f"  index: {index.nbytes / index.blocks:.1f} bytes a block, {index.nbytes / index.holdings:.1f} a pair")
    print(f"  events: {pace:.2f} us each, in batches of {BATCH}")
    chains = [PromptChains(each) for each in tokens]
    (hashing,) = microseconds(200, lambda run: [*PromptChains(tokens[run % prompts]).of(BLOCK).pieces()])
    print(
        f"  keys of a prompt of {PROMPT_BLOCKS * BLOCK} tokens, once: p50 {hashing[0]:.0f} us, p99 {hashing[1]:.0f} us"
    )
    for chain in chains:
        [*chain.of(BLOCK).pieces()]
    chosen: Counter[str] = Counter()
    live: deque[Decision] = deque()

    clock = count()
    # Two of these turns for each request.
    turn = PROMPT_BLOCKS * BLOCK * TOKEN_SECONDS / (workers / 2) / load / 2

    def decide(_: int) -> None:
        run = next(clock)
        demand = Demand(needs_decode=True, turn=run, output=256)
        placement, decision = placer.place(chains[run % prompts], demand, RequestKey("r", 0), turn * run)
        chosen[placement.prefill.peer.name] += 1
        live.append(decision)

    def pass_time(_: int) -> None:
        run = next(clock)
        now = turn * run
        placer.heartbeat(fleet.beat(run // 2 % workers), 0, now)
        if len(live) > LIVE // 2:
            placer.first_token(live[-LIVE // 2], now)
        if len(live) > LIVE:
            ended = live.popleft()
            placer.ended(ended, 100, 1.5)
            placer.release(ended, now, computed=True)

    microseconds(2 * LIVE, decide, pass_time)
    decided, passed = microseconds(2000, decide, pass_time)
    print(f"  decision: p50 {decided[0]:.0f} us, p99 {decided[1]:.0f} us; {len(chosen)} prefill workers were chosen")
    print(f"  a heartbeat, a first token and an end: p50 {passed[0]:.0f} us, p99 {passed[1]:.0f} us")
    begun = time.process_time()
    index.drop(0)
    print(f"  a worker restarts: its blocks are gone in {(time.process_time() - begun) * 1e3:.1f} ms")


def main() -> None:
    """Measure each size that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="16,1000", help="how many, several with commas")
    parser.add_argument(
        "--blocks", type=int, default=10_000_000, help="different ones in the index, each of which two workers have"
    )
    parser.add_argument("--link-gbit", type=float, default=100.0, help="each worker's network, in Gbit/s")
    parser.add_argument("--load", type=float, default=0.7, help="of the prefill workers, were nothing cached")
    asked = parser.parse_args()
    for workers in map(int, asked.workers.split(",")):
        measure(workers, asked.blocks, asked.link_gbit * 1e9 / 8, asked.load)


if __name__ == "__main__":
    main()
