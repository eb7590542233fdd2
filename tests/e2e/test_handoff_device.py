"""Pools that no transport can reach, as on a GPU: the same text by way of staging and landing memory."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from cuda_here import counted, set_up
from oracle import Oracle
from rack import Answer, rack
from test_handoff_layouts import wire_of
from test_handoff_text import prompts, shipped
from ucx_here import need_ucx

from engine.device_pool import DevicePool
from engine.kv_cache import KVCache
from kv_transfer.cuda_ipc.wire import Offer

FOREIGN = Offer(nbytes=1 << 20, allocation=1 << 20, offset=0, address=0, uuid=b"b" * 16, handle=bytes(64))
"""A pool on the stand-in's second device."""


@pytest.fixture
def out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool counts as one on a device, and nobody may have its bytes."""

    def memory(cache: KVCache) -> memoryview:
        raise AssertionError("the pool's bytes are not to be had")

    monkeypatch.setattr(KVCache, "in_host_memory", False)
    monkeypatch.setattr(KVCache, "memory", memory)


@pytest.mark.usefixtures("out_of_reach")
@pytest.mark.parametrize(
    ("decode", "wire_dtype", "transport"),
    [
        ({}, None, "shm"),
        ({}, None, "tcp"),
        ({"block_size": 8, "order": "HND"}, None, "shm"),
        ({}, "float8_e4m3", "tcp"),
    ],
    ids=["as-they-are-shm", "as-they-are-tcp", "converted", "a-wire-dtype"],
)
async def test_the_same_text(
    tiny_llama_dir: Path, tiny_oracle: Oracle, decode: dict[str, object], wire_dtype: str | None, transport: str
) -> None:
    by = {"ship_by": transport, "listen_by": transport}
    limits = {"wire_dtype": wire_dtype}
    # Ranges of layers are not for such pools, whoever asks for them.
    async with rack(
        tiny_llama_dir,
        decode_engine=decode,
        prefill_transfer={"layers_per_ship": 1},
        decode_transfer=limits,
        **by,  # type: ignore[arg-type]
    ) as running:
        for prompt in prompts(tiny_oracle, (1, 4, 5, 37)):
            before = shipped(running)
            answer = await running.ask(prompt)
            assert wire_dtype or answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            assert answer.report is not None
            assert answer.report.transport == transport
            wire = wire_of(running, wire_dtype)
            blocks = wire.layout.blocks_for(len(prompt))
            now = shipped(running)
            assert (now[0] - before[0], now[1] - before[1]) == (blocks, blocks * wire.block_bytes)
        shipping = running.prefill[0]._exports._shipping
        assert shipping._staging is not None
        assert not shipping._senders._senders


@pytest.mark.usefixtures("out_of_reach")
async def test_cancels_on_the_way_leave_nothing(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    """A third of the clients leave, each at another moment; the rack checks that every pool is at its baseline."""
    rng = random.Random(5)
    asked = prompts(tiny_oracle, tuple(rng.randint(1, 60) for _ in range(15)), seed=5)
    async with rack(
        tiny_llama_dir,
        engine={"num_blocks": 129, "prefix_cache": False},
        prefill_transfer={"staging_bytes": 1 << 16},
    ) as running:
        tasks = [asyncio.create_task(running.ask(prompt, max_tokens=6)) for prompt in asked]
        for task in rng.sample(tasks, 5):
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [(prompt, answer) for prompt, answer in zip(asked, answers, strict=True) if isinstance(answer, Answer)]
        assert len(stayed) >= 10
        for prompt, answer in stayed:
            assert answer.token_ids == tiny_oracle.greedy(prompt, 6)


@pytest.fixture
def on_a_stand_in(out_of_reach: None, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every pool counts as one on the first CUDA device, with a stand-in for the driver."""
    monkeypatch.setattr(DevicePool, "device_index", 0)
    return cuda


@pytest.mark.parametrize("by", ["auto", "cuda_ipc"])
async def test_from_pool_to_pool(on_a_stand_in: Path, tiny_llama_dir: Path, tiny_oracle: Oracle, by: str) -> None:
    async with rack(tiny_llama_dir, prefill_transfer={"layers_per_ship": 1}, ship_by=by, listen_by=by) as running:
        for prompt in prompts(tiny_oracle, (1, 4, 5, 37)):
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            assert answer.report is not None
            assert answer.report.transport == "cuda_ipc"
        assert running.prefill[0]._exports._shipping._staging is None
        assert running.prefill[0].load().transport_fallbacks == 0


@pytest.mark.ucx
async def test_from_gpu_to_gpu_by_rdma(
    on_a_stand_in: Path, gpudirect: Path, tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    need_ucx()
    settings = {"gpudirect": "on"}
    async with rack(tiny_llama_dir, transfer=settings, ship_by="ucx", listen_by="ucx") as running:
        for prompt in prompts(tiny_oracle, (1, 4, 5, 37)):
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            assert answer.report is not None
            assert answer.report.transport == "ucx"
        assert running.prefill[0]._exports._shipping._staging is None
        assert counted(gpudirect, "flushes") > 0


async def test_what_cannot_go_from_pool_to_pool_is_staged(
    on_a_stand_in: Path, tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    (prompt,) = prompts(tiny_oracle, (21,))
    # Blocks of another size; a decode worker whose GPU is out of reach; a pool that cannot be shared.
    for decode, fault in (({"block_size": 8}, {}), ({}, {"peers": 0, "devices": 2}), ({}, {"fail_handles": 1})):
        set_up(on_a_stand_in, **fault)
        async with rack(tiny_llama_dir, decode_engine=decode) as running:
            if "peers" in fault:
                running.prefill[0]._exports._shipping._senders.find("cuda_ipc://")._source._offer = FOREIGN  # type: ignore[attr-defined]
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
            assert answer.report is not None
            assert answer.report.transport == "shm"
            assert running.prefill[0]._exports._shipping._staging is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
async def test_the_same_text_on_a_gpu(
    tiny_llama_dir: Path, tiny_oracle: Oracle, devices: tuple[str, str], transport: str
) -> None:
    by = {"ship_by": transport, "listen_by": transport}
    here, there = ({"device": device} for device in devices)
    async with rack(tiny_llama_dir, engine=here, decode_engine=there, **by) as running:  # type: ignore[arg-type]
        for prompt in prompts(tiny_oracle, (1, 4, 5, 37)):
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
