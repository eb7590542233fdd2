from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from refusals import Refused
from typer.testing import CliRunner

from cluster.cli import app
from cluster.state import NodeState, ProcessMark, StateStore
from protocol.errors import ConfigError
from router.front.keys import hash_of, read_keys

COMMANDS = (
    *("up", "status", "scale", "drain", "restart", "logs", "down", "complete", "chat", "demo", "doctor"),
    *("config", "model", "bench", "key", "explain", "top", "plan", "version"),
)


def kvferry(*arguments: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        capture_output=True,
        text=True,
        env={"KVFERRY_STATE_DIR": str(state), "PATH": "/usr/bin:/bin", "HOME": str(state)},
    )


@pytest.fixture
def here(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path))
    return refused


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_names_what_there_is(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout
    if not command:
        assert all(name in shown.stdout for name in COMMANDS)


def test_version_is_the_installed_one() -> None:
    for asked in ("version", "--version"):
        assert CliRunner().invoke(app, [asked]).stdout == f"kvferry {version('kvferry')}\n"


def test_the_command_starts_without_the_heavy_packages() -> None:
    program = (
        "import sys, cluster.cli; print([m for m in ('torch', 'ray', 'transformers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status",), "kvferry top URL"),
        (("down", "nobody"), "no cluster 'nobody' is up"),
        (("scale", "prefill=2", "--cluster", "nobody"), "no cluster 'nobody' is up"),
        (("scale", "prefill"), "no cluster is up"),
        (("drain", "prefill-0"), "no cluster is up"),
        (("restart", "none.yaml"), "cannot read none.yaml"),
        (("logs", "router-0"), "no cluster is up"),
        (("up", "none.yaml"), "cannot read none.yaml"),
        (("complete", "hello", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("chat", "hello", "--url", "nonsense"), "nonsense"),
        (("chat", " ", "--url", "http://127.0.0.1:9"), "the message is empty"),
        (("complete", "hello"), "no cluster is up here"),
        (("explain", "r", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("top", "http://127.0.0.1:9", "--once"), "127.0.0.1:9"),
    ],
)
def test_an_error_is_one_line_and_a_status(arguments: tuple[str, ...], said: str, here: Refused) -> None:
    done = here(*arguments)
    assert done.status == 1
    assert done.out == ""
    assert done.err.startswith("kvferry: ")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = kvferry("--debug", "status", state=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ClusterNotFound" in done.stderr


def test_a_bad_file_is_one_line_that_names_the_key(here: Refused, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nengine: {block_sise: 8}\n")
    done = here("up", str(file))
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert "engine.block_sise" in done.err
    assert "'block_size'" in done.err
    assert StateStore(tmp_path).names() == []


def test_a_key_that_stands_twice_is_refused(here: Refused, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nengine: {block_size: 8}\nmodel: n\n")
    done = here("up", str(file))
    assert done.status == 1
    assert "'model' stands twice" in done.err


@pytest.mark.parametrize(("node", "state"), [(None, "dead"), ("unfinished", "dead")])
def test_a_cluster_that_nobody_finishes_is_told_with_the_way_out(node: str | None, state: str, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    gone = ProcessMark(pid=os.getpid(), created=1.0)
    made = store.reserve("half")
    left = None if node is None else NodeState(address="127.0.0.1:1", temp_dir=str(tmp_path / "gone"), daemon=gone)
    store.save(msgspec.structs.replace(made, starter=gone, node=left))
    done = kvferry("status", state=tmp_path)
    assert done.returncode == 1
    assert state in done.stdout
    assert "kvferry down half" in done.stderr


def test_what_names_no_cluster_is_asked_which_when_there_are_several(here: Refused, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for name in ("one", "two"):
        store.save(msgspec.structs.replace(store.reserve(name), url=f"http://127.0.0.1:9/{name}", ready=True))
    done = here("complete", "hello")
    assert done.status == 1
    assert "--url (one: http://127.0.0.1:9/one, two: " in done.err


def test_a_usage_error_has_status_two(tmp_path: Path) -> None:
    assert kvferry("frobnicate", state=tmp_path).returncode == 2


def test_a_key_and_its_entry_fit_each_other(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["key", "alice"])
    assert made.exit_code == 0
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n" + made.stderr)
    (entry,) = read_keys(file)
    assert (entry.name, entry.sha256) == ("alice", hash_of(made.stdout.strip()))
    assert made.stdout.strip() not in made.stderr
    refused = CliRunner().invoke(app, ["key", "x" * 200])
    assert isinstance(refused.exception, ConfigError)
