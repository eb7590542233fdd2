"""Three machines for Ray's own ``ray up``, a fourth that asks, and what ``docs/ray-up.md`` says is done on them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from machines import Machine, machines, missing
from namespaces import Lan, why_not

ROOT = Path(__file__).parents[2]
HEAD, ONE, TWO, ASIDE = "head", "one", "two", "aside"
WORKERS = (ONE, TWO)
CLUSTER_FILE, RAY_FILE = "cluster.yaml", "local.yaml"
PLACES = {"on your own computer": (ASIDE,), "on the head": (HEAD,), "on every worker": WORKERS}
"""Where a block of the guide runs, by its first line; others need more than a lab has."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 400.0
ENVIRONMENT = {
    "COLUMNS": "200",
    "RAY_USAGE_STATS_ENABLED": "0",
    # These share few cores, and Ray's agents may be slow to come up.
    "RAY_agent_register_timeout_ms": "120000",
    # Ray looks every five seconds by default whether a machine can be reached, and which are to be had.
    "AUTOSCALER_NODE_SSH_INTERVAL_S": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    # Machines of one host share its memory, which UCX would find and use.
    "UCX_TLS": "tcp",
}


class Order(msgspec.Struct, frozen=True):
    """A command of the guide, and the machines it is for."""

    line: str
    places: tuple[str, ...]


def reason_to_skip() -> str:
    """Why there can be no such machines here; empty where there can."""
    if why_not():
        return why_not()
    lacking = [*missing(), *(() if shutil.which("curl") else ("curl",))]
    return f"machines with SSH need {', '.join(lacking)}" if lacking else ""


def guide() -> tuple[list[Order], list[str]]:
    """The commands of ``docs/ray-up.md`` that a lab can run, in order, and its pieces of ``cluster.yaml``."""
    orders, pieces = [], []
    for language, body in BLOCK.findall((ROOT / "docs" / "ray-up.md").read_text()):
        if language == "yaml":
            pieces.append(body)
        elif language == "sh":
            first, *lines = body.splitlines()
            orders += [Order(line, PLACES[first.strip("# ")]) for line in lines if first.strip("# ") in PLACES]
    return orders, pieces


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition, and fail with its name when it does not come."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not come in {seconds} s"
        time.sleep(0.05)


class RayLab:
    """The machines, by name, and what is done on them.

    Attributes:
        lan: their network.
        url: of the router.
    """

    def __init__(self, folder: Path, lan: Lan, running: Mapping[str, Machine]) -> None:
        self.lan, self.machines = lan, running
        self.url = f"http://{running[HEAD].address}:8000"
        self._folder = folder

    def on(self, place: str, line: str) -> str:
        """Run a line of a shell on a machine; what it prints."""
        machine = self.machines[place]
        return machine.result(machine.start(line, self._folder), PATIENCE)

    def obey(self, order: Order) -> list[str]:
        """Run a command of the guide wherever it belongs, at the same time; what each prints."""
        words = {place: self.machines[place].start(order.line, self._folder) for place in order.places}
        return [self.machines[place].result(process, PATIENCE) for place, process in words.items()]

    def write(self, name: str, text: str) -> None:
        """Write a file that all machines see, in the folder of their commands."""
        (self._folder / name).write_text(text)

    def status(self) -> dict[str, Any]:
        """What ``kvferry status`` says on the head."""
        told = self.on(HEAD, "kvferry status --json")
        try:
            answer: dict[str, Any] = msgspec.json.decode(told)
        except msgspec.DecodeError as error:
            raise AssertionError(f"no JSON: {told}") from error
        return answer

    def write_ray_file(self, offered: str) -> None:
        """The shipped file with this network's machines and key, and what each offers, as flags; the head no core."""
        config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / RAY_FILE).read_text())
        head, *workers = (self.machines[name].address for name in (HEAD, *WORKERS))
        assert config["provider"] == {"type": "local", "head_ip": head, "worker_ips": workers}
        config["auth"]["ssh_private_key"] = str(self._folder / "key")
        for role, flags in (
            ("head", "--num-cpus=0 --include-dashboard=false"),
            ("worker", offered),
        ):
            commands = config[f"{role}_start_ray_commands"]
            config[f"{role}_start_ray_commands"] = [
                each.replace("ray start", f"ray start {flags}") for each in commands
            ]
        self.write(RAY_FILE, yaml.safe_dump(config))

    def remains(self) -> dict[str, list[str]]:
        """What still runs of Ray's or of kvferry's, by machine; machines with none are left out."""
        found = {
            name: [each.command for each in machine.processes() if re.search(r"\bray\b|raylet|kvferry", each.command)]
            for name, machine in self.machines.items()
        }
        return {name: commands for name, commands in found.items() if commands}

    @contextmanager
    def logs_told(self) -> Iterator[None]:
        """Add to a failure what the machines' Ray nodes have to say: they are gone with the machines."""
        try:
            yield
        except (AssertionError, subprocess.TimeoutExpired) as error:
            for name, machine in self.machines.items():
                error.add_note(f"{name}: {machine.ray_logs()}")
            raise


@contextmanager
def ray_lab(folder: Path, *kept: Path) -> Iterator[RayLab]:
    """Machines with nothing on them yet but logins; ``kept`` are further folders that all of them see."""
    names = (HEAD, *WORKERS)
    with (
        Lan.made(*names, ASIDE) as lan,
        machines(folder, lan, *names, environment=ENVIRONMENT, kept=kept) as running,
    ):
        lab = RayLab(folder, lan, running)
        with lab.logs_told():
            yield lab
