"""Every command of the README, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.state import StateStore

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(language, body.strip()) for language, body in BLOCK.findall((ROOT / "README.md").read_text())]
COMMANDS = [line for language, body in BLOCKS if language == "sh" for line in body.splitlines()]
SNIPPETS = [body for language, body in BLOCKS if language == "python"]
DEMO, TEST, UP, DOWN = "make demo", "make test", "kvferry up cluster.yaml", "kvferry down"
URL = "http://127.0.0.1:8000"
BRIEFLY = {
    "kvferry bench transfer": "--seconds 0.05",
    f"kvferry bench latency --url {URL}": "--runs 1 --cached 256",
    next(command for command in COMMANDS if command.startswith("kvferry bench serve")): "--requests 3 --warmup 1",
}
"""What is added to commands that measure, for here nobody reads their figures."""


def shell(command: str, folder: Path, state: Path, timeout: float = 400.0) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "KVFERRY_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_readme_has_its_two_commands_first() -> None:
    assert COMMANDS[:2] == [DEMO, TEST]
    assert UP in COMMANDS
    assert DOWN in COMMANDS


def test_make_demo_streams_an_answer_and_leaves_nothing(tmp_path: Path) -> None:
    folders = {*Path("/tmp").glob("kvf-*")}
    done = shell("make demo ONESHOT=1", ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("router-0", "prefill-0", "decode-0", "first token (TTFT)", "per token (TPOT)", "KV moved"):
        assert expected in done.stdout
    answer = done.stdout.split("\n> ", 1)[1].splitlines()
    assert len(" ".join(answer[1:4]).split()) > 5, "a sentence, at least"
    assert StateStore(tmp_path).names() == []
    assert {*Path("/tmp").glob("kvf-*")} <= folders


def test_make_test_runs_the_checks_that_ci_runs() -> None:
    planned = shell("make -n test", ROOT, ROOT).stdout
    assert "scripts/bootstrap.sh" in planned
    assert "scripts/checks.sh" in planned
    assert "scripts/checks.sh" in (ROOT / ".ci/run").read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the README's ``cluster.yaml``, and that cluster up."""
    folder = tmp_path_factory.mktemp("readme")
    (yaml,) = [body for language, body in BLOCKS if language == "yaml"]
    # Port 8000 may be somebody else's here; the README's URL is exchanged for the cluster's.
    (folder / "cluster.yaml").write_text(f"{yaml}\nrouter: {{port: 0}}\n")
    up = shell(UP, folder, folder)
    assert up.returncode == 0, up.stderr
    yield folder
    down = shell(DOWN, folder, folder)
    assert down.returncode == 0, down.stderr
    assert StateStore(folder).names() == []


def url_of(home: Path) -> str:
    store = StateStore(home)
    return store.load(store.only()).url


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in (DEMO, TEST, UP, DOWN)])
def test_each_other_command_works(home: Path, command: str) -> None:
    done = shell(f"{command} {BRIEFLY.get(command, '')}".replace(URL, url_of(home)), home, home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["openai", "client"])
def test_each_python_snippet_works(home: Path, snippet: str) -> None:
    program = home / "snippet.py"
    program.write_text(snippet.replace(URL, url_of(home)))
    done = shell(f"python {program}", home, home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
