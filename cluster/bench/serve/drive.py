"""Plays a pacer against the clock: sends what is due, and waits for the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cluster.bench.serve.pacer import Order, Pacer


async def drive(pacer: Pacer, ask: Callable[[Order], Awaitable[None]], clock: Callable[[], float]) -> None:
    """Send all orders of ``pacer``, each as a task of its own, and wait until all have been answered.

    Args:
        pacer: says when.
        ask: sends one and waits for its answer; raises nothing that belongs to one request only.
        clock: the time that the pacer goes by, in seconds.
    """
    woken = asyncio.Event()

    async def one(order: Order) -> None:
        try:
            await ask(order)
        finally:
            pacer.answered()
            woken.set()

    async with asyncio.TaskGroup() as asked:
        while True:
            woken.clear()
            for order in pacer.due(clock()):
                asked.create_task(one(order))
            if pacer.over:
                return
            at = pacer.next_at()
            if at is None:
                await woken.wait()
            else:
                await asyncio.sleep(max(0.0, at - clock()))
