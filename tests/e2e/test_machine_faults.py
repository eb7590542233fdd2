"""Processes killed and cables pulled under load, on machines that ``ray up`` has joined; a quarter of an hour.

``pytest tests/e2e/test_machine_faults.py --machine-faults -s`` prints the table that stands in ``docs/faults.md``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from machines import Running
from oracle import Oracle
from ray_lab import ASIDE, CLUSTER_FILE, HEAD, RayLab, guide, ray_lab, reason_to_skip, until
from steady_load import WRONG, Script, SteadyLoad
from tokenizers import Tokenizer

from protocol.errors import KVFerryError
from router.client import Client, ClusterOverview

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]

CLUSTER = """
model: {model}
served_name: tiny
engine: {{dtype: float32, num_blocks: 256, block_size: 8, max_model_len: 256}}
prefill: {{replicas: 2, resources: {{prefill: 1}}}}
decode: {{replicas: 2, resources: {{decode: 1}}}}
router: {{host: 0.0.0.0, public: true}}
ray: {{address: auto, start_timeout: 200}}
"""
WORKERS = ("decode-0", "decode-1", "prefill-0", "prefill-1")
CLIENTS = 4
TOKENS = 32
LENGTHS = (1, 9, 40, 90)
LONGEST_STREAM = 60.0
"""Seconds that a stream may take; all but the head's own link have others to go on with."""
STEADY_SECONDS = 20.0
"""What is back must stay for so long: Ray may think of something to do about a machine when it comes back."""
CAPTION = (
    "| fault | right | errors | the longest stream | longest without an answer | all there again |\n"
    "|---|---|---|---|---|---|"
)


class Life(NamedTuple):
    """A process of the cluster, as ``kvferry status`` has it."""

    place: str
    pid: int
    incarnation: int


Lives = dict[str, Life]


class Scene:
    """The cluster on its machines, what is done to it, and how it is then."""

    def __init__(self, lab: RayLab, scripts: list[Script]) -> None:
        self.lab, self.scripts = lab, scripts
        self.rows: list[str] = []

    def overview(self) -> ClusterOverview | None:
        """What the router says; None where it does not answer."""
        with self.lab.lan.hosts[ASIDE].inside(), Client(self.lab.url, retries=0, timeout=2.0) as client:
            try:
                return client.cluster()
            except KVFerryError:
                return None

    def serving(self) -> dict[str, int]:
        """Incarnations of the workers that the router counts on."""
        overview = self.overview()
        workers = () if overview is None else overview.workers
        return {worker.name: worker.incarnation for worker in workers if worker.state == "live"}

    def lives(self) -> Lives:
        """Every process; empty while one is not ready, or the supervisor does not answer."""
        report = self.lab.status()
        if report["state"] != "ready":
            return {}
        places = {machine.address: name for name, machine in self.lab.machines.items()}
        actors = [actor["status"] for actor in report["actors"]]
        return {each["name"]: Life(places[each["host"]], each["pid"], each["incarnation"]) for each in actors}

    def at_rest(self) -> bool:
        """Whether nothing is asked, nothing held, and nothing lost in any pool."""
        overview = self.overview()
        if overview is None or overview.live_requests:
            return False
        pools = [worker.load.pool for worker in overview.workers if worker.state == "live"]
        quiet = all(pool.free + pool.cached + pool.reserved == pool.total for pool in pools)
        return quiet and len(pools) == len(WORKERS) and not any(worker.leaked_blocks for worker in overview.workers)

    def kill(self, place: str, meant: Callable[[Running], bool]) -> None:
        """``kill -9`` of the one process of a machine that is meant."""
        (victim,) = [each.pid for each in self.lab.machines[place].processes() if meant(each)]
        os.kill(victim, signal.SIGKILL)

    def kill_member(self, life: Life) -> None:
        """``kill -9`` of a process of the cluster."""
        self.kill(life.place, lambda process: process.inside == life.pid)

    def unplug(self, place: str, seconds: float) -> None:
        """Pull a machine's cable for so long."""
        with self.lab.lan.unplugged(place):
            ends = time.monotonic() + seconds
            until(lambda: time.monotonic() > ends, "the end of the cut")


def kill_decode(scene: Scene, lives: Lives) -> set[str]:
    scene.kill_member(lives["decode-0"])
    return {"decode-0"}


def kill_prefill(scene: Scene, lives: Lives) -> set[str]:
    scene.kill_member(lives["prefill-1"])
    return {"prefill-1"}


def kill_router(scene: Scene, lives: Lives) -> set[str]:
    scene.kill_member(lives["router-0"])
    return {"router-0"}


def kill_supervisor(scene: Scene, lives: Lives) -> set[str]:
    scene.kill(HEAD, lambda process: process.command.startswith("ray::Supervisor"))
    return set()


def kill_supervisor_and_decode(scene: Scene, lives: Lives) -> set[str]:
    kill_supervisor(scene, lives)
    return kill_decode(scene, lives)


