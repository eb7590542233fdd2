"""GB/s of a transport (``tcp`` by default) against a plain vectored socket loop, two processes on loopback.

Both move the same scattered blocks between the same pools, turn about, so that what else runs on the machine hits
both alike. GB/s are of medians from the call to the acknowledgement; *landed* is the median from the call to the
receiver's callback. Usage: ``python benchmarks/transfer.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import uvloop

from kv_transfer.plan import plan
from kv_transfer.transport import TransportConfig, Window, make_receiver, make_sender
from protocol.layout import KVLayout

KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 8192 * KIB, 65536 * KIB)
LAYOUT = KVLayout(num_layers=8, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
"""64 KiB a block."""
POOL_BLOCKS = 2 * max(SIZES) // LAYOUT.block_bytes
IOV = 64


def chosen(size: int, seed: int) -> list[int]:
    """Blocks of one transfer, scattered over the pool."""
    return random.Random(seed).sample(range(POOL_BLOCKS), size // LAYOUT.block_bytes)  # noqa: S311


def views(pool: memoryview, blocks: Sequence[int]) -> list[memoryview]:
    """The memory of each block."""
    size = LAYOUT.block_bytes
    return [pool[block * size : (block + 1) * size] for block in blocks]


def move(buffers: list[memoryview], call: Callable[[list[memoryview]], int]) -> None:
    """Move all buffers by one vectored call after the other."""
    index = offset = 0
    while index < len(buffers):
        offset += call([buffers[index][offset:], *buffers[index + 1 : index + IOV]])
        index += offset // LAYOUT.block_bytes
        offset %= LAYOUT.block_bytes


def received(connection: socket.socket, batch: list[memoryview]) -> int:
    """One vectored receive."""
    return connection.recvmsg_into(batch)[0]


def serve_plain(listener: socket.socket, pool: memoryview) -> None:
    """The plain loop's receiving side: a size, the blocks, one byte back."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while size := int.from_bytes(connection.recv(8, socket.MSG_WAITALL)):
        move(views(pool, chosen(size, 2)), partial(received, connection))
        connection.sendall(b"\1")
    connection.close()


async def receive(config: TransportConfig) -> None:
    """The receiving process: opens a window for each line on its input, until the input ends."""
    pool = memoryview(bytearray(b"\1") * LAYOUT.pool_bytes(POOL_BLOCKS))
    receiver = make_receiver("tcp://127.0.0.1:0", pool, config)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    plain = threading.Thread(target=serve_plain, args=(listener, pool))
    plain.start()
    print(json.dumps([receiver.address, listener.getsockname()[1]]), flush=True)
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[float]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line == "ready?\n":
            print(flush=True)
            continue
        ticket, size = json.loads(line)
        blocks = tuple(chosen(size, 2))
        landed = loop.create_future()
        window = Window(bytes.fromhex(ticket), blocks, (1,) * len(blocks), LAYOUT.block_bytes)
        receiver.open(window, lambda _, landed=landed: landed.set_result(time.monotonic()), lambda *_: None)
        print(flush=True)
        print(await landed, flush=True)
        await receiver.close_window(window.ticket)
    plain.join()
    listener.close()
    await receiver.close()


def ship_plain(connection: socket.socket, pool: memoryview, size: int) -> float:
    """Seconds of one transfer by the plain loop."""
    buffers = views(pool, chosen(size, 1))
    started = time.perf_counter()
    connection.sendall(size.to_bytes(8))
    move(buffers, connection.sendmsg)
    connection.recv(1, socket.MSG_WAITALL)
    return time.perf_counter() - started


def ask(peer: subprocess.Popen[str], line: str) -> None:
    """Give the receiving process a line and await its answer."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(line + "\n")
    peer.stdin.flush()
    peer.stdout.readline()


async def measure(peer: subprocess.Popen[str], config: TransportConfig, seconds: float) -> None:
    """Interleave both ways over all sizes and print a table."""
    assert peer.stdout is not None
    address, port = json.loads(peer.stdout.readline())
    pool = memoryview(bytearray(random.Random(0).randbytes(LAYOUT.pool_bytes(POOL_BLOCKS))))  # noqa: S311
    sender = make_sender("tcp", pool, config)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    print(f"{config}, blocks of {LAYOUT.block_bytes // KIB} KiB, scattered")
    print(f"{'KiB':>8} {'rounds':>7} {'kvferry GB/s':>13} {'plain GB/s':>11} {'ratio':>6} {'landed ms':>10}")
    for size in SIZES:
        spans = plan(LAYOUT, chosen(size, 1), LAYOUT, chosen(size, 2))
        named = [(block, 1) for block in chosen(size, 2)]
        ours: list[float] = []
        theirs: list[float] = []
        landings: list[float] = []
        until = time.monotonic() + seconds / len(SIZES)
        while time.monotonic() < until or len(ours) < 5:
            ticket = secrets.token_bytes(16)
            ask(peer, json.dumps([ticket.hex(), size]))
            # The monotonic clock is one for all processes of a machine.
            started = time.monotonic()
            await sender.ship(address, ticket, spans, named)
            ours.append(time.monotonic() - started)
            landings.append(float(peer.stdout.readline()) - started)
            # The same exchange before either: both find the two processes as they are after one.
            ask(peer, "ready?")
            theirs.append(ship_plain(connection, pool, size))
        mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
        landed = statistics.median(landings[1:]) * 1e3
        speeds = f"{size / mine / 1e9:13.2f} {size / other / 1e9:11.2f} {other / mine:6.2f}"
        print(f"{size // KIB:8d} {len(ours):7d} {speeds} {landed:10.2f}", flush=True)
    connection.sendall(bytes(8))
    connection.close()
    await sender.close()


def main() -> None:
    """Start the receiving process and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("tcp", "ucx"), default="tcp")
    parser.add_argument("--streams", type=int, default=TransportConfig().streams)
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = TransportConfig(streams=arguments.streams, checksum=arguments.checksum)
    if arguments.receive:
        uvloop.run(receive(config))
        return
    command = [sys.executable, __file__, "--receive", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: S603
        uvloop.run(measure(peer, config, arguments.seconds))


if __name__ == "__main__":
    main()
