"""A worker hears its routers and its peers, or it ends and is started again: it is never deaf and well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from oracle import Oracle
from pace import allowed
from rack import rack, until
from test_handoff_faults import check_alive, prompt_of

from protocol.codec import encode
from protocol.ids import Peer
from protocol.messages import Heartbeat


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://x:y:z"])
async def test_a_prefill_worker_that_names_no_endpoint_harms_nobody_else(
    tiny_llama_dir: Path, tiny_oracle: Oracle, endpoint: str
) -> None:
    async with rack(tiny_llama_dir, router={"worker_timeout": 1.0, "lease_ttl": 1.0}) as running:
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        try:
            stranger.connect(running.service.hub_endpoint)
            assert running.prefill[0].profile is not None
            profile = msgspec.structs.replace(running.prefill[0].profile, peer_endpoint=endpoint)
            beat = Heartbeat(profile, running.prefill[0].load())
            await stranger.send(encode(Peer("stranger", time.time_ns()), beat))
            await until(lambda: running.service.health().prefill_workers == 2, "the stranger")
            # One of the two goes to the stranger first, and comes back when its heartbeats end.
            answers = asyncio.gather(*(running.ask(prompt_of(tiny_oracle, 11, seed)) for seed in (1, 2)))
            assert [answer.token_ids for answer in await asyncio.wait_for(answers, allowed(15.0))] == [
                tiny_oracle.greedy(prompt_of(tiny_oracle, 11, seed), 12) for seed in (1, 2)
            ]
            await check_alive(running, tiny_oracle)
        finally:
            stranger.close(linger=0)
            context.term()


@pytest.mark.parametrize("where", ["prefill", "decode", "decode's peers"])
async def test_a_receiving_loop_that_raised_ends_the_worker(tiny_llama_dir: Path, where: str) -> None:
    async with rack(tiny_llama_dir, router={"worker_timeout": 1.0, "request_timeout": 3.0}) as running:
        worker = running.prefill[0] if where == "prefill" else running.decode[0]

        def raises(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        if where == "decode's peers":
            running.decode[0]._peers._receive = raises
        else:
            worker._link._on_message = raises
        task = asyncio.create_task(running.ask([5, 6, 7, 8, 9]))
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(worker.wait(), allowed(5.0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # What it held ends with it.
        (running.prefill if where == "prefill" else running.decode).remove(worker)  # type: ignore[arg-type]
        await worker.stop()