def kill_raylet(scene: Scene, lives: Lives) -> set[str]:
    place = lives["decode-0"].place
    scene.kill(place, lambda process: process.command.split()[0].endswith("/raylet"))
    return {name for name, life in lives.items() if life.place == place}


def cut_worker(seconds: float) -> Callable[[Scene, Lives], None]:
    return lambda scene, lives: scene.unplug(lives["decode-0"].place, seconds)


def cut_head(scene: Scene, lives: Lives) -> None:
    scene.unplug(HEAD, 5.0)


NO_ERROR: frozenset[str] = frozenset()
LOST_ROUTER = frozenset({"connection_failed", "no_worker_available"})
FAULTS: dict[str, tuple[Callable[[Scene, Lives], set[str] | None], frozenset[str]]] = {
    "`kill -9` of a decode worker": (kill_decode, NO_ERROR),
    "`kill -9` of a prefill worker": (kill_prefill, NO_ERROR),
    "`kill -9` of the router": (kill_router, LOST_ROUTER),
    "`kill -9` of the supervisor": (kill_supervisor, NO_ERROR),
    "`kill -9` of the supervisor and a decode worker": (kill_supervisor_and_decode, NO_ERROR),
    "a worker's machine cut off for 5 s": (cut_worker(5.0), NO_ERROR),
    "a worker's machine cut off for 60 s": (cut_worker(60.0), NO_ERROR),
    "`kill -9` of a raylet": (kill_raylet, NO_ERROR),
    "the head cut off for 5 s": (cut_head, LOST_ROUTER),
}
"""What each does; it gives the processes that must have new lives, or None where that is Ray's to decide."""


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    if not request.config.getoption("machine_faults"):
        pytest.skip("takes a quarter of an hour: --machine-faults")
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    oracle, rng = Oracle(tiny_llama_dir), random.Random(5)
    tokenizer = Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))
    prompts = [tuple(rng.randrange(3, oracle.vocab_size) for _ in range(length)) for length in LENGTHS]
    scripts = [Script(prompt, tokenizer.decode(oracle.greedy(prompt, TOKENS)), TOKENS) for prompt in prompts]
    orders, _ = guide()
    names = [order.line.split(" cluster.yaml")[0] for order in orders]
    up, down = names.index("kvferry up"), names.index("kvferry down")
    with ray_lab(tmp_path_factory.mktemp("lab"), tiny_llama_dir.parent) as lab:
        # One of each role on each machine, so that none takes all of a role with it.
        lab.write_ray_file("""--resources='{"prefill": 1, "decode": 1}'""")
        lab.write(CLUSTER_FILE, CLUSTER.format(model=tiny_llama_dir))
        for order in orders[: up + 1]:
            lab.obey(order)
        scene = Scene(lab, scripts)
        yield scene
        print("", CAPTION, *scene.rows, sep="\n")
        for order in orders[down:]:
            lab.obey(order)
        until(lambda: not lab.remains(), "the end of all processes", 20.0)


@pytest.mark.parametrize("name", FAULTS)
def test_under_load_it_comes_back_by_itself(scene: Scene, name: str) -> None:
    strike, expected_errors = FAULTS[name]
    before: Lives = {}

    def everything_serves() -> bool:
        before.update(scene.lives())
        return bool(before) and scene.serving().keys() >= {*WORKERS}

    until(everything_serves, "a whole cluster")
    load = SteadyLoad(scene.lab.lan.hosts[ASIDE], scene.lab.url, "tiny", scene.scripts, CLIENTS)
    with load.running():
        begun = time.monotonic()
        until(lambda: load.serves_all(begun), "answers to all clients")
        struck = time.monotonic()
        reborn = strike(scene, before)
        over = time.monotonic()

        fresh = (reborn or set()) & {*WORKERS}
        whole_since: list[float] = []

        def stays_whole() -> bool:
            serving = scene.serving()
            whole = serving.keys() >= {*WORKERS} and all(serving[each] > before[each].incarnation for each in fresh)
            # The supervisor does not show in what the router says.
            if not whole or (reborn == set() and not whole_since and not scene.lives()):
                whole_since.clear()
                return False
            whole_since.append(time.monotonic())
            return whole_since[-1] - whole_since[0] >= STEADY_SECONDS

        until(stays_whole, "every worker")
        until(lambda: load.serves_all(whole_since[-1]), "answers to all clients")
    account = load.account(struck)
    errors = {how: count for how, count in account.ends.items() if how != "right"}
    told = ", ".join(f"{count} `{how}`" for how, count in sorted(errors.items())) or "none"
    scene.rows.append(
        f"| {name} | {account.ends['right']} | {told} | {account.longest:.1f} s | {account.silence:.1f} s "
        f"| {whole_since[0] - over:.1f} s |"
    )
    print(scene.rows[-1])
    assert WRONG not in errors
    assert errors.keys() <= expected_errors
    assert account.longest < LONGEST_STREAM
    until(scene.at_rest, "pools in which nothing is held", 120.0)
    after: Lives = {}
    until(lambda: after.update(scene.lives()) or after, "a whole cluster")
    if reborn is not None:
        assert {each for each in after if after[each].incarnation > before[each].incarnation} == reborn
