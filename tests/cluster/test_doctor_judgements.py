"""What the doctor concludes from plain facts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config import ClusterConfig, DecodeSection, EngineSection, RaySection, RouterSection, TransferSection
from cluster.doctor.cluster_file import examine_keys, judge_memory, judge_port
from cluster.doctor.command import line, table
from cluster.doctor.finding import Finding, diagnosis
from cluster.doctor.gpudirect import judge_gpudirect
from cluster.doctor.host import judge_clock, judge_files, judge_locked, judge_python, judge_shared_memory
from cluster.doctor.kernels import judge_kernels
from cluster.doctor.libraries import judge_gpus, judge_torch
from cluster.doctor.rdma import devices, judge_rdma
from cluster.doctor.transports import SCHEMES, judge_transport
from cluster.doctor.wish import Wish
from kv_transfer.transport import SCHEMES as REGISTRY
from kv_transfer.transport import GpuDirect

MIB, GIB = 1 << 20, 1 << 30


def wish(given: bool = True, **sections: Any) -> Wish:
    return Wish(config=ClusterConfig(model="m", **sections), given=given)


WISH = wish()
ON_GPUS = wish(decode=DecodeSection(replicas=3, gpus=1))


def by_rdma(gpudirect: GpuDirect, *, checksum: bool = False) -> Wish:
    transfer = TransferSection(transport="ucx", gpudirect=gpudirect, checksum=checksum)
    return wish(transfer=transfer, decode=DecodeSection(gpus=1))


BY_UCX = by_rdma("auto")
JOINED = wish(ray=RaySection(address="head:6379"), decode=DecodeSection(gpus=1))


@pytest.mark.parametrize(
    ("finding", "verdict", "said", "fix"),
    [
        (judge_python((3, 11, 2), "cpython"), "ok", "3.11.2", ""),
        (judge_python((3, 10, 9), "cpython"), "broken", "3.10.9", "3.11"),
        (judge_python((3, 12, 0), "pypy"), "warning", "pypy", "CPython"),
        (judge_files(65536, -1), "ok", "65536", ""),
        (judge_files(-1, -1), "ok", "unlimited", ""),
        (judge_files(1024, -1), "warning", "1024", "ulimit -n 65536"),
        (judge_files(1024, 8192), "warning", "1024", "ulimit -n 8192"),
        (judge_files(256, 1024), "warning", "256", "limits.conf"),
        (judge_locked(-1, rdma=True), "ok", "unlimited", ""),
        (judge_locked(65536, rdma=False), "note", "65536 bytes", ""),
        (judge_locked(65536, rdma=True), "warning", "65536 bytes", "ulimit -l unlimited"),
        (judge_shared_memory(GIB, 100 * MIB), "ok", "1024 MiB", ""),
        (judge_shared_memory(64 * MIB, 100 * MIB), "warning", "64 MiB", "--shm-size"),
        (judge_shared_memory(None, 0), "warning", "no /dev/shm", "tmpfs"),
        (judge_clock([1.0, 1.0, 2.0], 5e-8, 1.8e9, 1.8e9, "tsc"), "ok", "50 ns", ""),
        (judge_clock([1.0, 0.9], 5e-8, 1.8e9, 1.8e9, "tsc"), "broken", "backwards", "clocksource"),
        (judge_clock([1.0, 2.0], 5e-8, 0.0, 1.8e9, "tsc"), "warning", "1970-01-01", "set-ntp"),
        (judge_clock([1.0, 2.0], 5e-8, 1.8e9, 1.9e9, "tsc"), "warning", "2027-01-15", "set-ntp"),
        (judge_clock([1.0, 2.0], 2e-6, 1.8e9, 1.8e9, "hpet"), "warning", "hpet", "tsc"),
        (judge_torch("2.13", None, None, None, WISH), "ok", "CPU only", ""),
        (judge_torch("2.13", "12.8", None, "CUDA", WISH), "ok", "CUDA 12.8", ""),
        (judge_torch("2.13", None, "6.4", "ROCm", WISH), "ok", "ROCm 6.4", ""),
        (judge_torch("2.13", None, None, "CUDA", WISH), "warning", "CUDA driver", "build of torch for CUDA"),
        (judge_torch("2.13", "12.8", None, "ROCm", ON_GPUS), "broken", "ROCm driver", "build of torch for ROCm"),
        (judge_gpus([], "no driver", WISH), "note", "no driver; workers use the CPU", ""),
        (judge_gpus(["cuda:0 H, 80 GiB"], "", WISH), "ok", "cuda:0 H", ""),
        (judge_gpus(["cuda:0 H, 80 GiB"], "", ON_GPUS), "broken", "3 wanted", "gpus to 0"),
        (judge_gpus([], "no driver", JOINED), "warning", "1 wanted", "run where the GPUs are"),
        (judge_gpus([], "no driver", wish(engine=EngineSection(device="cuda:0"))), "broken", "1 wanted", "cpu"),
        (judge_kernels("/usr/bin/c++", 2, off=False), "ok", "AMX", ""),
        (judge_kernels(None, None, off=False), "warning", "no C++ compiler", "g++"),
        (judge_kernels("/usr/bin/c++", None, off=False), "warning", "/usr/bin/c++ could not", "newer compiler"),
        (judge_kernels("/usr/bin/c++", None, off=True), "warning", "KVFERRY_NATIVE=0", "unset"),
        (judge_port("router.port", 8000, "", "", WISH), "ok", "8000 is free", ""),
        (judge_port("router.port", 8000, "address in use", "", WISH), "broken", "address in use", "0 takes a free"),
        (judge_port("router.port", 8000, "address in use", "", wish(given=False)), "warning", "in use", "0 takes"),
        (judge_port("router.port", 8000, "in use", "other", WISH), "broken", "cluster 'other'", "kvferry down other"),
        (judge_port("router.port", 8000, "in use", "kvferry", WISH), "note", "which is up", ""),
        (judge_memory(GIB, GIB, 3 * GIB, WISH), "ok", "2 workers take 1.0 GiB of weights and 1.0 GiB", ""),
        (judge_memory(GIB, 2 * GIB, 2 * GIB, WISH), "broken", "2.0 GiB are available", "num_blocks"),
        (judge_transport("tcp", "", "", 0.002, WISH), "ok", "crossed in 2.0 ms", ""),
        (judge_transport("ucx", "ucx: UCX 1.22; no RDMA: why", "", 0.002, WISH), "ok", "; UCX 1.22; no RDMA: why", ""),
        (judge_transport("ucx", "", "no UCX", 0.0, WISH), "note", "does not work here: no UCX", ""),
        (judge_transport("shm", "", "no memfd", 0.0, WISH), "warning", "no memfd", "auto takes tcp"),
        (judge_transport("tcp", "", "no loopback", 0.0, wish(given=False)), "broken", "no loopback", "network"),
        (
            judge_transport("ucx", "", "no UCX", 0.0, wish(transfer=TransferSection(transport="ucx"))),
            *("broken", "no UCX", "auto"),
        ),
        (judge_rdma([], verbs=False), "note", "no RDMA is possible: this machine has no RDMA device", ""),
        (
            judge_gpudirect((), "no GPU", WISH),
            "note",
            "passes pinned host memory on its way to other hosts: no GPU",
            "",
        ),
        (judge_gpudirect((), "no RDMA", BY_UCX), "warning", "passes pinned host memory", ""),
        (judge_gpudirect((), "no RDMA", by_rdma("on")), "broken", "passes pinned host memory", "gpudirect to auto"),
        (judge_gpudirect(("mlx5_0",), None, by_rdma("off")), "note", "switched off", ""),
        (judge_gpudirect(("mlx5_0", "mlx5_1"), None, BY_UCX), "ok", "itself, by mlx5_0, mlx5_1", ""),
        (judge_gpudirect(("mlx5_0",), None, by_rdma("auto", checksum=True)), "note", "not with checksums", ""),
        (judge_gpudirect(("mlx5_0",), None, WISH), "note", "transport 'auto' does without", "transport ucx"),
    ],
)
def test_a_fact_and_its_verdict(finding: Finding, verdict: str, said: str, fix: str) -> None:
    assert finding.verdict == verdict
    assert said in finding.said
    assert fix in finding.fix
    assert bool(finding.fix) == bool(fix), "what is to be done is said where something is, and only there"


def test_the_wish_of_a_file_is_read_off_it() -> None:
    assert (WISH.gpus, WISH.workers, WISH.unmet) == (0, 2, "broken")
    assert (ON_GPUS.gpus, ON_GPUS.workers) == (3, 4)
    assert (JOINED.here, JOINED.unmet) == (False, "warning"), "its workers may run elsewhere"
    fixed = wish(router=RouterSection(host="0.0.0.0", port=80, hub_port=81))
    hubs = [("router.hub_port", "127.0.0.1", port) for port in (81, 82)]
    assert fixed.ports == (("router.port", "0.0.0.0", 80), *hubs)
    assert wish(router=RouterSection(port=0)).ports == ()


def test_every_transport_of_the_registry_is_looked_at() -> None:
    assert {*SCHEMES} == {*REGISTRY} - {"inproc"}


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    for name, number, state, link in (
        ("mlx5_0", 1, "4: ACTIVE", "InfiniBand"),
        ("rxe0", 1, "1: DOWN", "Ethernet"),
        ("rxe0", 2, "1: DOWN", "Ethernet"),
    ):
        port = tmp_path / name / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
    return tmp_path


def test_rdma_devices_as_the_kernel_shows_them(infiniband: Path) -> None:
    ports = devices(infiniband)
    assert [port.name for port in ports] == ["mlx5_0/1", "rxe0/1", "rxe0/2"]
    good = judge_rdma(ports, verbs=True)
    assert (good.verdict, good.fix) == ("ok", "")
    assert "mlx5_0/1 ACTIVE (InfiniBand)" in good.said
    out_of_reach = judge_rdma(ports, verbs=False)
    assert out_of_reach.verdict == "warning"
    assert "no RDMA is possible" in out_of_reach.said
    assert "--device /dev/infiniband" in out_of_reach.fix
    down = judge_rdma(ports[1:], verbs=True)
    assert down.verdict == "warning"
    assert "no port is active: rxe0/1 DOWN (Ethernet)" in down.said
    (infiniband / "rxe0" / "ports" / "1" / "link_layer").unlink()
    assert devices(infiniband)[1].link == "unknown"
    assert devices(infiniband / "missing") == []


def test_the_file_of_the_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    assert examine_keys(WISH) == []
    named = wish(router=RouterSection(api_keys=str(file)))
    (missing,) = examine_keys(named)
    assert (missing.check, missing.verdict) == ("router.api_keys", "broken")
    assert str(file) in missing.said
    file.write_text(f"keys:\n- {{name: me, sha256: {'a' * 64}}}\n")
    (there,) = examine_keys(named)
    assert (there.verdict, there.said) == ("ok", f"1 in {file}")


def test_a_finding_is_one_line_whatever_a_library_says() -> None:
    finding = Finding(
        check="ray", verdict="broken", said="does not import:\n  no\n\tidea", fix="pip install 'ray[default]'"
    )
    assert line(finding) == "broken  ray: does not import: no idea -- fix: pip install 'ray[default]'"


def test_brackets_survive_the_terminal() -> None:
    finding = Finding(check="ray", verdict="broken", said="see [/etc]", fix="pip install 'ray[default]'")
    shown = io.StringIO()
    Console(file=shown, width=100).print(table(diagnosis((finding,))))
    assert "pip install 'ray[default]'" in shown.getvalue()
    assert "see [/etc]" in shown.getvalue()


def test_warnings_do_not_make_it_ill() -> None:
    findings = tuple(Finding(check="x", verdict=verdict, said="y") for verdict in ("ok", "note", "warning"))
    assert diagnosis(findings).healthy
    assert not diagnosis((*findings, Finding(check="x", verdict="broken", said="y"))).healthy
