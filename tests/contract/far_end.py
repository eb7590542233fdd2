"""The other process of the contract tests: ``far_end.py send|receive``, told what to do line by line in JSON."""

import asyncio
import json
import sys

import numpy as np
from ferry import as_pool, bind

from engine.shared_memory import allocate
from kv_transfer.cuda_ipc import driver
from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from kv_transfer.transport import ON_DEVICES, TransportConfig, Window, make_receiver, make_sender
from protocol.errors import KVFerryError


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def hear() -> dict[str, object] | None:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


async def send() -> None:
    order = await hear()
    assert order is not None
    blocks, size = int(order["blocks"]), int(order["block_bytes"])
    memory, descriptor = allocate(blocks * size)
    pool = np.frombuffer(memory, np.uint8).reshape(blocks, size)
    pool[:] = int(order["value"])
    config = TransportConfig(timeout=float(order["timeout"]))
    scheme = str(order["scheme"])
    shipped: memoryview | DeviceMemory = memoryview(pool)
    if "cuda" in order:
        driver.LIBRARY = str(order["cuda"])
        shipped = as_pool(scheme, shipped)
    elif scheme in ON_DEVICES:
        import torch  # most far ends do without, and it takes a second

        tensor = torch.from_numpy(pool).to("cuda:0")
        torch.cuda.synchronize()
        shipped = DeviceMemory(tensor.data_ptr(), tensor.nbytes, 0)
    sender = make_sender(scheme, shipped, config, descriptor=descriptor)
    say(ready=True)
    while order := await hear():
        spans = [Span(block * size, block * size, size) for block in order["blocks"]]
        named = [(block, int(order["generation"])) for block in order["blocks"]]
        try:
            await sender.ship(str(order["address"]), bytes.fromhex(str(order["ticket"])), spans, named)
            say(result="shipped")
        except KVFerryError as error:
            say(result=error.code, message=error.message)
    await sender.close()


async def receive() -> None:
    order = await hear()
    assert order is not None
    blocks, size = int(order["blocks"]), int(order["block_bytes"])
    pool = np.zeros((blocks, size), np.uint8)
    where = bind(str(order["scheme"]), str(order["host"]))
    receiver = make_receiver(where, memoryview(pool), TransportConfig(buffer_bytes=64 << 10))
    window = Window(bytes.fromhex(str(order["ticket"])), tuple(range(blocks)), (7,) * blocks, size)
    receiver.open(window, lambda _: say(landed=True), lambda *_: say(broken=True))
    say(address=receiver.address)
    await hear()
    await receiver.close()


if __name__ == "__main__":
    asyncio.run({"send": send, "receive": receive}[sys.argv[1]]())
