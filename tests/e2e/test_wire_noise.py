"""Strangers say what they like to every socket of a cluster: it stays up, stays small, and its text stays right."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Oracle
from pace import allowed
from rack import rack, until
from test_handoff_faults import check_alive

from protocol.codec import HEADER, encode
from protocol.ids import Peer, RequestKey
from protocol.messages import Abort, Cancel, ErrorInfo, Failed, Message, Renew, Settle, Tokens

KEY = RequestKey("nobody", 0)
STRANGER = Peer("stranger", 1)
KNOWN: tuple[Message, ...] = (
    Cancel(key=KEY),
    Settle(key=KEY),
    Renew(key=KEY, ttl=1.0),
    Abort(key=KEY, error=ErrorInfo(code="channel_lost", message="x")),
    Failed(key=KEY, error=ErrorInfo(code="no_such_code", message="x")),
    Tokens(key=KEY, start=0, token_ids=(1, 2)),
)
FIXED = (
    b"",
    HEADER,
    HEADER + b"\x91" * 100_000,
    HEADER + b"\x92\x92\xa1a\x01\x82\xa4type\xa6cancel\xa7unknown" + b"\x81\xa1a" * 100_000,
    HEADER + b"\xdd\xff\xff\xff\xff",
    HEADER + b"\x92\x92\xa1a\x01\x82\xa4type\xa5grant\xa6ticket\xc6\xff\xff\xff\xff",
    HEADER + bytes(1 << 20),
)
frames = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda tail: HEADER + tail),
    st.tuples(st.sampled_from(KNOWN), st.integers(0, 200)).map(lambda cut: encode(STRANGER, cut[0])[: cut[1]]),
    st.sampled_from(KNOWN).map(lambda message: encode(STRANGER, message)),
    st.sampled_from(FIXED),
)


async def test_no_frame_ends_a_router_or_a_worker(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir) as running:
        endpoints = (running.service.hub_endpoint, running.prefill[0]._hub.endpoint)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.lists(st.lists(frames, min_size=1, max_size=3), min_size=1, max_size=5))
        def speak(messages: list[list[bytes]]) -> None:
            with zmq.Context() as context:
                for endpoint in endpoints:
                    with context.socket(zmq.DEALER) as stranger:
                        stranger.connect(endpoint)
                        for parts in messages:
                            stranger.send_multipart(parts)
                        stranger.linger = 1000

        before = psutil.Process().memory_info().rss
        await asyncio.to_thread(speak)
        assert psutil.Process().memory_info().rss - before < 64 << 20
        heard = time.monotonic()
        await until(lambda: running.service.health().ready, "a router that is well")
        assert time.monotonic() - heard < allowed(5.0)
        await check_alive(running, tiny_oracle)
        everyone = {worker.me.name for worker in running.workers()}
        assert everyone == {worker["name"] for worker in running.service.cluster()["workers"]}
