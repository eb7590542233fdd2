from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.config import ClusterConfig, RoleSection
from cluster.config_file import build, load_config, parse_config
from cluster.plan import worker_orders
from cluster.schema import config_schema
from protocol.errors import CheckpointUnavailable, ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
EXAMPLES = sorted(DEPLOY.glob("*.yaml"))
SCHEMA_FILE = DEPLOY / "kvferry.schema.json"


def kvferry(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_there_is_an_example_for_each_kind_of_place() -> None:
    assert {file.stem for file in EXAMPLES} == {"laptop", "laptop-2p2d", "gpu-box", "rdma-two-nodes", "cloud"}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_each_example_is_right_and_fits_the_schema(file: Path) -> None:
    said = kvferry("config", "check", str(file))
    assert said.partition(": ok")[2] in (
        "\n",
        "; the model is not on this machine, and must be on each of the cluster's\n",
    )
    jsonschema.validate(yaml.safe_load(file.read_text()), config_schema())
    assert f"$schema={SCHEMA_FILE.name}" in file.read_text()


def test_the_shipped_schema_is_the_sections() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == config_schema()
    assert json.loads(kvferry("config", "schema")) == config_schema()
    jsonschema.Draft202012Validator.check_schema(config_schema())


def test_the_schema_tells_what_each_key_is_for() -> None:
    for name, section in config_schema()["$defs"].items():
        for key, about in section["properties"].items():
            assert about["description"], f"{name}.{key}"
    decode = config_schema()["$defs"]["DecodeSection"]["properties"]
    assert decode["replicas"] == {"type": "integer", "description": "how many.", "default": 1}
    assert "speculation" in decode


@pytest.mark.parametrize(
    "text",
    ["model: m\nengin: {}", "model: m\nengine: {block_sise: 8}", "model: m\nprefill: 2", "name: x", "model: 3"],
)
def test_what_the_file_refuses_the_schema_underlines(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), config_schema())


def test_an_empty_section_is_one() -> None:
    jsonschema.validate(yaml.safe_load("model: m\nengine:\nrouter:"), config_schema())
    assert parse_config("model: m\nengine:\nrouter:") == ClusterConfig(model="m")


def test_what_is_shown_is_the_same_cluster(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: /m\ntransfer: {gpudirect: 'off'}\nengine: {cuda_graph_batches: [1, 2]}\n"
        "decode: {resources: {rdma: 1}, limits: {max_waiting: 3}}\n"
    )
    shown: dict[str, Any] = yaml.safe_load(kvferry("config", "show", str(file)))
    assert build(ClusterConfig, shown) == load_config(file)
    assert shown["prefill"]["replicas"] == 1


def test_a_wrong_file_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nprefill: {limits: {max_wating: 3}}\n")
    done = CliRunner().invoke(app, ["config", "check", str(DEPLOY / "laptop.yaml"), str(file)])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == "prefill.limits.max_wating"


def test_a_model_that_nobody_has_is_refused_and_one_that_another_machine_may_have_is_not(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"

    def checked(model: str) -> Result:
        file.write_text(f"model: {model}\n")
        return CliRunner().invoke(app, ["config", "check", str(file)])

    assert checked("smollm2-135m").stdout.endswith(": ok\n")
    for unknown in ("smollm2-135mm", "org/some-model"):
        error = checked(unknown).exception
        assert isinstance(error, CheckpointUnavailable)
        assert (error.field, "known: smollm2-135m" in error.message) == ("model", True)
    for path in ("/nowhere/at/all", "./beside", "~/nowhere-at-all"):
        assert "ok; the model is not on this machine" in checked(path).stdout
    (tmp_path / "half").mkdir()
    for path in ("half", "./half", str(tmp_path / "half")):
        error = checked(path).exception
        assert isinstance(error, CheckpointUnavailable)
        assert r"config.json is missing" in error.message


def test_where_workers_are_placed_is_in_their_orders() -> None:
    config = parse_config("model: m\nprefill: {resources: {rdma: 2}, placement: spread}")
    prefill, decode = worker_orders(config, ("tcp://h:1",))
    assert (prefill.resources, prefill.spread, decode.resources, decode.spread) == ({"rdma": 2.0}, True, {}, False)
    for resources in ({"GPU": 1.0}, {"": 1.0}, {"rdma": 0.0}):
        with pytest.raises(ConfigError, match="resources"):
            RoleSection(resources=resources)
    assert msgspec.to_builtins(config)["prefill"]["placement"] == "spread"


@pytest.mark.parametrize("file", sorted((DEPLOY / "ray").glob("*.yaml")), ids=lambda file: file.stem)
def test_rays_own_files_are_what_ray_takes(file: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(file.read_text())))
