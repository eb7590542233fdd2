"""A cancel finds the send and the receive in flight: each side's blocks wait for its own completion, in any order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from pace import allowed
from rack import rack, until
from test_handoff_faults import check_alive, prompt_of


class Held:
    """A coroutine method whose completions are reported when the test says so."""

    def __init__(self, owner: Any, name: str) -> None:
        self._inner = getattr(owner, name)
        self._open = asyncio.Event()
        self.waiting = 0
        setattr(owner, name, self._call)

    async def _call(self, *arguments: Any, **named: Any) -> Any:
        try:
            return await self._inner(*arguments, **named)
        finally:
            self.waiting += 1
            await self._open.wait()

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("order", ["send first", "receive first", "both at once"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_completions_after_a_cancel(
    tiny_llama_dir: Path, tiny_oracle: Oracle, transport: str, order: str
) -> None:
    async with rack(tiny_llama_dir, ship_by=transport, listen_by=transport) as running:
        await check_alive(running, tiny_oracle, 5)
        (prefill,), (decode,) = running.prefill, running.decode
        send = Held(prefill._exports._shipping._senders._senders[transport], "ship")
        receive = Held(decode._imports._receiver, "close_window")
        task = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 22)))
        await until(lambda: send.waiting and decode.load().open_imports, "a ship whose completion is on its way")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        def draining() -> tuple[bool, bool]:
            return prefill.load().pool.draining > 0, decode.load().pool.draining > 0

        await until(lambda: draining() == (True, True) and receive.waiting, "the cancel on both sides")
        if order == "both at once":
            send.open()
        else:
            first, second = (send, receive) if order == "send first" else (receive, send)
            first.open()
            expected = (False, True) if first is send else (True, False)
            await until(lambda: draining() == expected, "the end of the one side alone")
            second.open()
        receive.open()
        await running.settle(allowed(5.0))
        await check_alive(running, tiny_oracle)
