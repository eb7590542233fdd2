"""A message that opens an attempt which has ended already: late, or twice. It changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle import Oracle
from pace import allowed
from rack import Rack, rack, until
from test_handoff_faults import Gate, check_alive, prompt_of

from protocol.ids import Peer
from protocol.messages import Cancel, Message, Prefill, Reserve


def everything_idle(running: Rack) -> None:
    (prefill,), (decode,) = running.prefill, running.decode
    assert decode._scheduler.idle, "a sequence stays on the decode worker"
    assert not prefill._routers, "a prompt stays on the prefill worker"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_cancel_overtakes_the_message_that_opens(tiny_llama_dir: Path, tiny_oracle: Oracle, role: str) -> None:
    async with rack(tiny_llama_dir, engine={"max_sequences": 1}) as running:
        worker = (running.prefill if role == "prefill" else running.decode)[0]
        held: list[tuple[Peer, Message]] = []
        deliver = worker._link._on_message
        worker._link._on_message = lambda *message: held.append(message)
        task = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 22)))
        await until(lambda: held, "the message that opens")
        task.cancel()
        await until(lambda: len(held) > 1, "the cancel")
        worker._link._on_message = deliver
        assert isinstance(held[0][1], Prefill | Reserve)
        assert isinstance(held[1][1], Cancel)
        for message in reversed(held):
            deliver(*message)
        await running.settle()
        everything_idle(running)
        await asyncio.wait_for(check_alive(running, tiny_oracle), allowed(10.0))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["leaving", "ended"])
async def test_the_message_that_opens_comes_twice(
    tiny_llama_dir: Path, tiny_oracle: Oracle, role: str, when: str
) -> None:
    async with rack(tiny_llama_dir, engine={"max_sequences": 1}) as running:
        worker = (running.prefill if role == "prefill" else running.decode)[0]
        opening: list[tuple[Peer, Message]] = []
        deliver = worker._link._on_message

        def keep(router: Peer, message: Message) -> None:
            if isinstance(message, Prefill | Reserve):
                opening.append((router, message))
            deliver(router, message)

        worker._link._on_message = keep
        gate = Gate(worker, open_for=0)
        task = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 22)))
        await until(lambda: gate.held, "a step")
        if when == "leaving":
            task.cancel()
            await until(lambda: not running.service._dispatcher.live_requests, "the cancel")
            await asyncio.sleep(0.1)
            deliver(*opening[0])
            gate.open()
        else:
            gate.open()
            await task
            await running.settle()
            deliver(*opening[0])
        await asyncio.gather(task, return_exceptions=True)
        await running.settle()
        await asyncio.sleep(0.3)
        await running.settle()
        everything_idle(running)
        await asyncio.wait_for(check_alive(running, tiny_oracle), allowed(10.0))
