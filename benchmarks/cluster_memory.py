"""What a cluster on this machine takes: memory and CPU of each of its processes, Ray's among them.

``kvferry up FILE``, then ``python benchmarks/cluster_memory.py [NAME]``. Memory is the proportional set size: a page
that several processes share counts in parts that add up to one. CPU is that since each process began, so shortly after
``up`` it is what coming up has cost.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from cluster.ray_node import node_pids
from cluster.state import StateStore
from protocol.errors import ClusterNotFound

OURS = ("RouterActor", "WorkerActor", "Supervisor")


@dataclass(slots=True)
class Taken:
    """What processes of one kind take."""

    processes: int = 0
    memory: int = 0
    seconds: float = 0.0

    def add(self, other: Taken) -> None:
        """Count others too."""
        self.processes += other.processes
        self.memory += other.memory
        self.seconds += other.seconds


def kind_of(process: psutil.Process) -> str:
    """``WorkerActor`` and its like for an actor, else the program's name with "Ray" before it."""
    words = process.cmdline()
    title = words[0].rpartition("::")[2].split()[0]
    if title in OURS:
        return title
    programs = [word for word in words if word.endswith(".py") or word.startswith("cluster.")]
    name = title if "::" in words[0] or not programs else programs[0]
    return f"Ray: {name.rpartition('/')[2]}"


def taken(pids: list[int]) -> dict[str, Taken]:
    """By kind, the largest first."""
    found: dict[str, Taken] = defaultdict(Taken)
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[kind_of(process)].add(Taken(1, process.memory_full_info().pss, times.user + times.system))
        except psutil.NoSuchProcess:
            continue
    return dict(sorted(found.items(), key=lambda item: -item[1].memory))


def main() -> None:
    """See the module."""
    store = StateStore()
    name = sys.argv[1] if len(sys.argv) > 1 else store.only()
    node = store.load(name).node
    if node is None or not node.owned:
        raise ClusterNotFound(f"cluster {name!r} runs on no Ray node of its own on this machine")
    table = Table("processes", "count", "PSS, MiB", "CPU, s", title=f"cluster {name!r}")
    sums = {"ours": Taken(), "Ray's": Taken(), "all": Taken()}
    for kind, each in taken(node_pids(node)).items():
        row(table, kind, each)
        sums["ours" if kind in OURS else "Ray's"].add(each)
        sums["all"].add(each)
    table.add_section()
    for word, each in sums.items():
        row(table, word, each)
    Console().print(table)


def row(table: Table, word: str, each: Taken) -> None:
    """Add a row."""
    table.add_row(word, str(each.processes), f"{each.memory / 2**20:.0f}", f"{each.seconds:.1f}")


if __name__ == "__main__":
    main()
