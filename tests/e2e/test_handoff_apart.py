"""A prefill worker, a decode worker and a router, each on a host of its own, and the link between the first two cut."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from namespaces import Lan
from oracle import Oracle
from rack import rack, until
from test_handoff_faults import Gate

from kv_transfer.ucx import describe

pytestmark = pytest.mark.apart

CUT = 3.0
"""Seconds: longer than the transfer's patience, shorter than the lease's and the router's."""
PATIENCE = 1.0


@pytest.mark.parametrize("by", ["tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
async def test_the_text_is_right_and_the_link_may_be_cut_in_the_middle(
    by: str, tiny_llama_dir: Path, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "ucx":
        # Namespaces of one machine share its memory, which UCX would find and use.
        monkeypatch.setenv("UCX_TLS", "tcp")
        found = await asyncio.to_thread(describe)
        if not found.usable:
            pytest.skip(found.reason)
    lan = Lan.joined()
    assert lan is not None
    rng = random.Random(7)
    asked = [[rng.randrange(3, tiny_oracle.vocab_size) for _ in range(length)] for length in (1, 5, 30, 41)]
    truths = [tiny_oracle.greedy(prompt, 12) for prompt in asked]
    async with rack(
        tiny_llama_dir,
        hosts=lan.hosts,
        ship_by=by,
        listen_by=by,
        transfer={"transfer_timeout": PATIENCE},
        engine={"prefix_cache": False},
    ) as running:
        before = lan.hosts["decode"].received()
        answers = await asyncio.gather(*(running.ask(prompt) for prompt in asked))
        assert [answer.token_ids for answer in answers] == truths
        assert all(answer.report is not None and answer.report.transport == by for answer in answers)
        assert lan.hosts["decode"].received() - before > sum(worker.load().kv_bytes for worker in running.decode)

        (prefill,) = running.prefill
        shipped = prefill.load().kv_blocks
        gate = Gate(prefill, open_for=1)
        task = asyncio.create_task(running.ask(asked[-1]))
        await until(lambda: gate.held and prefill.load().kv_blocks > shipped, "a prompt that is half shipped")
        with lan.parted("prefill", "decode"):
            ends = time.monotonic() + CUT
            gate.open()
            await until(lambda: time.monotonic() > ends, "the end of the cut")
            assert not task.done()
        answer = await task
        assert answer.token_ids == truths[-1]
        # The ship was given up. What it had left to the system may land once the link is back, and then decode, which
        # has the hand-over, goes on with that; else another attempt has begun.
        assert prefill.transfer().ended["broken"] == 1
        await running.settle()
        assert (await running.ask(asked[2])).token_ids == truths[2]
