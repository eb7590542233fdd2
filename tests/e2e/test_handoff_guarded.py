"""Checksums and the cluster's secret, from the prompt to the text."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack, until

from decode_worker.worker import DecodeWorker
from kv_transfer.ucx import describe

PROMPT = [5, 9, 4, 7, 11, 3, 8, 6, 10, 12]
SECRET = {"secret": "the secret of this cluster"}
OTHER = {"secret": "the secret of another one"}


@pytest.fixture(params=["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
async def wired(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx":
        found = await asyncio.to_thread(describe)
        if not found.usable:
            pytest.skip(found.reason)
    return str(request.param)


async def test_the_text_is_the_same_with_checksums_and_a_secret(
    wired: str, tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(
        tiny_llama_dir,
        ship_by=wired,
        listen_by=wired,
        router=SECRET,
        transfer={**SECRET, "transfer_checksum": True},
    ) as running:
        answer = await running.ask(PROMPT)
        assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
        assert running.decode[0].load().kv_blocks


@pytest.mark.parametrize("strange", [OTHER, {"secret": ""}], ids=["another", "none"])
async def test_a_worker_without_the_secret_does_not_join(
    tiny_llama_dir: Path, tiny_oracle: Oracle, strange: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with rack(tiny_llama_dir, router=SECRET, transfer=SECRET) as running:
        known = running.decode[0].config
        stranger = DecodeWorker(dataclasses.replace(known, name="stranger", **strange))  # type: ignore[arg-type]
        await stranger.start()
        try:
            await until(lambda: "does not speak with us" in caplog.text, "the refusal")
            assert [worker["name"] for worker in running.service.cluster()["workers"]] == ["decode-0", "prefill-0"]
            answer = await running.ask(PROMPT)
            assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
        finally:
            await stranger.stop()
