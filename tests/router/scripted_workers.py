"""Workers without a model: real spokes on a real hub, and a text that is a function of the tokens before it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import zmq.asyncio
from worker_facts import heartbeat

from protocol.errors import KVFerryError
from protocol.ids import Peer, RequestKey, Role
from protocol.messages import Cancel, ErrorInfo, Failed, Message, Prefill, Reserve, StageTimes, Tokens
from protocol.sampling import SamplingParams
from protocol.sockets import Spoke
from router.service import Service

BEAT = 0.05
_incarnations = itertools.count(1)


def next_token(tokens: Sequence[int]) -> int:
    """A token that depends on each one before it, so that one lost or doubled changes all that follow."""
    return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=2).digest()[0] + 10


def whole_text(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


async def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 -- no event tells of it
            await asyncio.sleep(0.005)


async def known(service: Service, workers: int) -> None:
    """The router knows so many workers, and whose each connection is."""
    assert service._hub is not None
    owners = service._hub._connections._owners
    await until(lambda: len(service.cluster()["workers"]) == len(owners) == workers)


class Ferry:
    """Stands for the KV plane: prefill lays a handover down, decode takes it up."""

    def __init__(self) -> None:
        self._landed: dict[RequestKey, asyncio.Event] = {}

    def landed(self, key: RequestKey) -> asyncio.Event:
        return self._landed.setdefault(key, asyncio.Event())


class ScriptedWorker:
    """One worker of either role.

    `hold` stops decode before the output token of that index until it is set to None; `refuse` answers each
    leg with that error; `deaf` takes work and never answers.
    """

    def __init__(
        self, context: zmq.asyncio.Context, ferry: Ferry, role: Role, name: str, endpoint: str, **load: object
    ) -> None:
        self.peer = Peer(name, next(_incarnations))
        self.role = role
        self.load = load
        self.hold: int | None = None
        self.refuse: KVFerryError | None = None
        self.deaf = False
        self.silent = False
        self.opened: list[Prefill | Reserve] = []
        self.cancels: list[RequestKey] = []
        self.told = 0
        self._ferry = ferry
        self._spoke = Spoke(context, self.peer, endpoint)
        self._legs: dict[RequestKey, asyncio.Task[None]] = {}
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    async def kill(self) -> None:
        tasks = [*self._tasks, *self._legs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._spoke.close()

    def send(self, body: Message) -> None:
        self._spoke.send(body)

    async def _beat(self) -> None:
        while True:
            if not self.silent:
                self.send(heartbeat(self.role, **self.load))
            await asyncio.sleep(BEAT)

    async def _receive(self) -> None:
        while True:
            body = (await self._spoke.receive()).body
            if isinstance(body, Cancel):
                self.cancels.append(body.key)
                leg = self._legs.pop(body.key, None)
                if leg is not None:
                    leg.cancel()
                continue
            assert isinstance(body, Prefill if self.role == "prefill" else Reserve)
            self.opened.append(body)
            forks = [msgspec.structs.replace(body, key=fork.key, forks=()) for fork in body.forks]
            for work in (body, *forks):
                if self.refuse is not None:
                    self.send(Failed(key=work.key, error=ErrorInfo.of(self.refuse)))
                elif not self.deaf:
                    run = self._prefill(work) if isinstance(work, Prefill) else self._decode(work)
                    self._legs[work.key] = asyncio.create_task(run)

    async def _prefill(self, work: Prefill) -> None:
        token = next_token(work.token_ids)
        finish = work.sampling.finish_reason(token, work.emitted + 1)
        times = StageTimes(prefill_queue=0.001, prefill=0.002, cached_tokens=1)
        self.send(Tokens(key=work.key, start=work.emitted, token_ids=(token,), finish_reason=finish, times=times))
        assert finish is not None or work.handoff is not None
        self._ferry.landed(work.key).set()

    async def _decode(self, work: Reserve) -> None:
        await self._ferry.landed(work.key).wait()
        tokens = [*work.token_ids, next_token(work.token_ids)]
        produced = work.emitted + 1
        times: StageTimes | None = StageTimes(handoff=0.003, ship=0.001, kv_blocks=2, kv_bytes=512, transport="inproc")
        finish = None
        while finish is None:
            reached = produced
            await until(lambda reached=reached: self.hold is None or reached < self.hold, within=60.0)
            tokens.append(next_token(tokens))
            finish = work.sampling.finish_reason(tokens[-1], produced + 1)
            self.send(Tokens(key=work.key, start=produced, token_ids=(tokens[-1],), finish_reason=finish, times=times))
            times, produced, self.told = None, produced + 1, self.told + 1
            await asyncio.sleep(0)


class Fleet:
    """The workers of one test, all gone at its end."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._ferry = Ferry()
        self._endpoint = endpoint
        self._workers: list[ScriptedWorker] = []

    def add(self, role: Role, name: str, **load: object) -> ScriptedWorker:
        worker = ScriptedWorker(self._context, self._ferry, role, name, self._endpoint, **load)
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def fleet_at(endpoint: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(endpoint)
    try:
        yield fleet
    finally:
        await fleet.close()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)
