"""A stranger floods a prefill worker's peer socket: the worker goes on with everything else meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zmq
from oracle import Oracle
from pace import allowed
from rack import rack
from test_handoff_faults import prompt_of

from protocol.codec import encode
from protocol.ids import Peer, RequestKey
from protocol.messages import Renew

FRAMES = 60_000


async def test_frames_that_wait_do_not_hold_the_loop(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, 11)
    truth = tiny_oracle.greedy(prompt, 12)
    async with rack(tiny_llama_dir) as running:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(running.prefill[0]._hub.endpoint)
        stranger.sndhwm = 0
        frame = encode(Peer("stranger", 1), Renew(key=RequestKey("nobody", 0), ttl=1.0))
        longest, watching = 0.0, True

        async def watch() -> None:
            nonlocal longest
            last = time.monotonic()
            while watching:
                await asyncio.sleep(0.005)
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        try:
            for _ in range(FRAMES):
                stranger.send(frame)
            watcher = asyncio.create_task(watch())
            assert (await running.ask(prompt)).token_ids == truth
            watching = False
            await watcher
            assert longest < allowed(0.5)
        finally:
            stranger.close(linger=0)
            context.term()
