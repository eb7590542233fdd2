from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from growing_ray import OPEN, growing_ray

from cluster.bring_up import down, up
from cluster.config import ClusterConfig
from cluster.config_file import parse_config
from cluster.operations import scale
from cluster.placement import Machine, lacking, least_used, spread_out, unused, unused_line
from cluster.plan import worker_orders
from cluster.progress import Step
from cluster.state import StateStore
from cluster.status import cluster_report
from protocol.errors import ConfigError


def machine(number: int, **free: float) -> Machine:
    total = {"CPU": 4.0, "GPU": 2.0, f"node:10.0.0.{number}": 1.0}
    return Machine(f"n{number}", f"10.0.0.{number}", total, total | free)


def file(text: str) -> ClusterConfig:
    return parse_config(f"model: m\n{text}")


SPREAD = "prefill: {replicas: 2, placement: spread}\nray: {address: auto}"


@pytest.mark.parametrize(
    ("text", "there", "awaited"),
    [
        ("ray: {address: auto}", 0, ""),
        (SPREAD, 1, "2 machines (placement: spread; ray: {machines: ...} says another number), 1 there: 10.0.0.1"),
        (SPREAD, 2, ""),
        (SPREAD.replace("auto}", "auto, machines: 1}"), 1, ""),
        (SPREAD.replace("auto}", "auto, machines: 3}"), 2, "3 machines (ray.machines), 2 there: 10.0.0.1, 10.0.0.2"),
        ("ray: {address: auto, machines: 8}", 6, "8 machines (ray.machines), 6 there: 10.0.0.1, 10.0.0.2, 10.0.0.3"),
        ("prefill: {placement: spread}\nray: {address: auto}", 1, ""),
        (f"{SPREAD}\ndecode: {{placement: spread}}", 1, "2 machines"),
        ("prefill: {placement: spread, replicas: 4}", 1, ""),
    ],
)
def test_what_a_file_waits_for(text: str, there: int, awaited: str) -> None:
    found = lacking(file(text), [machine(number + 1) for number in range(there)])
    assert found.startswith(awaited)
    assert bool(found) == bool(awaited)


def test_a_machine_that_no_other_reaches_is_told_of() -> None:
    config = file("ray: {address: auto, machines: 2}")
    alone = Machine("n1", "127.0.0.1", {"CPU": 4.0}, {"CPU": 4.0})
    assert "1 there: 127.0.0.1, which no other machine reaches" in lacking(config, [alone])
    assert "reaches" not in lacking(config, [machine(1)])
    assert "reaches" not in lacking(config, [])


def test_a_machine_that_no_worker_fits_on_is_not_counted() -> None:
    config = file("decode: {replicas: 2, placement: spread, resources: {rdma: 1}}\nray: {address: auto}")
    with_rdma = Machine("n9", "10.0.0.9", {"rdma": 1.0}, {})
    assert "1 there: 10.0.0.9" in lacking(config, [machine(1), machine(2), with_rdma])
    assert not lacking(config, [with_rdma, Machine("n8", "10.0.0.8", {"rdma": 1.0}, {})])


def test_a_role_is_spread_over_all_that_have_room() -> None:
    config = file(
        "prefill: {replicas: 3, placement: spread, gpus: 1}\ndecode: {replicas: 3, placement: spread, gpus: 1}\n"
        "ray: {address: auto}"
    )
    orders = worker_orders(config, ("tcp://h:1",))
    found = spread_out(orders, [machine(1), machine(2), machine(3)])
    for role in ("prefill", "decode"):
        assert Counter(node for name, node in found.items() if name.startswith(role)) == {"n1": 1, "n2": 1, "n3": 1}
    # Where there is no room nobody is sent: Ray makes them wait, and tells its autoscaler.
    found = spread_out(orders, [machine(1), machine(2)])
    assert Counter(found.values()) == {"n1": 2, "n2": 2}
    assert {order.name for order in orders} - {*found} == {"decode-1", "decode-2"}


def test_workers_of_two_roles_do_not_share_a_machine_while_another_is_empty() -> None:
    config = file("prefill: {placement: spread}\ndecode: {placement: spread}\nray: {address: auto}")
    found = spread_out(worker_orders(config, ("tcp://h:1",)), [machine(1), machine(2)])
    assert found == {"prefill-0": "n1", "decode-0": "n2"}


def test_those_that_are_packed_are_left_to_ray() -> None:
    assert not spread_out(worker_orders(file("ray: {address: auto}"), ("tcp://h:1",)), [machine(1), machine(2)])


def test_a_new_one_goes_where_the_fewest_of_its_role_are() -> None:
    prefill, decode = worker_orders(file(SPREAD.replace("2", "1") + "\ndecode: {gpus: 1}"), ("tcp://h:1",))
    there = [("prefill", "n1"), ("prefill", "n2"), ("decode", "n2")]
    assert least_used(prefill, [machine(1), machine(2), machine(3)], there) == "n3"
    assert least_used(prefill, [machine(1), machine(2)], there) == "n1"
    assert least_used(decode, [machine(1, GPU=0.0), machine(2)], there) == "n2"
    assert least_used(decode, [machine(1, GPU=0.0)], there) is None


def test_machines_without_a_process_are_named() -> None:
    assert unused([machine(1), machine(2), machine(3)], ["n2", ""]) == ("10.0.0.1", "10.0.0.3")
    assert "10.0.0.1, 10.0.0.3" in unused_line(["10.0.0.1", "10.0.0.3"])
    assert "10.0.0.4 and" not in unused_line([f"10.0.0.{number}" for number in range(1, 8)])
    assert "3 more" in unused_line([f"10.0.0.{number}" for number in range(1, 8)])
    assert not unused_line([])


def test_a_node_of_our_own_is_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"machines must be 1, or null.*got 2"):
        file("ray: {machines: 2}")
    with pytest.raises(ConfigError, match=r"machines must be in \[1, 4096\]"):
        file("ray: {address: auto, machines: 0}")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_up_waits_for_the_second_machine_and_status_tells_of_a_third(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OPEN.items():
        monkeypatch.setenv(name, value)
    store, waits = StateStore(tmp_path), threading.Event()
    steps: list[Step] = []

    def progress(step: Step) -> None:
        steps.append(step)
        if "waiting for 2 machines" in step.stage:
            waits.set()

    with growing_ray() as ray, ThreadPoolExecutor(1) as pool:
        config = parse_config(
            f"name: growing\nmodel: {tiny_llama_dir}\nserved_name: tiny\nengine: {{num_blocks: 64, block_size: 8}}\n"
            "prefill: {placement: spread}\ndecode: {placement: spread}\nrouter: {port: 0}\n"
            f"ray: {{address: '{ray.address}', machines: 2, start_timeout: 300}}"
        )
        coming = pool.submit(up, config, progress, store=store)
        assert waits.wait(300), steps
        assert not [step for step in steps if step.stage == "placing"]
        ray.grow()
        coming.result(330)
        try:
            report = cluster_report("growing", store=store)
            nodes = {actor.status.name: actor.status.node for actor in report.actors}
            assert nodes["prefill-0"] != nodes["decode-0"]
            assert report.unused == ()
            ray.grow()
            assert len(cluster_report("growing", store=store).unused) == 1
            # What runs stays where it is, and what comes goes there.
            scale("growing", {"prefill": 2}, store=store)
            report = cluster_report("growing", store=store)
            after = {actor.status.name: actor.status.node for actor in report.actors}
            assert after == nodes | {"prefill-1": after["prefill-1"]}
            assert after["prefill-1"] not in nodes.values()
            assert report.unused == ()
        finally:
            down("growing", store=store)
