"""Ray's own ``ray up`` on three machines, kvferry on that, clients on a fourth, and everything down again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from machines import Machine, machines, missing
from namespaces import Lan, why_not

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
CLUSTER = """
model: {model}
served_name: tiny
engine: {{dtype: float32, num_blocks: 64, block_size: 8}}
prefill: {{cpus: 1, placement: spread}}
decode: {{cpus: 1, placement: spread}}
router: {{host: 0.0.0.0, port: 8000, public: true}}
ray: {{address: auto, start_timeout: 150}}
"""
PROGRAM = """
import sys
from router.client import Client
with Client(sys.argv[1], model="tiny", retries=0) as client:
    for length in (1, 9, 40):
        answer = client.complete("ferry " * length, max_tokens=8, temperature=0, ignore_eos=True, timings=True)
        print(answer.usage.completion_tokens, answer.timings.transport, answer.timings.kv_bytes)
"""


def rays_file(folder: Path, lan: Lan) -> Path:
    """The shipped file with this network's addresses in it, and less of a machine for each node."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / "local.yaml").read_text())
    head, *workers = (lan.hosts[name].address for name in ("head", "one", "two"))
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"]["ssh_private_key"] = str(folder / "key")
    flags = f"ray start --node-ip-address={head} --include-dashboard=false --num-cpus=0"
    config["head_start_ray_commands"] = [word.replace("ray start", flags) for word in config["head_start_ray_commands"]]
    config["worker_start_ray_commands"] = [
        word.replace("ray start", "ray start --num-cpus=1") for word in config["worker_start_ray_commands"]
    ]
    file = folder / "ray.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_ray_up_then_kvferry_up_then_both_down(tiny_llama_dir: Path, tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    if missing():
        pytest.skip(f"machines with SSH need {', '.join(missing())}")
    names = ("head", "one", "two")
    with (
        Lan.made(*names, "client") as lan,
        machines(tmp_path, lan, *names, kept=(tiny_llama_dir.parent,)) as running,
    ):
        file, cluster, program = rays_file(tmp_path, lan), tmp_path / "cluster.yaml", tmp_path / "ask.py"
        cluster.write_text(CLUSTER.format(model=tiny_llama_dir))
        program.write_text(PROGRAM)
        head, client = running["head"], running["client"]
        client.ran(str(BIN / "ray"), "up", "-y", "--no-config-cache", str(file), timeout=200.0)
        head.ran(str(BIN / "kvferry"), "up", str(cluster), timeout=200.0)
        status = msgspec.json.decode(head.ran(str(BIN / "kvferry"), "status", "--json"))
        assert status["state"] == "ready"
        hosts = {actor["status"]["role"]: actor["status"]["host"] for actor in status["actors"]}
        assert hosts["router"] == head.address
        assert {hosts["prefill"], hosts["decode"]} == {running["one"].address, running["two"].address}

        received = next(each for each in running.values() if each.address == hosts["decode"]).host.received
        before = received()
        told = client.ran(sys.executable, str(program), f"http://{head.address}:8000").split()
        assert told[0::3] == ["8"] * 3
        assert told[1::3] == ["tcp"] * 3
        crossed = sum(map(int, told[2::3]))
        assert crossed > 0
        assert received() - before > crossed, "it went over the wire between the two"

        head.ran(str(BIN / "kvferry"), "down")
        client.ran(str(BIN / "ray"), "down", "-y", str(file))
        for name in ("one", "two"):
            # What ray down leaves with this provider, as the file says.
            running[name].ran(str(BIN / "ray"), "stop")
        assert {name: left(running[name]) for name in names} == {name: [] for name in names}


def left(machine: Machine) -> list[str]:
    """What still runs there of Ray's or of ours."""
    return [line for line in machine.processes() if "ray" in line or str(BIN) in line]
