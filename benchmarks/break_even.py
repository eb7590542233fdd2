"""Where disaggregation pays, and whether ``local_prefill: auto`` finds out: a grid in the simulator.

    python benchmarks/break_even.py [--profile h100-llama8b] [--workers 2P2D] [--load 0.5] [--requests 400] [--untold]

For each length of prompt and output and each link the mean time of a whole request, with all prompts on prefill workers
(``never``), all on decode workers (``always``), and each where the router says (``auto``). The last column is how much
worse that is than the better of the two; below the table stands the worst. Load is of what both roles could do.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.registry import stream_trace
from cluster.simulation.profile import profile_of
from cluster.simulation.rate import SAMPLE, capacity
from cluster.simulation.scenario import Scenario, parse_workers
from cluster.simulation.simulation import simulate


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100-llama8b")
    parser.add_argument("--workers", default="2P2D")
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--trace", default="poisson")
    parser.add_argument("--prompts", default="64,512,2048,8192")
    parser.add_argument("--outputs", default="16,128,512")
    parser.add_argument("--links", default="1,10,100", help="Gbit/s")
    parser.add_argument("--untold", action="store_true", help="workers do not tell how fast their links are")
    asked = parser.parse_args()
    prefill, decode = parse_workers(asked.workers)
    scene = Scenario(profile=profile_of(asked.profile), prefill=prefill, decode=decode)
    print("| prompt | output | Gbit/s | apart ms | on decode ms | auto ms | prompts on decode | worse by |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for prompt in map(int, asked.prompts.split(",")):
        for output in map(int, asked.outputs.split(",")):
            options = TraceOptions(
                name=asked.trace, requests=asked.requests, rate=1.0, prompt_tokens=prompt, output_tokens=output
            )
            sample = stream_trace(replace(options, requests=min(asked.requests, SAMPLE)))
            options = replace(options, rate=asked.load * capacity(scene, sample))
            for link in map(float, asked.links.split(",")):
                linked = replace(scene, link=link * 1e9 / 8, told_link=0.0 if asked.untold else None)
                apart, alone, chosen = (
                    simulate(replace(linked, local_prefill=mode), stream_trace(options), asked.requests)
                    for mode in ("never", "always", "auto")
                )
                off = chosen.e2e.mean / min(apart.e2e.mean, alone.e2e.mean) - 1.0
                worst = max(worst, off)
                times = " | ".join(f"{1e3 * each.e2e.mean:.4g}" for each in (apart, alone, chosen))
                print(
                    f"| {prompt} | {output} | {link:g} | {times} | {100 * chosen.local:.0f} % | {100 * off:+.1f} % |",
                    flush=True,
                )
    print(f"\nworst: {100 * worst:+.1f} %")


if __name__ == "__main__":
    main()
