"""deploy/ray: Ray's files for clouds make nodes that the workers of deploy/cloud.yaml fit on, and that can run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cluster.cli import app
from cluster.config_file import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = load_config(DEPLOY / "cloud.yaml")
LIBRARY = {"aws": "boto3", "gcp": "google-api-python-client"}
"""What Ray's autoscaler, on the head, speaks to the cloud with."""
CLOUDS = pytest.mark.parametrize("cloud", sorted(LIBRARY))


def told(cloud: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / f"{cloud}.yaml").read_text())
    return read


def test_each_of_rays_files_but_the_one_for_own_machines_is_a_clouds() -> None:
    assert {file.stem for file in (DEPLOY / "ray").glob("*.yaml")} == {"local", *LIBRARY}


@CLOUDS
def test_a_worker_of_either_role_fits_on_a_node_and_as_many_as_may_be_on_all(cloud: str) -> None:
    types = told(cloud)["available_node_types"]
    (workers,) = (each for name, each in types.items() if name != told(cloud)["head_node_type"])
    for role in (CONFIG.prefill, CONFIG.decode):
        assert role.cpus <= workers["resources"]["CPU"]
        assert role.gpus <= workers["resources"]["GPU"]
    auto = CONFIG.scale.auto
    assert auto.max_workers <= workers["max_workers"] <= told(cloud)["max_workers"]


@CLOUDS
def test_nodes_can_run_kvferry_and_the_head_can_speak_to_its_cloud(cloud: str) -> None:
    install = " ".join(told(cloud)["setup_commands"])
    for needed in ("python3-venv", "python3-dev", "g++", "kvferry", LIBRARY[cloud]):
        assert re.search(rf"install .*{re.escape(needed)}\b|install .*{re.escape(needed)}", install), needed
    # Ray would put its own choice there after ours.
    assert told(cloud)["head_setup_commands"] == []


@CLOUDS
def test_no_node_has_the_image_that_ray_takes_by_itself(cloud: str) -> None:
    for node in told(cloud)["available_node_types"].values():
        config = node["node_config"]
        image = config["ImageId"] if cloud == "aws" else config["disks"][0]["initializeParams"]["sourceImage"]
        assert image.startswith("ami-") if cloud == "aws" else "2404" in image


@CLOUDS
def test_ray_wants_the_token_that_goes_to_each_node(cloud: str) -> None:
    assert told(cloud)["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    starts = [*told(cloud)["head_start_ray_commands"], *told(cloud)["worker_start_ray_commands"]]
    for start in (each for each in starts if "ray start" in each):
        assert "RAY_AUTH_MODE=token ray start" in start


def test_googles_nodes_ask_for_the_fast_network_card() -> None:
    for node in told("gcp")["available_node_types"].values():
        assert [card["nicType"] for card in node["node_config"]["networkInterfaces"]] == ["GVNIC"]


@CLOUDS
def test_what_the_files_say_is_to_be_typed_is_there(cloud: str) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    typed = re.findall(
        r"kvferry (\w+) ", re.findall(r"ray exec \S+ '(.*)'", (DEPLOY / "ray" / f"{cloud}.yaml").read_text())[0]
    )
    assert typed == ["key", "up"]
    assert {*typed} <= {*known}
    assert CONFIG.router.api_keys == str(DEPLOY / "keys.yaml"), "beside the file, which is where the line puts it"
