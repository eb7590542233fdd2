"""A byte that changes on its way costs a retry, and never a wrong token, by every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from damage import damage
from oracle import Oracle
from rack import rack

from kv_transfer.ucx import describe

PROMPT = [5, 9, 4, 7, 11, 3, 8, 6, 10, 12]


@pytest.mark.parametrize("scheme", ["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
async def test_the_text_is_the_same_after_a_flipped_bit(tiny_llama_dir: Path, tiny_oracle: Oracle, scheme: str) -> None:
    if scheme == "ucx":
        found = await asyncio.to_thread(describe)
        if not found.usable:
            pytest.skip(found.reason)
    async with rack(tiny_llama_dir, ship_by=scheme, listen_by=scheme, transfer={"transfer_checksum": True}) as running:
        receiver = running.decode[0]._imports._receiver
        async with damage(scheme, receiver.address) as (address, striking):
            # Grants name where the receiver says it is.
            receiver._address = address  # type: ignore[attr-defined]
            striking.strikes = True
            answer = await running.ask(PROMPT)
            assert not striking.strikes
            assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
            metrics = running.service.metrics().decode()
            assert 'kvferry_retries_total{code="integrity_mismatch"} 1.0' in metrics
            await running.settle()
            for sender in running.prefill[0]._exports._shipping._senders._senders.values():
                await sender.close()
