"""deploy/docker: the images' files, what they copy and start, and their entry point with a stand-in for the command."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from cluster.config_file import load_config
from cluster.plan import check_orders, planned_orders

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
STAND_IN = """#!/bin/sh
echo "$1" >>"$LOG"
case $1 in
up)
    [ ! -e "$LOG.slow" ] || exec sleep 60
    [ -e "$LOG.short" ] || touch "$LOG.there"
    ;;
status) [ -e "$LOG.there" ] ;;
esac
"""


IMAGES = pytest.mark.parametrize("kind", ["cpu", "cuda"])
COMPOSED = {"cpu": "compose.yaml", "cuda": "compose.cuda.yaml"}


def steps(kind: str) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO((DOCKER / f"Dockerfile.{kind}").read_bytes()))
    return [(each["instruction"], each["value"]) for each in parser.structure if each["instruction"] != "COMMENT"]


def service(kind: str) -> dict[str, Any]:
    (only,) = yaml.safe_load((DOCKER / COMPOSED[kind]).read_text())["services"].values()
    read: dict[str, Any] = only
    return read


@IMAGES
def test_the_image_has_a_pinned_base_and_nobody_is_root_when_it_runs(kind: str) -> None:
    (base,) = [value for name, value in steps(kind) if name == "FROM"]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", base)
    users = [value for name, value in steps(kind) if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    names = [name for name, _ in steps(kind)]
    assert "ADD" not in names
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert names.count("HEALTHCHECK") == 1


@IMAGES
def test_what_apt_installs_is_the_least_and_its_lists_are_gone(kind: str) -> None:
    for name, value in steps(kind):
        if name == "RUN" and "apt-get install" in value:
            assert "--no-install-recommends -y" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
        assert "sudo" not in value


@IMAGES
def test_what_the_image_runs_is_in_it(kind: str) -> None:
    told = dict(steps(kind))
    (script,), (file,) = json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"])
    assert os.access(ROOT / script, os.X_OK)
    config = load_config(ROOT / file)
    check_orders(planned_orders(config), Path(config.model))
    assert str(config.router.port) == told["EXPOSE"]
    assert f":{config.router.port}/health" in told["HEALTHCHECK"]
    (probe,) = re.findall(r'"-c", "(.*)"\]', told["HEALTHCHECK"])
    compile(probe, "probe", "exec")
    assert os.access(ROOT / "scripts" / "bootstrap.sh", os.X_OK)


def test_the_image_for_gpus_has_the_cuda_build_of_torch_a_compiler_and_rdma() -> None:
    runs = " ".join(value for name, value in steps("cuda") if name == "RUN")
    (setting,) = re.findall(r"(\w+)=cuda PIP", runs)
    script = (ROOT / "scripts" / "bootstrap.sh").read_text()
    # torch is chosen, and the environment told from another, by the same word.
    assert re.search(rf"^wants_cuda\(\) .*\$\{{{setting}:-\}} == cuda", script, re.MULTILINE)
    assert "if wants_cuda ||" in script
    assert "wants_cuda && device=cuda" in script
    assert {"g++", "python3-dev", "python3-venv", "libucx-dev", "rdma-core", "ibverbs-providers"} <= {*runs.split()}


@IMAGES
def test_a_login_shell_has_the_commands_too_for_rays_may_be_one(kind: str) -> None:
    (path,) = re.findall(r"(PATH=\S+venv/bin:\$PATH)", dict(steps(kind))["ENV"])
    runs = " ".join(value for name, value in steps(kind) if name == "RUN")
    assert f"{path}' > /etc/profile.d/kvferry.sh" in runs


def test_both_images_leave_the_same_files_out() -> None:
    cpu, cuda = ((DOCKER / f"Dockerfile.{kind}.dockerignore").read_text() for kind in ("cpu", "cuda"))
    assert cpu == cuda


@IMAGES
def test_compose_builds_that_image_and_publishes_it_to_this_machine_alone(kind: str) -> None:
    told = service(kind)
    assert (DOCKER / told["build"]["context"]).resolve() == ROOT
    assert ROOT / told["build"]["dockerfile"] == DOCKER / f"Dockerfile.{kind}"
    assert re.fullmatch(rf"kvferry:{version('kvferry')}-{kind}", told["image"])
    assert told["ports"] == ["127.0.0.1:8000:8000"]
    assert told["volumes"][0].split(":")[1] in dict(steps(kind))["VOLUME"]
    (state,) = told["tmpfs"]
    assert f"KVFERRY_STATE_DIR={state.split(':')[0]} " in dict(steps(kind))["ENV"]
    (user,) = re.findall(r"useradd .*--uid (\d+)", str(steps(kind)))
    assert f"uid={user}," in state


def test_a_container_gets_the_gpus_that_its_workers_want() -> None:
    config = load_config(ROOT / json.loads(dict(steps("cuda"))["CMD"])[0])
    (device,) = service("cuda")["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    wanted = config.prefill.replicas * config.prefill.gpus + config.decode.replicas * config.decode.gpus
    assert device["count"] == wanted


@contextmanager
def entered(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = folder / "kvferry"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "LOG": str(folder / "log"), "KVFERRY_LOOK_SECONDS": "0.05"}
    words = ["sh", DOCKER / "entrypoint.sh", "cluster.yaml"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def logged(folder: Path) -> list[str]:
    """What the command was called with, so far."""
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("while_coming_up", [False, True])
def test_who_is_told_to_end_brings_the_cluster_down(tmp_path: Path, while_coming_up: bool) -> None:
    if while_coming_up:
        (tmp_path / "log.slow").touch()
    with entered(tmp_path) as process:
        until(lambda: "up" in logged(tmp_path))
        until(lambda: while_coming_up or logged(tmp_path)[-1] == "status")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert logged(tmp_path)[-1] == "down"


def test_a_cluster_that_is_gone_ends_the_container(tmp_path: Path) -> None:
    (tmp_path / "log.short").touch()
    with entered(tmp_path) as process:
        assert process.wait(60) == 1
    # What an earlier life has left is cleared away first.
    assert logged(tmp_path) == ["status", "down", "up", "status", "down"]


def test_a_cluster_that_is_there_already_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log.there").touch()
    with entered(tmp_path) as process:
        # A look is logged before it looks, so the second proves what the first has found.
        until(lambda: len(logged(tmp_path)) > 1)
        (tmp_path / "log.there").unlink()
        assert process.wait(60) == 1
    assert {*logged(tmp_path)[:-1]} == {"status"}
