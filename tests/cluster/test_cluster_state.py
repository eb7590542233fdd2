from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.state import ClusterState, NodeState, ProcessMark, StateStore
from protocol.errors import ClusterError, ClusterExists, ClusterNotFound


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "state")


def test_a_record_comes_back_as_it_was_saved(store: StateStore) -> None:
    state = store.reserve("one")
    mark = ProcessMark.of(os.getpid())
    state = msgspec.structs.replace(
        state,
        node=NodeState(address="h:1", token="t", temp_dir="/tmp/x", daemon=mark),
        actors=("a", "b"),
        secret="s",
        ready=True,
    )
    store.save(state)
    assert store.load("one") == state
    assert isinstance(store.load("one"), ClusterState)


def test_a_name_is_claimed_once(store: StateStore) -> None:
    first = store.reserve("one")
    with pytest.raises(ClusterExists, match="kvferry down one"):
        store.reserve("one")
    assert store.load("one") == first
    store.remove("one")
    store.reserve("one")


def test_nothing_else_lies_in_the_folder_and_nobody_else_reads_it(store: StateStore) -> None:
    store.save(store.reserve("one"))
    with pytest.raises(ClusterExists):
        store.reserve("one")
    assert [file.name for file in store.folder.iterdir()] == ["one.json"]
    assert stat.S_IMODE(store.path("one").stat().st_mode) == 0o600


def test_an_unknown_name_is_answered_with_the_known_ones(store: StateStore) -> None:
    with pytest.raises(ClusterNotFound, match="none"):
        store.load("two")
    store.reserve("one")
    with pytest.raises(ClusterNotFound, match="one"):
        store.load("two")


def test_the_only_cluster_needs_no_name(store: StateStore) -> None:
    with pytest.raises(ClusterNotFound, match="no cluster is up"):
        store.only()
    store.reserve("one")
    assert store.only() == "one"
    store.reserve("two")
    with pytest.raises(ClusterNotFound, match="one, two"):
        store.only()


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 3}', b"\xff\xfe"])
def test_a_damaged_record_is_an_error(store: StateStore, content: bytes) -> None:
    store.reserve("one")
    store.path("one").write_bytes(content)
    with pytest.raises(ClusterError, match=r"one\.json"):
        store.load("one")


def test_the_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "elsewhere"))
    assert StateStore().folder == tmp_path / "elsewhere"
    monkeypatch.delenv("KVFERRY_STATE_DIR")
    assert StateStore().folder.name == "kvferry"


def test_a_mark_tells_a_process_from_its_successor() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = ProcessMark.of(child.pid)
    assert mark.alive()
    assert not ProcessMark(pid=mark.pid, created=mark.created - 60).alive()
    child.communicate(b"\n")
    assert not mark.alive()
