"""From one release to the next while the cluster serves: workers of both in one pool, and then only of the new one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from older_release import ROOT, older_worker, unpacked
from oracle import Oracle
from rack import MODEL, rack, until
from test_handoff_faults import prompt_of

from cluster.state import StateStore
from cluster.status import cluster_report
from protocol.codec import SPOKEN
from protocol.versions import UNTOLD
from router.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
CLIENTS = 3
FILE = """
name: rolling
model: {model}
served_name: tiny
engine: {{dtype: float32, num_blocks: 64, block_size: 8}}
router: {{port: 0, limits: {{worker_timeout: 20.0, step_age_bound: 60.0}}}}
scale: {{drain_timeout: 30.0}}
ray: {{cpus: 2, start_timeout: 300}}
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older") / "release"
    reason = unpacked(folder)
    if reason:
        pytest.skip(reason)
    return folder


async def test_workers_of_both_releases_serve_one_pool(older: Path, tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    engine = {"model": str(tiny_llama_dir), "dtype": "float32", "num_blocks": 65, "block_size": 4, "threads": 1}
    async with rack(tiny_llama_dir, router={"policy": "round_robin"}) as running:
        settings = {"model_name": MODEL, "routers": [running.service.hub_endpoint]}
        async with (
            older_worker(older, "prefill", {**settings, "name": "prefill-old"}, engine),
            older_worker(older, "decode", {**settings, "name": "decode-old"}, engine),
        ):
            health = running.service.health
            await until(lambda: (health().prefill_workers, health().decode_workers) == (2, 2), "all four workers", 90.0)
            told = {worker.peer.name: worker.speaks for worker in running.service._registry.workers()}
            assert told == {"prefill-0": SPOKEN, "decode-0": SPOKEN, "prefill-old": UNTOLD, "decode-old": UNTOLD}
            pairs = set()
            for number in range(12):
                prompt = prompt_of(tiny_oracle, 9 + number, number)
                answer = await running.ask(prompt, max_tokens=TOKENS)
                assert answer.token_ids == tiny_oracle.greedy(prompt, TOKENS)
                assert answer.report is not None
                assert answer.report.attempts == 1
                pairs.add((answer.report.prefill_worker, answer.report.decode_worker))
            assert len(pairs) == 4, "each with each"


class Release:
    """Where a machine has kvferry; commands, and the processes of a cluster, are of what is there when they begin."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, folder / "installed"

    def install(self, release: Path) -> None:
        """Replace it."""
        fresh = self._folder / "fresh"
        fresh.symlink_to(release, target_is_directory=True)
        fresh.rename(self._place)

    def kvferry(self, *words: str) -> str:
        """The command of that release; gives what it told of its steps."""
        environment = os.environ | {"PYTHONPATH": str(self._place), "KVFERRY_STATE_DIR": str(self._folder / "state")}
        command = [sys.executable, "-m", "cluster", *words]
        done = subprocess.run(
            command, env=environment, cwd=self._folder, capture_output=True, text=True, timeout=360, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


class Asking:
    """Clients that ask without a pause."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self.served, self.failed = [0] * CLIENTS, list[BaseException]()
        self._served_more = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the context ends, and each once more after what was done in it."""
        threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            self._each_was_served()
            yield
            self._each_was_served()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _each_was_served(self) -> None:
        before = list(self.served)
        with self._served_more:
            assert self._served_more.wait_for(
                lambda: self.failed or all(now > then for now, then in zip(self.served, before, strict=True)), 60
            )

    def _ask(self, index: int) -> None:
        texts = set()
        try:
            with Client(self._url, model="tiny", retries=0) as client:
                while not self._over.is_set():
                    answer = client.complete(f"ferry number {index}", max_tokens=24, temperature=0, ignore_eos=True)
                    texts.add(answer.text)
                    with self._served_more:
                        self.served[index] += 1
                        self._served_more.notify()
            assert len(texts) == 1, "one text, whichever release"
        except BaseException as error:
            self.failed.append(error)


def test_a_cluster_goes_from_one_release_to_the_next_and_no_request_fails(
    older: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.format(model=tiny_llama_dir))
    machine, store = Release(tmp_path), StateStore(tmp_path / "state")
    machine.install(older)
    machine.kvferry("up", str(file))
    try:
        asking = Asking(store.load("rolling").url)
        with asking.running():
            machine.install(ROOT)
            told = machine.kvferry("restart")
        assert not asking.failed
        # One of that release cannot share its port, and its successor would have to wait for its end.
        assert re.search(r"router-0 +stays: it is of a release that cannot share its port", told), told
        report = cluster_report("rolling", store=store)
        assert [actor.status.name for actor in report.actors] == ["router-0", "prefill-1", "decode-1"]
        # What the older release's processes say of themselves has no node.
        assert [bool(actor.status.node) for actor in report.actors] == [False, True, True]
        assert [actor.load.pool.leaked for actor in report.actors if actor.load is not None] == [0, 0]
        with Client(store.load("rolling").url, model="tiny", retries=0) as client:
            timings = client.complete("by tcp or by shm", max_tokens=4, timings=True).timings
        assert timings is not None
        assert timings.kv_bytes > 0
    finally:
        machine.kvferry("down", "rolling")
    assert store.names() == []
