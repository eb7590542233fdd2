"""Checksums and the cluster's secret, from the prompt to the text, by every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack

from kv_transfer.ucx import describe
from protocol.errors import AuthenticationFailed

PROMPT = [5, 9, 4, 7, 11, 3, 8, 6, 10, 12]
SECRET = {"transfer_secret": "the secret of this cluster"}
OTHER = {"transfer_secret": "the secret of another one"}


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
        tiny_llama_dir, ship_by=wired, listen_by=wired, transfer={**SECRET, "transfer_checksum": True}
    ) as running:
        answer = await running.ask(PROMPT)
        assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
        assert running.decode[0].load().kv_blocks


async def test_a_decode_worker_with_another_secret_gets_no_block_and_the_client_a_clear_error(
    wired: str, tiny_llama_dir: Path
) -> None:
    async with rack(tiny_llama_dir, ship_by=wired, listen_by=wired, transfer=SECRET, decode_transfer=OTHER) as running:
        with pytest.raises(AuthenticationFailed):
            await running.ask(PROMPT)
        assert not running.decode[0].load().kv_blocks
