"""A stranger fills a hub's queue and leaves: the process that owns the hub goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# In a process of its own, for libzmq ends the one that it happens in.
SCRIPT = """
import asyncio, time
import zmq, zmq.asyncio
from protocol.ids import Peer
from protocol.sockets import HIGH_WATER_MARK, Hub

async def main():
    context = zmq.asyncio.Context()
    hub = Hub(context, Peer("router", 1), "tcp://127.0.0.1:0")
    strangers = zmq.Context()
    stranger = strangers.socket(zmq.DEALER)
    stranger.sndhwm = 0
    stranger.connect(hub.endpoint)
    for _ in range(3 * HIGH_WATER_MARK):
        stranger.send(b"x" * 64)
    time.sleep(0.5)
    stranger.close(linger=0)
    strangers.term()
    time.sleep(2.0)  # more than the interval of ZeroMQ's own heartbeats
    print(hub._socket.raw.recv_multipart()[-1] == b"x" * 64)
    hub.close()
    context.destroy(linger=0)

asyncio.run(main())
"""


def test_a_stranger_that_fills_the_queue_and_leaves_does_not_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
