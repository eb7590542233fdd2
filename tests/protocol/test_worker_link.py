"""A worker's connections to routers that are there, and to those that are not yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq.asyncio
from test_older_wire import FRAMES

from cluster.port import bound_port
from protocol.codec import decode
from protocol.ids import Peer
from protocol.kv_publisher import KVPublisher
from protocol.messages import Heartbeat
from protocol.sockets import Hub
from protocol.worker_link import WorkerLink

MISSED = 200


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def test_what_is_told_while_no_router_is_there_does_not_wait_for_one(context: zmq.asyncio.Context) -> None:
    sample = next(body for frame in FRAMES if isinstance(body := decode(frame).body, Heartbeat))
    count = itertools.count(1)

    def heartbeat() -> Heartbeat:
        return msgspec.structs.replace(sample, load=msgspec.structs.replace(sample.load, prefill_tokens=next(count)))

    async def first_at(hub: Hub) -> int:
        _, envelope = await asyncio.wait_for(hub.receive(), 30)
        assert isinstance(envelope.body, Heartbeat)
        return envelope.body.load.prefill_tokens

    serving = Hub(context, Peer("router-0", 1), "tcp://127.0.0.1:0")
    # A hub that has gone may have taken the first connection yet: its socket closes some time after it.
    endpoints = serving.endpoint, f"tcp://127.0.0.1:{bound_port('127.0.0.1', 0, 'hub')}"
    publisher = KVPublisher(lambda: (b"", b""), lambda: b"")
    link = WorkerLink(
        context,
        Peer("worker", 1),
        endpoints,
        heartbeat=heartbeat,
        on_message=lambda *_: None,
        on_router_lost=lambda *_: None,
        publisher=publisher,
    )
    absent = None
    link.start()
    try:
        told = await first_at(serving)
        while told < MISSED:
            link.announce()
            told = await first_at(serving)
        absent = Hub(context, Peer("router-1", 1), endpoints[1])
        assert await first_at(absent) > MISSED
    finally:
        await link.close()
        serving.close()
        if absent is not None:
            absent.close()
