"""The life of a survivor's peer, told by lines of JSON what to do; ``nursery.py`` starts it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from crew import until
from port import Port, holdings, pattern

from kv_transfer.transport import TransportConfig

TRUTH = pattern()


async def live(order: dict[str, object], reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
    port = Port(str(order["scheme"]), TransportConfig(timeout=float(str(order["timeout"]))), TRUTH)
    say(word="address", about="me", address=port.receiver.address)
    tasks: set[asyncio.Task[None]] = set()

    async def ship(words: dict[str, object]) -> None:
        code = await port.ship(words["address"], words["ticket"], words["size"], words["chunks"])  # type: ignore[arg-type]
        say(word="ship", about=words["ticket"], code=code)

    async for line in reader:
        words = json.loads(line)
        match words["word"]:
            case "ship":
                tasks.add(asyncio.create_task(ship(words)))
                tasks = {task for task in tasks if not task.done()}
            case "open":
                port.open(words["ticket"], words["blocks"], words["size"])
                say(word="open", about=words["about"])
            case "close":
                # The report comes a moment after the sender has its answer.
                if words["whole"]:
                    await until(lambda: len(port.landed[words["ticket"]]) == len(words["pairs"]), "the landing")  # noqa: B023
                await port.close(words["ticket"])
                landed = port.landed[words["ticket"]]
                # All that landed has the right bytes.
                pairs = [pair for pair in words["pairs"] if pair[1] in landed]
                right, blocks = port.right(pairs, words["size"]), [target for _, target in words["pairs"]]
                port.forget(words["ticket"])
                port.poison(blocks, words["size"])
                say(word="close", about=words["about"], landed=len(landed), right=right)
            case "look":
                open_now = {"windows": port.open_windows(), "ships": port.open_ships()}
                say(word="look", about=words["about"], **open_now, **holdings())
    await asyncio.gather(*tasks)
    await port.shut()
