"""A Ray cluster of several nodes on this machine, which grows when it is told to: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPEN = {"RAY_AUTH_MODE": "disabled"}
"""What a process needs to speak with it."""
LEAST = 80 << 20


class GrowingRay:
    """It, from outside.

    Attributes:
        address: of its control store.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._told()

    def grow(self) -> None:
        """One node more; returns when it has joined."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        self._told()

    def _told(self) -> str:
        assert self._process.stdout is not None
        word = self._process.stdout.readline().strip()
        assert word, "the Ray cluster has ended"
        return word


@contextmanager
def growing_ray() -> Iterator[GrowingRay]:
    """One of a single node at first; gone with the context."""
    environment = os.environ | OPEN | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    with process:
        try:
            yield GrowingRay(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def main() -> None:
    """Have a node, and one more for each line that comes."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": LEAST}
    # A short path: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        head = {**node, "include_dashboard": False, "temp_dir": folder}
        # Where Ray notes down which cluster came last, in a folder that it does not make.
        os.environ["RAY_TMPDIR"] = folder
        Path(folder, "ray").mkdir()
        there = Cluster(initialize_head=True, head_node_args=head)
        print(there.address, flush=True)
        for _ in sys.stdin:
            there.add_node(**node)
            print("grown", flush=True)
        there.shutdown()


if __name__ == "__main__":
    main()
