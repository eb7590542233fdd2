"""A whole cluster as a user has it: the ``kvferry`` command, real Ray, one process per worker, the shipped model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from ucx_segments import shared_files

from cluster.state import ClusterState, StateStore

CLUSTER = """
name: {name}
model: {model}
served_name: smollm2-135m
engine: {{dtype: float32, block_size: 16, num_blocks: 256, max_batch_tokens: 64, max_model_len: 1024}}
prefill: {{replicas: {prefill}, threads: 1}}
decode: {{replicas: {decode}, threads: 1}}
router: {{port: 0}}
ray: {{start_timeout: 400}}
"""
BLOCK = 16
CHUNK = 64
SAMPLE = re.compile(r"^kvferry_pool_blocks\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


def run(*arguments: str, folder: Path, timeout: float = 450.0) -> subprocess.CompletedProcess[str]:
    """The ``kvferry`` command, in a process of its own."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("kvferry")), *arguments],
        env=os.environ | {"KVFERRY_STATE_DIR": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition, and fail with its name when it does not come."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not come in {seconds} s"
        time.sleep(0.05)


@dataclass
class Running:
    """A cluster that is up."""

    state: ClusterState
    folder: Path

    @property
    def url(self) -> str:
        return self.state.url

    def workers(self) -> dict[str, dict[str, object]]:
        """What the router knows of each live worker, by name."""
        found = httpx.get(f"{self.url}/cluster", trust_env=False).json()["workers"]
        return {worker["name"]: worker for worker in found if worker["state"] == "live"}

    def pools(self) -> dict[str, Counter[str]]:
        """Blocks by state for each worker, as Prometheus sees them."""
        pools: dict[str, Counter[str]] = {}
        for match in SAMPLE.finditer(httpx.get(f"{self.url}/metrics", trust_env=False).text):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
            pools.setdefault(labels["worker"], Counter())[labels["state"]] = int(float(match["value"]))
        return pools

    def at_baseline(self) -> bool:
        """Whether every block of every pool is free, cached or reserved."""
        pools = self.pools()
        return bool(pools) and all(
            pool["free"] + pool["cached"] + pool["reserved"] == pool["total"]
            and not pool["active"] + pool["exported"] + pool["importing"] + pool["draining"]
            for pool in pools.values()
        )

    def shipped(self) -> tuple[int, int]:
        """Blocks and bytes that prefill workers have shipped."""
        loads = [worker["load"] for worker in self.workers().values() if worker["role"] == "prefill"]
        return sum(load["kv_blocks"] for load in loads), sum(load["kv_bytes"] for load in loads)  # type: ignore[index]

    def settle(self) -> None:
        """Wait until every pool is at its baseline."""
        until(self.at_baseline, "the baseline of every pool", 30.0)


@contextmanager
def cluster(folder: Path, model: Path, *, prefill: int, decode: int) -> Iterator[Running]:
    """Bring a cluster up and down by command, and check that nothing of it is left."""
    name = f"e2e-{os.getpid()}"
    file = folder / "cluster.yaml"
    file.write_text(CLUSTER.format(name=name, model=model, prefill=prefill, decode=decode))
    before = shared_files()
    begun = run("up", str(file), folder=folder)
    assert begun.returncode == 0, begun.stderr
    state = StateStore(folder).load(name)
    assert state.node is not None
    try:
        yield Running(state, folder)
    finally:
        ended = run("down", name, folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert StateStore(folder).names() == []
    assert not Path(state.node.temp_dir).exists()
    assert shared_files() <= before
    left = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _mentions(pid, state.node.temp_dir)]
    assert not left, f"processes are left: {left}"


def _mentions(process: Path, folder: str) -> bool:
    try:
        return folder.encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def status_json(running: Running) -> dict[str, object]:
    """What ``kvferry status --json`` prints."""
    shown = run("status", "--json", folder=running.folder)
    assert shown.returncode == 0, shown.stderr
    answer: dict[str, object] = msgspec.json.decode(shown.stdout)
    return answer
