from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from living import runs

from cluster.config import RaySection
from cluster.processes import NODE_VARIABLE, node_processes
from cluster.ray_node import connect, node_alive, node_pids, start_node, stop_node
from cluster.state import NodeState
from protocol.errors import ClusterError, StartFailed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def nodes() -> Iterator[list[NodeState]]:
    started: list[NodeState] = []
    yield started
    for node in started:
        stop_node(node)


@pytest.fixture(scope="module")
def bystander() -> Iterator[NodeState]:
    node = start_node(RaySection(cpus=2), lambda _: None, timeout=300.0)
    yield node
    stop_node(node)
    assert not node_processes(node.temp_dir)


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("the condition never came true")


def test_a_node_ends_without_a_trace_and_its_neighbour_lives_on(bystander: NodeState, nodes: list[NodeState]) -> None:
    begun: list[NodeState] = []
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", NODE_VARIABLE)}
    handler = signal.getsignal(signal.SIGTERM)
    node = start_node(RaySection(cpus=1), begun.append, timeout=300.0)
    nodes.append(node)
    assert [one.daemon for one in begun] == [node.daemon]
    assert not {*node_pids(node)} & {*node_pids(bystander)}
    for one, cpus in ((node, 1), (bystander, 2)):
        # One process speaks to both, one after the other, each with its own token.
        with connect(one, "test") as ray:
            assert ray.cluster_resources()["CPU"] == cpus
    pids = node_pids(node)
    assert len(pids) > 4
    assert stat.S_IMODE(Path(node.temp_dir).stat().st_mode) == 0o700
    stop_node(node)
    assert not [pid for pid in pids if runs(pid)]
    assert not Path(node.temp_dir).exists()
    assert not node_alive(node)
    assert node_alive(bystander)
    with connect(bystander, "test") as ray:
        assert ray.get(ray.remote(lambda: os.getpid()).remote()) in node_pids(bystander)
    stop_node(node)
    assert before == {name: os.environ.get(name) for name in before}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_stranger_without_the_token_is_refused(bystander: NodeState) -> None:
    program = (
        "import sys; from cluster.ray_node import connect; from cluster.state import NodeState\n"
        "with connect(NodeState(address=sys.argv[1], token=sys.argv[2]), 'test') as ray: print('inside')"
    )
    for token, inside in ((bystander.token, True), ("0" * 64, False)):
        done = subprocess.run(
            [sys.executable, "-c", program, bystander.address, token],
            env=os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "1"},
            capture_output=True,
            text=True,
        )
        assert ("inside" in done.stdout, done.returncode == 0) == (inside, inside)
        assert inside or "token" in done.stderr


@pytest.mark.parametrize("there", [True, False], ids=["token", "none"])
def test_a_cluster_is_joined_with_the_token_of_this_home(bystander: NodeState, tmp_path: Path, there: bool) -> None:
    program = (
        "import sys; from cluster.ray_node import connect; from cluster.state import NodeState\n"
        "with connect(NodeState(address=sys.argv[1]), 'test') as ray: print('inside')"
    )
    if there:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(bystander.token)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program, bystander.address],
        env=environment | {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "1"},
        capture_output=True,
        text=True,
    )
    assert ("inside" in done.stdout, done.returncode == 0) == (there, there)
    assert there or "~/.ray/auth_token" in done.stderr


def test_what_a_killed_daemon_leaves_is_found_and_removed(bystander: NodeState) -> None:
    """The last that is done to the bystander."""
    assert bystander.daemon is not None
    processes = node_processes(bystander.temp_dir)
    (raylet,) = [process for process in processes if process.name() == "raylet"]
    os.kill(bystander.daemon.pid, signal.SIGKILL)
    # With it goes what has started Ray's agents, which live on for a minute, and do not say any more whose they are.
    until(lambda: not node_alive(bystander) and not runs(raylet.pid))
    stop_node(bystander)
    assert [process.pid for process in processes if runs(process.pid)] == []
    assert not node_processes(bystander.temp_dir)
    assert not Path(bystander.temp_dir).exists()


def test_a_node_that_is_not_ready_in_time_leaves_nothing() -> None:
    begun: list[NodeState] = []
    with pytest.raises(StartFailed, match="not ready"):
        start_node(RaySection(cpus=1), begun.append, timeout=0.05)
    assert not node_alive(begun[0])
    assert not node_processes(begun[0].temp_dir)
    assert not Path(begun[0].temp_dir).exists()


def test_an_address_where_nobody_listens_is_a_cluster_error() -> None:
    joined = NodeState(address="nonsense")
    with pytest.raises(ClusterError, match="nonsense"), connect(joined, "test"):
        pass
