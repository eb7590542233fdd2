"""How fast the network is, as this host's system has it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kv_transfer.link_speed import GBIT, link_rate


def port(folder: Path, device: str, rate: str, state: str = "4: ACTIVE") -> None:
    place = folder / device / "ports" / "1"
    place.mkdir(parents=True)
    (place / "rate").write_text(rate + "\n")
    (place / "state").write_text(state + "\n")


def test_each_address_has_the_speed_of_its_interface() -> None:
    states = psutil.net_if_stats()
    seen = 0
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET":
                seen += 1
                assert link_rate("auto", each.address) == states[name].speed / 1e3 * GBIT
    assert seen, "there is the loopback at least"


def test_nobody_knows_of_loopback_and_of_addresses_of_others() -> None:
    assert link_rate("auto", "127.0.0.1") == 0.0
    assert link_rate("auto", "192.0.2.1") == 0.0
    assert link_rate("auto", "no such host") == 0.0


def test_who_knows_better_is_believed() -> None:
    assert link_rate("auto", "127.0.0.1", 25.0) == 25.0 * GBIT


def test_by_rdma_the_fastest_active_port_counts(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    port(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)")
    port(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)", "1: DOWN")
    port(tmp_path, "mlx5_3", "fast")
    (tmp_path / "mlx5_4" / "ports" / "1").mkdir(parents=True)
    assert link_rate("ucx", "127.0.0.1", devices=tmp_path) == 200 * GBIT
    assert link_rate("auto", "127.0.0.1", devices=tmp_path) == 0.0, "auto goes by shm or tcp"


@pytest.mark.parametrize("mode", ["ucx", "auto"])
def test_without_rdma_the_interface_counts(mode: str, tmp_path: Path) -> None:
    assert link_rate(mode, "127.0.0.1", devices=tmp_path) == 0.0
