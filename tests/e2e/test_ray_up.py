"""``docs/ray-up.md``, command by command: ``ray up`` on three machines, kvferry on them, and all of it down again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import NAMED
from ray_lab import CLUSTER_FILE, HEAD, ONE, TWO, RayLab, guide, ray_lab, reason_to_skip, until

from router.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(900)]

UP, RESTART, DOWN = "kvferry up cluster.yaml", "kvferry restart cluster.yaml", "kvferry down"
LENGTHS = (1, 9, 40)
"""Words of the prompts."""


def cluster_file(piece: str, model: Path, lab: RayLab) -> str:
    """The guide's file for machines of which the head computes nothing, and for a model that loads at once."""
    first, second = (lab.machines[name].address for name in (HEAD, ONE))
    third = lab.machines[TWO].address
    text = piece.replace(second, third).replace(first, second)
    return text.replace(
        "model: smollm2-135m\n",
        f"model: {model}\nserved_name: smollm2-135m\nengine: {{dtype: float32, num_blocks: 64, block_size: 8}}\n",
    )


def crosses(lab: RayLab, transport: str) -> None:
    """Requests of a fourth machine are answered, and their KV goes from one machine to another by ``transport``."""
    receiver = lab.machines[TWO].host
    before, crossed = receiver.received(), 0
    with lab.lan.hosts["aside"].inside(), Client(lab.url, retries=0) as client:
        for length in LENGTHS:
            # Nothing of it is in a cache.
            prompt = f"{transport} " * length
            answer = client.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, timings=True)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 8
            assert answer.timings is not None
            assert answer.timings.transport == transport
            crossed += answer.timings.kv_bytes
    assert 0 < crossed < receiver.received() - before


def test_the_guide_from_nothing_to_an_answer_and_back(tiny_llama_dir: Path, tmp_path: Path) -> None:
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    orders, (whole, change) = guide()
    with ray_lab(tmp_path, tiny_llama_dir.parent) as lab:
        lab.write_ray_file(cpus=2)
        lab.write(CLUSTER_FILE, cluster_file(whole, tiny_llama_dir, lab))

        def look_at_status(told: str) -> None:
            for name, place in (("router-0", HEAD), ("prefill-0", ONE), ("decode-0", TWO)):
                (row,) = [line.split() for line in told.splitlines() if line.startswith(name)]
                assert lab.machines[place].address in row
                assert "ready" in row

        def ask_before_the_change(told: str) -> None:
            assert "content" in told
            crosses(lab, "tcp")
            lab.write(CLUSTER_FILE, cluster_file(whole + change, tiny_llama_dir, lab))

        looks: dict[str, Callable[[str], None]] = {
            "kvferry status": look_at_status,
            next(order.line for order in orders if order.line.startswith("curl")): ask_before_the_change,
            RESTART: lambda _: crosses(lab, "ucx"),
        }
        assert {UP, DOWN, *looks} <= {order.line for order in orders}
        for order in orders:
            told = lab.obey(order)
            if order.line in looks:
                looks[order.line](told[0])
        until(lambda: not lab.remains(), "the end of all processes", 20.0)
        namespaces = [NAMED / host.name for host in lab.lan.hosts.values()]
        assert all(path.exists() for path in namespaces)
    assert not any(path.exists() for path in namespaces)
