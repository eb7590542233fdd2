from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from living import runs
from pace import allowed
from typer.testing import CliRunner

from cluster.bring_up import down, up
from cluster.cli import app
from cluster.config import ClusterConfig, DecodeSection, EngineSection, RaySection, RouterSection
from cluster.processes import node_processes
from cluster.progress import Step
from cluster.ray_node import connect, node_pids
from cluster.state import ClusterState, NodeState, StateStore
from cluster.status import ActorReport, ClusterReport, cluster_report
from protocol.errors import ClusterError, ClusterExists, ClusterNotFound, KVFerryError, StartFailed
from router.client import Client, Completion

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE = EngineSection(dtype="float32", num_blocks=64, block_size=8)


def tiny(model: Path, name: str, **changes: object) -> ClusterConfig:
    config = ClusterConfig(
        name=name,
        model=str(model),
        served_name="tiny",
        engine=ENGINE,
        router=RouterSection(port=0),
        ray=RaySection(cpus=2, start_timeout=300.0),
    )
    return msgspec.structs.replace(config, **changes)


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    pause = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("the condition never came true")


class World:
    """One cluster that several tests look at."""

    def __init__(self, state: ClusterState, store: StateStore, steps: list[Step]) -> None:
        self.state, self.store, self.steps = state, store, steps

    def report(self) -> ClusterReport:
        return cluster_report(self.state.name, store=self.store)

    def actor(self, name: str) -> ActorReport:
        return next(actor for actor in self.report().actors if actor.status.name == name)

    def pids(self) -> dict[str, int]:
        return {actor.status.name: actor.status.pid for actor in self.report().actors}

    def ask(self) -> Completion:
        with Client(self.state.url, model="tiny", retries=0) as client:
            return client.complete("ferry across the water", max_tokens=8, temperature=0, ignore_eos=True, timings=True)

    def answer(self) -> str:
        done = self.ask()
        assert done.timings is not None
        assert done.timings.kv_bytes > 0
        return done.text

    def answers(self) -> bool:
        """Whether prefill and decode answer, apart: a router may know its decode worker first, and ask that alone."""
        try:
            done = self.ask()
        except KVFerryError:
            return False
        return done.timings is not None and done.timings.kv_bytes > 0


