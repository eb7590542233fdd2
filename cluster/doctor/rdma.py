"""RDMA: the devices that the kernel shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.doctor.finding import Finding
from cluster.doctor.wish import Wish

DEVICES = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one RDMA device.

    Attributes:
        name: "mlx5_0/1".
        state: the kernel's word, "ACTIVE" where it works.
        link: "InfiniBand" or "Ethernet".
    """

    name: str
    state: str
    link: str


def devices(folder: Path = DEVICES) -> list[Port]:
    """Every port of every RDMA device; none where there is no such folder."""
    return [
        Port(f"{device.name}/{port.name}", _read(port / "state").rpartition(": ")[2], _read(port / "link_layer"))
        for device in (sorted(folder.iterdir()) if folder.is_dir() else ())
        for port in sorted((device / "ports").glob("*"))
    ]


def judge_rdma(ports: list[Port], *, verbs: bool) -> Finding:
    """Whether KV can go by RDMA, as far as the kernel is concerned.

    Args:
        ports: of every device.
        verbs: whether this process can get at them.
    """
    if not ports:
        said = f"no RDMA is possible: this machine has no RDMA device ({DEVICES} is empty); KV goes by shm or tcp"
        return Finding(check="rdma", verdict="note", said=said)
    listed = ", ".join(f"{port.name} {port.state} ({port.link})" for port in ports)
    if not verbs:
        said = f"no RDMA is possible: {listed}, but there is no {VERBS}"
        fix = "load ib_uverbs; give a container --device /dev/infiniband"
        return Finding(check="rdma", verdict="warning", said=said, fix=fix)
    if not any(port.state == "ACTIVE" for port in ports):
        said = f"no RDMA is possible: no port is active: {listed}"
        return Finding(check="rdma", verdict="warning", said=said, fix="bring a link up (rdma link; ibstat)")
    return Finding(check="rdma", verdict="ok", said=f"{listed}; whether UCX can use it, see ucx")


def examine_rdma(wish: Wish) -> list[Finding]:
    """What the kernel shows of RDMA."""
    return [judge_rdma(devices(), verbs=any(VERBS.glob("uverbs*")))]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
