"""A decode worker that stops while messages still come: the stop ends, and leaves no connection behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack, until
from test_handoff_faults import Gate, prompt_of

from protocol.messages import Cancel


@pytest.mark.timeout(60)
async def test_a_message_that_comes_while_a_decode_worker_stops(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir, router={"worker_timeout": 1.0, "request_timeout": 3.0}) as running:
        gate = Gate(running.prefill[0])
        task = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 22)))
        await until(lambda: running.decode[0].load().open_imports and gate.held, "a reservation")
        (key,) = running.decode[0]._imports.book._imports
        worker = running.decode.pop()
        (router,) = worker._link._peers
        close_peers = worker._peers.close

        async def close_while_a_message_comes() -> None:
            await close_peers()
            # As it happens when the router's cancel is the loop's next event; the abort needs a connection.
            worker._link._on_message(router, Cancel(key=key))

        worker._peers.close = close_while_a_message_comes  # type: ignore[method-assign]
        await worker.stop()
        gate.open()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