@pytest.fixture(scope="module")
def world(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = StateStore(tmp_path_factory.mktemp("state"))
    steps: list[Step] = []
    state = up(tiny(tiny_llama_dir, "world"), steps.append, store=store)
    assert state.node is not None
    pids = node_pids(state.node)
    yield World(state, store, steps)
    down("world", store=store)
    assert not [pid for pid in pids if runs(pid)]
    assert not node_processes(state.node.temp_dir)
    assert not Path(state.node.temp_dir).exists()
    assert store.names() == []
    with pytest.raises(ClusterNotFound):
        down("world", store=store)


def test_every_step_was_told_and_the_cluster_answers(world: World) -> None:
    told = {(step.actor, step.stage) for step in world.steps}
    assert {("ray", "starting"), ("ray", "ready"), ("cluster", "ready")} <= told
    for name in ("router-0", "prefill-0", "decode-0"):
        assert {(name, "placing"), (name, "ready")} <= told
    assert world.answer()


def test_the_start_is_told_by_phase(world: World) -> None:
    report = world.report()
    phases = [phase.name for phase in report.phases]
    assert phases == ["checks", "Ray's node", "connection to it", "processes", "router", "supervisor"]
    assert min(phase.seconds for phase in report.phases) >= 0.0
    of_workers = ["process", "thread", "imports", "kernels", "weights", "packing", "pool", "warm-up", "sockets"]
    for name in ("prefill-0", "decode-0"):
        assert [phase.name for phase in world.actor(name).status.phases] == of_workers
    ready = {step.actor: step.detail for step in world.steps if step.stage == "ready"}
    assert "warm-up" in ready["decode-0"]
    assert "Ray's node" in ready["cluster"]


def test_the_report_tells_of_every_process(world: World) -> None:
    report = world.report()
    assert (report.state, report.model, report.url) == ("ready", "tiny", world.state.url)
    assert [actor.status.name for actor in report.actors] == ["router-0", "prefill-0", "decode-0"]
    assert [actor.status.state for actor in report.actors] == ["ready"] * 3
    assert [actor.load is None for actor in report.actors] == [True, False, False]
    assert world.state.node is not None
    assert {actor.status.pid for actor in report.actors} <= {*node_pids(world.state.node)}
    for actor in report.actors[1:]:
        assert actor.load is not None
        assert actor.load.pool.total == 64
        assert actor.load.pool.leaked == 0


def test_the_command_shows_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.answer()
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(world.store.folder))
    shown = CliRunner().invoke(app, ["status", "--json"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert msgspec.json.decode(shown.stdout, type=ClusterReport).state == "ready"
    table = CliRunner().invoke(app, ["status", "world"], catch_exceptions=False)
    assert f"tiny at {world.state.url}/v1, KV by shm\n" in table.stdout
    row = next(line.split() for line in table.stdout.splitlines() if line.startswith("prefill-0"))
    assert row[1] == "prefill"
    assert row[3:5] == ["ready", "63/63"]


def test_a_second_cluster_of_the_name_is_refused_and_the_first_lives_on(world: World, tiny_llama_dir: Path) -> None:
    with pytest.raises(ClusterExists, match="kvferry down world"):
        up(tiny(tiny_llama_dir, "world"), store=world.store)
    assert world.answer()


@pytest.mark.parametrize("names", [("decode-0", "prefill-0"), ("router-0",)])
def test_killed_processes_come_back_by_themselves(world: World, names: tuple[str, ...]) -> None:
    expected = world.answer()
    before = world.pids()
    for name in names:
        os.kill(before[name], signal.SIGKILL)
    for name in names:
        until(lambda name=name: world.actor(name).status.state == "ready" and world.pids()[name] != before[name])
        assert world.actor(name).status.restarted
    until(world.answers)
    assert world.answer() == expected
    after = world.pids()
    assert {name for name in before if after[name] != before[name]} == {*names}


@pytest.fixture
def address(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A running Ray cluster to join, which is left as it was found."""
    node = world.state.node
    assert node is not None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", node.token)

    def actors() -> set[str]:
        with connect(node, "test") as ray:
            return {f"{one['namespace']}/{one['name']}" for one in ray.util.list_named_actors(all_namespaces=True)}

    before = actors()
    yield node.address
    assert actors() == before
    assert world.answer()


def test_a_joined_ray_cluster_serves_and_is_left_as_it_was(address: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    steps: list[Step] = []
    state = up(tiny(tiny_llama_dir, "guest", ray=RaySection(address=address)), steps.append, store=store)
    assert [step.stage for step in steps if step.actor == "ray"] == [f"connecting to {address}", "ready"]
    guest = World(state, store, [])
    pids = [actor.status.pid for actor in guest.report().actors]
    assert len(pids) == 3
    assert not state.hub.startswith("tcp://127.")
    assert guest.answer()
    down("guest", store=store)
    until(lambda: not any(runs(pid) for pid in pids))
    assert store.names() == []


def test_a_cluster_whose_ray_has_begun_anew_is_told_with_the_way_out(address: str, tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    former = ("router-0", "prefill-0", "decode-0")
    node = NodeState(address=address)
    store.save(msgspec.structs.replace(store.reserve("former"), node=node, actors=former, ready=True))
    report = cluster_report("former", store=store)
    assert (report.state, report.actors) == ("dead", ())
    assert "kvferry down former" in report.hint
    down("former", store=store)
    assert store.names() == []


def test_a_cluster_whose_ray_cannot_be_reached_is_forgotten_when_that_is_said(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        node = NodeState(address=f"127.0.0.1:{gone.getsockname()[1]}")
    store.save(msgspec.structs.replace(store.reserve("lost"), node=node, actors=("router-0",), ready=True))
    with pytest.raises(ClusterError, match=f"no Ray answers at {node.address}: .*: kvferry down lost --forget"):
        down("lost", store=store)
    with pytest.raises(ClusterError, match="no Ray answers"):
        cluster_report("lost", store=store)
    assert store.names() == ["lost"]
    steps: list[Step] = []
    down("lost", steps.append, store=store, forget=True)
    assert "forgotten, not stopped: no Ray answers" in steps[0].stage
    assert store.names() == []


def test_a_worker_that_cannot_load_is_named_with_its_reason(address: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama_dir, broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    store = StateStore(tmp_path / "state")
    with pytest.raises(StartFailed, match=r"(prefill|decode)-0 failed to start: .*safetensors"):
        up(tiny(broken, "broken", ray=RaySection(address=address)), store=store)
    assert store.names() == []


def test_what_cannot_be_placed_is_named_with_what_is_left(address: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    config = tiny(
        tiny_llama_dir,
        "greedy",
        decode=DecodeSection(cpus=64),
        ray=RaySection(address=address, start_timeout=allowed(5.0)),
    )
    steps: list[Step] = []
    with pytest.raises(StartFailed, match=r"decode-0 \(placing\).*; decode-0 wants CPU 64; Ray has left: CPU 2"):
        up(config, steps.append, store=store)
    # It has no process that could stop in good order, and nobody waits for one.
    assert "decode-0" not in {step.actor for step in steps if step.stage == "stopping"}
    assert store.names() == []


def test_a_taken_port_is_named_before_anything_starts(tiny_llama_dir: Path, tmp_path: Path) -> None:
    steps: list[Step] = []
    store = StateStore(tmp_path / "state")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=str(port)):
            up(tiny(tiny_llama_dir, "taken", router=RouterSection(port=port)), steps.append, store=store)
    assert "ray" not in {step.actor for step in steps}
    assert store.names() == []


def test_what_a_dead_starter_left_is_cleared_by_the_next_up(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(f"model: {tiny_llama_dir}\nname: left\nrouter: {{port: 0}}\nengine: {{num_blocks: 64}}\n")
    store = StateStore(tmp_path / "state")
    command = [sys.executable, "-m", "cluster", "up", str(file)]
    environment = os.environ | {"KVFERRY_STATE_DIR": str(store.folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as starter:
        until(lambda: store.names() == ["left"] and store.load("left").node is not None)
        starter.kill()
    left = store.load("left")
    assert not left.ready
    assert left.node is not None
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as starter:
        until(lambda: store.names() == ["left"] and store.load("left").created != left.created)
        until(lambda: store.load("left").node is not None)
        assert not node_processes(left.node.temp_dir)
        again = store.load("left").node
        starter.terminate()
        starter.communicate()
    assert starter.returncode == 128 + signal.SIGTERM
    assert again is not None
    assert not node_processes(again.temp_dir)
    assert not Path(again.temp_dir).exists()
    assert store.names() == []
