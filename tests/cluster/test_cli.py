from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.state import StateStore

COMMANDS = ("up", "status", "down", "complete", "chat", "demo", "model", "bench", "version")


def kvferry(*arguments: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        capture_output=True,
        text=True,
        env={"KVFERRY_STATE_DIR": str(state), "PATH": "/usr/bin:/bin", "HOME": str(state)},
    )


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_names_what_there_is(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout
    if not command:
        assert all(name in shown.stdout for name in COMMANDS)


def test_version_is_the_installed_one() -> None:
    assert CliRunner().invoke(app, ["version"]).stdout == f"kvferry {version('kvferry')}\n"


def test_the_command_starts_without_the_heavy_packages() -> None:
    program = (
        "import sys, cluster.cli; print([m for m in ('torch', 'ray', 'transformers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status",), "no cluster is up"),
        (("down", "nobody"), "no cluster 'nobody' is up"),
        (("up", "none.yaml"), "cannot read none.yaml"),
        (("complete", "hello", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("chat", "hello", "--url", "nonsense"), "nonsense"),
    ],
)
def test_an_error_is_one_line_and_a_status(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = kvferry(*arguments, state=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kvferry: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = kvferry("--debug", "status", state=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ClusterNotFound" in done.stderr


def test_a_bad_file_is_one_line_that_names_the_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nengine: {block_sise: 8}\n")
    done = kvferry("up", str(file), state=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "engine.block_sise" in done.stderr
    assert "'block_size'" in done.stderr
    assert StateStore(tmp_path).names() == []


def test_a_usage_error_has_status_two(tmp_path: Path) -> None:
    assert kvferry("frobnicate", state=tmp_path).returncode == 2
