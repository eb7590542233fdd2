"""A cancel just before and just after every single event of a request: nothing stays, whoever comes next is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from pace import allowed
from rack import Rack, rack
from test_handoff_faults import prompt_of

from protocol.ids import Peer, RequestKey
from protocol.messages import Cancel, Prefill, Reserve

MOST = 200


class Borders:
    """Counts what happens to two workers, and cancels on both at one border of it, at once and with no message.

    Args:
        running: one prefill and one decode worker.
    """

    def __init__(self, running: Rack) -> None:
        self._at = 0
        self._count = 0
        self._router: Peer | None = None
        self._key: RequestKey | None = None
        self._workers = (*running.prefill, *running.decode)
        self._task: asyncio.Task[Any] | None = None
        # Only what a loop calls from its top: within an event nothing else comes.
        for worker in self._workers:
            self._wrap(worker._link, "_on_message")
            self._wrap_work(worker._stepper, "execute")
        (prefill,), (decode,) = running.prefill, running.decode
        self._wrap(prefill._exports, "receive")
        self._wrap_work(prefill._exports, "_ship")
        self._wrap(decode._imports, "receive")
        self._wrap(decode._imports, "_landed")
        self._wrap_work(decode._imports, "_close_window")

    def arm(self, at: int, task: asyncio.Task[Any]) -> None:
        self._at, self._count, self._key, self._task = at, 0, None, task

    @property
    def met(self) -> bool:
        """Whether the request came as far as the border."""
        return self._count >= self._at

    def _wrap(self, owner: Any, name: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def wrapped(*arguments: Any) -> None:
            if len(arguments) == 2 and isinstance(arguments[1], Prefill | Reserve):
                self._router, self._key = arguments[0], arguments[1].key
            self._pass()
            inner(*arguments)
            self._pass()

        setattr(owner, name, wrapped)

    def _wrap_work(self, owner: Any, name: str) -> None:
        inner: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

        async def wrapped(*arguments: Any, **more: Any) -> Any:
            work = asyncio.ensure_future(inner(*arguments, **more))
            await asyncio.sleep(0)
            self._pass()
            try:
                return await work
            finally:
                self._pass()

        setattr(owner, name, wrapped)

    def _pass(self) -> None:
        self._count += 1
        if self._count != self._at:
            return
        assert self._task is not None
        self._task.cancel()
        if self._key is not None and self._router is not None:
            for worker in self._workers:
                worker._from_router(self._router, Cancel(key=self._key))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_cancel_at_every_border(tiny_llama_dir: Path, tiny_oracle: Oracle, transport: str) -> None:
    # Room for one request: the next one's blocks are those of the cancelled one.
    small: dict[str, object] = {"num_blocks": 17, "max_model_len": 64, "prefix_cache": False}
    doomed, later = prompt_of(tiny_oracle, 41), prompt_of(tiny_oracle, 42, 1)
    truth = tiny_oracle.greedy(later, 4)
    async with rack(tiny_llama_dir, engine=small, ship_by=transport, listen_by=transport) as running:
        borders = Borders(running)
        for at in range(1, MOST):
            task = asyncio.create_task(running.ask(doomed, max_tokens=4))
            borders.arm(at, task)
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), allowed(20.0))
            if not borders.met:
                break
            borders.arm(MOST, task)
            assert (await asyncio.wait_for(running.ask(later, max_tokens=4), allowed(20.0))).token_ids == truth, at
            await running.settle()
        else:
            pytest.fail("the request never came to its end")
        assert at > 30
