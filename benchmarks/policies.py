"""Every policy on every kind of trace, in the simulator: who is how much slower, or worse, than the default.

    python benchmarks/policies.py [--workers 32P32D] [--profile smollm2-cpu] [--requests 6000] [--load 0.7] [--seeds 1]

A row for each trace and policy: mean time to the first token, the share of requests within the profile's targets, the
busiest worker of either role by the mean of them; and the default's by each policy's. Load is of what the workers could
do if nothing were cached, as for ``kvferry simulate``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from cluster.bench.traces.kind import KINDS
from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.registry import stream_trace
from cluster.simulation.figures import Figures
from cluster.simulation.profile import profile_of
from cluster.simulation.rate import SAMPLE, capacity
from cluster.simulation.scenario import Scenario, parse_policies, parse_workers
from cluster.simulation.simulation import simulate

DEFAULT = "cost"


def figures_of(scene: Scenario, trace: str, load: float, requests: int, seeds: int) -> list[Figures]:
    """One policy on one trace, once for each seed."""
    found = []
    for seed in range(seeds):
        options = TraceOptions(name=trace, requests=min(requests, SAMPLE), rate=1.0, seed=seed)
        rate = load * capacity(scene, stream_trace(options))
        options = replace(options, requests=requests, rate=rate)
        found.append(simulate(replace(scene, seed=seed), stream_trace(options), requests))
    return found


def main() -> None:
    """Run all that was asked for, the default first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="32P32D")
    parser.add_argument("--profile", default="smollm2-cpu")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--traces", default=",".join(KINDS))
    parser.add_argument("--policies", default="all")
    asked = parser.parse_args()
    profile, (prefill, decode) = profile_of(asked.profile), parse_workers(asked.workers)
    scene = Scenario(
        profile=profile, prefill=prefill, decode=decode, routers=asked.routers, ttft=profile.ttft, tpot=profile.tpot
    )
    print("| trace | policy | TTFT ms | cost by it | good % | cost less it | P load | D load | P busy % | D busy % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    policies = [DEFAULT, *(name for name in parse_policies(asked.policies) if name != DEFAULT)]
    for trace in asked.traces.split(","):
        ours: tuple[float, float] | None = None
        for policy in policies:
            runs = figures_of(replace(scene, policy=policy), trace, asked.load, asked.requests, asked.seeds)
            ttft, good, *rest = np.mean(
                [
                    (
                        *(1e3 * run.ttft.mean, 100 * run.good, run.prefill_load, run.decode_load),
                        *(100 * run.prefill_busy, 100 * run.decode_busy),
                    )
                    for run in runs
                ],
                axis=0,
            ).tolist()
            ours = ours or (ttft, good)
            print(
                f"| {trace} | {policy} | {ttft:.4g} | {ours[0] / ttft:.3f} | {good:.2f} | {ours[1] - good:+.2f} "
                f"| {rest[0]:.2f} | {rest[1]:.2f} | {rest[2]:.0f} | {rest[3]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
