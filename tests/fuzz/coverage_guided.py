"""Fuzzes one decoder, or all of them in turn, guided by what of our code its input reaches. Not a part of the suite::

    pip install atheris
    python tests/fuzz/coverage_guided.py --seconds 60          # a minute for each
    python tests/fuzz/coverage_guided.py --seconds 600 chat messages

Each decoder has a process of its own, bounded in memory. An input that makes one raise what its callers do not expect,
or takes ten seconds, is kept in the current folder (``crash-...``), and the exit code is not 0. Atheris has wheels for
CPython 3.11 to 3.13 on Linux.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY_MB = 1024


def fuzz(name: str, options: list[str]) -> None:
    """Fuzz one decoder in this process; ends it."""
    import atheris

    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    with atheris.instrument_imports(include=["protocol", "kv_transfer", "router"]):
        from fuzzed_decoders import DECODERS, refused
    decoder = DECODERS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, example in enumerate(decoder.examples):
            (Path(corpus) / str(number)).write_bytes(example)
        atheris.Setup([sys.argv[0], *options, corpus], lambda data: refused(decoder, data))
        atheris.Fuzz()


def main() -> int:
    """Run the decoders that were asked for; the number of those at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", help="by default all")
    parser.add_argument("--seconds", type=int, default=60, help="for each (default: 60)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        options = [f"-max_total_time={asked.seconds}", f"-rss_limit_mb={MEMORY_MB}", "-timeout=10", "-verbosity=1"]
        fuzz(asked.decoders[0], options)
        return 0
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    from fuzzed_decoders import DECODERS

    faults = 0
    for name in asked.decoders or DECODERS:
        command = [sys.executable, __file__, "--alone", "--seconds", str(asked.seconds), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if line.startswith(("Done ", "#")) or "Uncaught" in line]
        print(f"{name:16} {'ok' if done.returncode == 0 else 'FAULT'}  {lines[-1] if lines else ''}", flush=True)
        if done.returncode:
            print(done.stderr)
        faults += done.returncode != 0
    return faults


if __name__ == "__main__":
    sys.exit(main())
