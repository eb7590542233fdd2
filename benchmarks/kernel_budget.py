"""Compile every variant of the Triton kernels for every architecture, and print what each uses against its budget.

Needs no GPU; some minutes of one core, less when repeated, for triton keeps what it has compiled.
Usage: ``python benchmarks/kernel_budget.py [--arch sm_80,sm_90,gfx942] [--kernel paged_prefill]``. The exit status is 1
where something is over its budget.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import track

from engine.kernels.aot import TARGETS, budget, compile_variant, variants


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(TARGETS), help="parted by commas")
    parser.add_argument("--kernel", default="", help="only those with this in their name")
    options = parser.parse_args()

    wanted = [
        (arch, variant)
        for arch in options.arch.split(",")
        for variant in variants(arch)
        if options.kernel in variant.name
    ]
    limits = budget()
    failed = False
    bar = Console(stderr=True)
    print("| chip | kernel | registers | shared bytes | |\n|---|---|---|---|---|")
    for arch, variant in track(wanted, console=bar, disable=not bar.is_terminal):
        limit = limits[arch][variant.family]
        used = compile_variant(variant, arch)
        over = used.over(limit)
        failed = failed or bool(over)
        registers = f"{used.registers} of {limit.registers}"
        print(f"| {arch} | {variant.name} | {registers} | {used.shared_bytes} of {limit.shared_bytes} | {over or ''} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
