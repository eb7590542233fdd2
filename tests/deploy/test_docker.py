"""deploy/docker: the image's file, what it copies and starts, and its entry point with a stand-in for the command."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from cluster.config_file import load_config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
STAND_IN = """#!/bin/sh
echo "$1" >>"$LOG"
case $1 in
up) [ ! -e "$LOG.slow" ] || exec sleep 60 ;;
status) [ -e "$LOG.there" ] ;;
esac
"""


def steps() -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO((DOCKER / "Dockerfile.cpu").read_bytes()))
    return [(each["instruction"], each["value"]) for each in parser.structure if each["instruction"] != "COMMENT"]


def test_the_image_has_a_pinned_base_and_nobody_is_root_when_it_runs() -> None:
    (base,) = [value for name, value in steps() if name == "FROM"]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", base)
    users = [value for name, value in steps() if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    names = [name for name, _ in steps()]
    assert "ADD" not in names
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert names.count("HEALTHCHECK") == 1


def test_what_apt_installs_is_the_least_and_its_lists_are_gone() -> None:
    for name, value in steps():
        if name == "RUN" and "apt-get install" in value:
            assert "--no-install-recommends -y" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
        assert "sudo" not in value


def test_what_the_image_runs_is_in_it() -> None:
    told = dict(steps())
    (script,), (file,) = json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"])
    assert os.access(ROOT / script, os.X_OK)
    config = load_config(ROOT / file)
    assert str(config.router.port) == told["EXPOSE"]
    assert f":{config.router.port}/health" in told["HEALTHCHECK"]
    (probe,) = re.findall(r'"-c", "(.*)"\]', told["HEALTHCHECK"])
    compile(probe, "probe", "exec")
    assert os.access(ROOT / "scripts" / "bootstrap.sh", os.X_OK)


def test_compose_builds_that_image_and_publishes_it_to_this_machine_alone() -> None:
    (service,) = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert ROOT / service["build"]["dockerfile"] == DOCKER / "Dockerfile.cpu"
    assert re.search(r":\d+\.\d+\.\d+", service["image"])
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["volumes"][0].split(":")[1] in dict(steps())["VOLUME"]
    (state,) = service["tmpfs"]
    assert f"KVFERRY_STATE_DIR={state.split(':')[0]} " in dict(steps())["ENV"]
    (user,) = re.findall(r"useradd .*--uid (\d+)", str(steps()))
    assert f"uid={user}," in state


def entered(folder: Path) -> subprocess.Popen[bytes]:
    command = folder / "kvferry"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "LOG": str(folder / "log"), "KVFERRY_LOOK_SECONDS": "0.05"}
    return subprocess.Popen(["sh", DOCKER / "entrypoint.sh", "cluster.yaml"], env=environment, stderr=subprocess.PIPE)


def until_logged(folder: Path, last: str) -> None:
    limit = time.monotonic() + 20
    while not (folder / "log").exists() or (folder / "log").read_text().split()[-1:] != [last]:
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("while_coming_up", [False, True])
def test_who_is_told_to_end_brings_the_cluster_down(tmp_path: Path, while_coming_up: bool) -> None:
    (tmp_path / ("log.slow" if while_coming_up else "log.there")).touch()
    with entered(tmp_path) as process:
        until_logged(tmp_path, "up" if while_coming_up else "status")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert (tmp_path / "log").read_text().split()[-1] == "down"


def test_a_cluster_that_is_gone_ends_the_container(tmp_path: Path) -> None:
    with entered(tmp_path) as process:
        assert process.wait(20) == 1
    assert (tmp_path / "log").read_text().split() == ["up", "status", "down"]
