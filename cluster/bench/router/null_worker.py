"""Workers that speak the wire and compute nothing: prefill answers at once, decode by a clock.

Life cycle: made, :meth:`NullWorker.start` once, :meth:`NullWorker.close` once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq.asyncio

from protocol.ids import Peer, RequestKey, Role
from protocol.kv_publisher import KVPublisher
from protocol.layout import KVLayout
from protocol.loops import Loops
from protocol.messages import (
    Cancel,
    Heartbeat,
    Message,
    PoolCounts,
    Prefill,
    Reserve,
    StageTimes,
    Tokens,
    WorkerLoad,
    WorkerProfile,
)
from protocol.sampling import SamplingParams
from protocol.worker_link import WorkerLink

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=8, block_size=16)
POOL = PoolCounts(free=1, active=0, cached=0, exported=0, importing=0, draining=0, reserved=1, total=2)
CONTEXT = 1 << 20


@dataclass(slots=True)
class _Sequence:
    router: Peer
    sampling: SamplingParams
    produced: int


class NullWorker:
    """One worker of either role.

    Args:
        role: prefill or decode.
        model: served name.
        vocab_size: announced.
        hub: of the router.
        text: tokens that each answer goes through, over and over.

    Attributes:
        step: seconds between two tokens of each sequence; 0 makes them as fast as they can be sent.
        cancels: when a cancel came, on this machine's monotonic clock.
    """

    def __init__(self, role: Role, model: str, vocab_size: int, hub: str, text: Sequence[int]) -> None:
        self.step = 0.0
        self.cancels: list[float] = []
        self._text = tuple(text)
        self._sequences: dict[RequestKey, _Sequence] = {}
        self._wake = asyncio.Event()
        self._loops = Loops()
        self._context = zmq.asyncio.Context()
        profile = WorkerProfile(
            role=role,
            model=model,
            vocab_size=vocab_size,
            max_model_len=CONTEXT,
            layout=LAYOUT,
            num_blocks=POOL.total,
            peer_endpoint="tcp://127.0.0.1:1" if role == "prefill" else "",
        )
        self._link = WorkerLink(
            self._context,
            Peer(f"{role}-0", time.time_ns()),
            (hub,),
            heartbeat=lambda: Heartbeat(profile, WorkerLoad(pool=POOL)),
            on_message=self._from_router,
            on_router_lost=lambda _: None,
            publisher=KVPublisher(lambda: (b"", b""), bytes),
        )

    def start(self) -> None:
        """Announce itself and serve."""
        self._link.start()
        self._loops.start("steps", self._steps())

    async def close(self) -> None:
        """Stop; no socket is left."""
        await self._loops.stop()
        await self._link.close()
        self._context.term()

    def _from_router(self, router: Peer, message: Message) -> None:
        match message:
            case Prefill(key=key, emitted=emitted, sampling=sampling):
                self._tell(key, _Sequence(router, sampling, emitted))
            case Reserve(key=key, emitted=emitted, sampling=sampling):
                self._sequences[key] = _Sequence(router, sampling, emitted + 1)
                self._wake.set()
            case Cancel(key=key):
                self._sequences.pop(key, None)
                self.cancels.append(time.monotonic())

    def _tell(self, key: RequestKey, sequence: _Sequence) -> bool:
        """Send the next token; whether it is the last."""
        start = sequence.produced
        token = self._text[start % len(self._text)]
        finish = sequence.sampling.finish_reason(token, start + 1)
        times = StageTimes() if start <= 1 else None
        self._link.send(
            sequence.router, Tokens(key=key, start=start, token_ids=(token,), finish_reason=finish, times=times)
        )
        sequence.produced += 1
        return finish is not None

    async def _steps(self) -> None:
        due = 0.0
        while True:
            if not self._sequences:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
            for key, sequence in list(self._sequences.items()):
                if self._tell(key, sequence):
                    self._sequences.pop(key, None)
            due = max(due + self.step, time.monotonic() - self.step)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
