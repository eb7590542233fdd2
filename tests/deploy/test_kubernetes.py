"""deploy/kubernetes: manifests that Kubernetes and KubeRay take, and pods that the workers of its cluster fit on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.plan import check_orders, planned_orders

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
SCHEMA = yaml.safe_load(Path(__file__).with_name("kuberay.schema.yaml").read_text())
KUBERNETES = "1.33"
IMAGE = ROOT / "deploy" / "docker" / "Dockerfile.cuda"


def objects() -> Iterator[dict[str, Any]]:
    for file in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


OBJECTS = {f"{each['kind']} {each['metadata']['name']}": each for each in objects()}
CLUSTER = OBJECTS["RayCluster kvferry"]
HEAD = CLUSTER["spec"]["headGroupSpec"]
GROUPS = {each["groupName"]: each for each in CLUSTER["spec"]["workerGroupSpecs"]}
PODS = {"head": HEAD["template"], **{name: group["template"] for name, group in GROUPS.items()}}
PLAIN = [name for name in OBJECTS if name != "RayCluster kvferry"]


def containers(pod: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = PODS[pod]["spec"]["containers"]
    return found


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def mounted(path: str, container: dict[str, Any]) -> str | None:
    """The volume that a path lies on."""
    return next((name for where, name in mounts(container).items() if Path(path).is_relative_to(where)), None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    file = tmp_path_factory.mktemp("kubernetes") / "kvferry.yaml"
    file.write_text(OBJECTS["ConfigMap kvferry-config"]["data"]["kvferry.yaml"])
    return load_config(file)


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"} | template["metadata"],
        "spec": template["spec"],
    }


@pytest.mark.parametrize("name", PLAIN)
def test_kubernetes_knows_each_field_of_each_object(name: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", PODS)
def test_kubernetes_knows_each_field_of_each_pod_and_would_refuse_others(pod: str) -> None:
    kubernetes_validate.validate(as_pod(PODS[pod]), KUBERNETES, strict=True)
    wrong = as_pod(PODS[pod])
    wrong["spec"] = wrong["spec"] | {"shareProcesses": True}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_kuberay_knows_each_field_of_the_cluster_and_would_refuse_others() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(CLUSTER, SCHEMA)
    for wrong in (
        CLUSTER | {"apiVersion": "ray.io/v1alpha1"},
        CLUSTER | {"spec": CLUSTER["spec"] | {"authOption": {}}},
        CLUSTER | {"spec": CLUSTER["spec"] | {"authOptions": {"mode": "on"}}},
        CLUSTER | {"spec": CLUSTER["spec"] | {"headGroupSpec": HEAD | {"rayStartParams": {"num-cpus": 0}}}},
        CLUSTER | {"spec": CLUSTER["spec"] | {"workerGroupSpecs": [GROUPS["decode"] | {"replica": 1}]}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


def test_the_file_in_the_config_map_is_one_of_ours(config: ClusterConfig) -> None:
    assert config.name == CLUSTER["metadata"]["name"]
    assert config.ray.address == "auto"
    check_orders(planned_orders(config), Path(config.model))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_worker_has_a_pod_of_its_role_as_rays_own_autoscaler_reads_it(config: ClusterConfig, role: str) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    placed = CLUSTER | {"metadata": CLUSTER["metadata"] | {"namespace": "default"}}
    nodes = _derive_autoscaling_config_from_ray_cr(placed)["available_node_types"]
    assert nodes["headgroup"]["resources"]["CPU"] == 0
    offered = nodes[role]["resources"]
    section = config.prefill if role == "prefill" else config.decode
    assert section.cpus <= offered["CPU"]
    assert section.gpus == offered["GPU"]
    assert section.resources == {role: offered[role]}
    assert config.router.cpus == 0
    group = GROUPS[role]
    assert group["minReplicas"] <= section.replicas == group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("pod", PODS)
def test_what_a_container_mounts_is_there_and_the_model_and_room_for_ray_among_it(
    config: ClusterConfig, pod: str
) -> None:
    volumes = {each["name"]: each for each in PODS[pod]["spec"]["volumes"]}
    used = {name for container in containers(pod) for name in mounts(container).values()}
    assert used == {*volumes}
    for container in containers(pod):
        assert mounted(config.model, container) == "models"
        assert volumes[mounts(container)["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert f"PersistentVolumeClaim {claim}" in OBJECTS


def test_the_head_has_the_keys_and_the_file_that_brings_the_cluster_up(config: ClusterConfig) -> None:
    ray, kvferry = containers("head")
    assert (ray["name"], kvferry["name"]) == ("ray-head", "kvferry")
    assert config.router.api_keys is not None
    assert mounted(config.router.api_keys, ray) == mounted(config.router.api_keys, kvferry) == "keys"
    script, file = kvferry["args"][0].split("exec ")[1].split()
    assert (ROOT / script).is_file()
    (volume,) = (each for each in PODS["head"]["spec"]["volumes"] if each["name"] == mounted(file, kvferry))
    assert Path(file).name in OBJECTS[f"ConfigMap {volume['configMap']['name']}"]["data"]


def test_the_one_that_brings_it_up_sees_rays_processes_and_files_and_remembers_what_it_did() -> None:
    assert PODS["head"]["spec"]["shareProcessNamespace"] is True
    ray, kvferry = containers("head")
    assert mounted("/tmp/ray", ray) == mounted("/tmp/ray", kvferry) == "ray"
    (state,) = re.findall(r"KVFERRY_STATE_DIR=(\S+)", IMAGE.read_text())
    assert mounted(state, kvferry) == "state"
    token = next(each for each in kvferry["env"] if each["name"] == "RAY_AUTH_TOKEN")
    # KubeRay names the secret with Ray's token as the cluster.
    assert token["valueFrom"]["secretKeyRef"] == {"name": CLUSTER["metadata"]["name"], "key": "auth_token"}
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}


def test_the_router_is_found_where_it_listens(config: ClusterConfig) -> None:
    ray, kvferry = containers("head")
    ports = {each["name"]: each["containerPort"] for each in ray["ports"]}
    assert config.router.host == "0.0.0.0"
    assert ports["router"] == config.router.port == kvferry["readinessProbe"]["httpGet"]["port"]
    service = OBJECTS["Service kvferry"]["spec"]
    assert service["ports"][0]["targetPort"] == "router"
    assert service["selector"] == labels("head")
    (rule,) = OBJECTS["NetworkPolicy kvferry-router"]["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": config.router.port}]


def labels(pod: str) -> dict[str, str]:
    """What KubeRay labels the pods with."""
    cluster = {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    return cluster | ({"ray.io/node-type": "head"} if pod == "head" else {"ray.io/group": pod})


def test_pods_speak_with_each_other_and_only_the_router_with_others() -> None:
    inside = OBJECTS["NetworkPolicy kvferry-inside"]["spec"]
    of_the_cluster = {"matchLabels": {"ray.io/cluster": CLUSTER["metadata"]["name"]}}
    assert inside["podSelector"] == of_the_cluster
    assert inside["ingress"] == [{"from": [{"podSelector": of_the_cluster}]}]
    assert OBJECTS["NetworkPolicy kvferry-router"]["spec"]["podSelector"] == {"matchLabels": labels("head")}


@pytest.mark.parametrize("pod", PODS)
def test_a_budget_is_what_can_be_had_for_an_operators_pods(pod: str) -> None:
    budget = OBJECTS[f"PodDisruptionBudget kvferry-{pod}"]["spec"]
    assert budget["selector"] == {"matchLabels": labels(pod)}
    assert {*budget} == {"minAvailable", "selector"}
    assert isinstance(budget["minAvailable"], int)
    assert budget["minAvailable"] < (2 if pod == "head" else GROUPS[pod]["replicas"])


@pytest.mark.parametrize("pod", PODS)
def test_nobody_is_root_and_all_run_the_image_and_the_ray_that_were_tested(pod: str) -> None:
    (user,) = re.findall(r"useradd .*--uid (\d+)", IMAGE.read_text())
    context = PODS[pod]["spec"]["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, int(user))
    (image,) = re.findall(r"build -f deploy/docker/Dockerfile.cuda -t (\S+) ", IMAGE.read_text())
    for container in containers(pod):
        assert container["image"] == image
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    (ray,) = re.findall(r"^ray==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert CLUSTER["spec"]["rayVersion"] == ray


def test_no_secret_is_in_the_folder() -> None:
    assert not [name for name in OBJECTS if name.startswith("Secret")]
