"""A router with two prefill and two decode workers in processes of their own, and requests that a fault comes upon."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from crew import Crew, Hand, until
from pace import allowed

from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation, Output
from router.service import Service

LEASE = 2.0
LOST = 1.2
"""Seconds without a heartbeat after which a worker is lost."""
SLACK = 2.0
"""What may come on top of a time limit, on an idle machine."""
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the text that it must get.

    Attributes:
        prompt: token ids.
        truth: what must come.
        salt: of the prefix cache: a new one finds nothing there, and ships everything.
        choices: continuations that are asked for together, each of which must get the text.
    """

    prompt: tuple[int, ...]
    truth: tuple[int, ...]
    salt: str
    choices: int = 1


class Fleet:
    """See the module.

    Args:
        service: of the router.
        crew: hires the workers.
        model: they serve.
        scheme: by which blocks go.
        hub: where a worker of that name finds the router.

    Attributes:
        hands: workers by name.
        settled: seconds from each fault to the baseline of every survivor, by role and fault.
        retried: requests that took more than one attempt.
        held: stopped decode workers that kept a survivor's blocks in quarantine.
    """

    def __init__(
        self, service: Service, crew: Crew, model: Path, scheme: str, hub: Callable[[str], str] | None = None
    ) -> None:
        self.settled: dict[str, list[float]] = {}
        self.retried: Counter[int] = Counter()
        self.held = 0
        self._service = service
        self._crew = crew
        self._model = model
        self._scheme = scheme
        self._hub = hub or (lambda _: service.hub_endpoint)
        self.hands: dict[str, Hand] = {}

    async def hire(self, *names: str) -> None:
        """Start workers, and wait until the router knows them."""

        async def one(name: str) -> None:
            engine = {
                "model": str(self._model),
                "dtype": "float32",
                "num_blocks": 257,
                "block_size": 16,
                "max_batch_tokens": 64,
                "threads": 1,
            }
            settings = {
                "name": name,
                "model_name": MODEL,
                "engine": engine,
                "routers": [self._hub(name)],
                "transport": self._scheme,
                "transfer_timeout": 1.0,
            }
            self.hands[name] = await self._crew.hire(role=name.partition("-")[0], settings=settings)
            await self.hands[name].answer("ready", "me")

        await asyncio.gather(*map(one, names))
        await until(lambda: {self.hands[name].pid for name in names} <= self.live_pids(), "every heartbeat")

    def live_pids(self) -> set[int]:
        return {worker["pid"] for worker in self._service.cluster()["workers"] if worker["state"] == "live"}

    async def answer(self, requests: Sequence[Request]) -> None:
        """Each request gets exactly its text."""
        await asyncio.gather(*map(self._answer, requests))

    async def _answer(self, request: Request) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(request.truth))
        generation = Generation(request.prompt, sampling, cache_salt=request.salt, timeout=120.0)
        with self._service.together([generation] * request.choices) as streams:
            await asyncio.gather(*(self._read(request, stream) for stream in streams))

    async def _read(self, request: Request, stream: AsyncIterator[Output]) -> None:
        seen: list[int] = []
        async for output in stream:
            seen += output.token_ids
            assert tuple(seen) == request.truth[: len(seen)]
            if output.finish_reason is not None:
                assert output.report is not None
                assert output.report.transport in (self._scheme, "")
                self.retried[output.report.attempts] += 1
        assert tuple(seen) == request.truth

    async def strike(self, rng: random.Random, requests: Sequence[Request], round_seconds: float, number: int) -> None:
        """One fault at one worker at a random moment of the requests; everything must come right again."""
        victim = NAMES[number * 2 % 4 + rng.randrange(2)]
        fault = ("kill", "stop")[number // 2 % 2]
        hand = self.hands[victim]
        answers = asyncio.create_task(self.answer(requests))
        await asyncio.sleep(rng.uniform(0.0, 0.9) * round_seconds)
        if fault == "kill":
            hand.signal(signal.SIGKILL)
        else:
            await hand.stop()
        struck = time.monotonic()
        short = fault == "stop" and rng.random() < 0.3
        if short:
            # Back before anybody has given it up, or just as they do.
            await asyncio.sleep(rng.uniform(0.0, 1.2 * LOST))
            hand.signal(signal.SIGCONT)
        await answers
        survivors = [name for name in NAMES if name != victim or short]
        held = await self.settle(survivors, struck, may_hold=fault == "stop" and victim.startswith("decode"))
        self.settled.setdefault(f"{victim[:-2]} {fault}{', short' * short}", []).append(time.monotonic() - struck)
        self.held += held
        if fault == "kill":
            await hand.end()
            await self.hire(victim)
        elif not short:
            hand.signal(signal.SIGCONT)
            await until(lambda: hand.pid in self.live_pids(), "the heartbeat of the resumed worker")
            # What it had begun has been given to others: it drops it all, and its peers let go of the last block.
            await self.settle(NAMES, time.monotonic(), may_hold=False)

    async def settle(self, names: Sequence[str], since: float, *, may_hold: bool) -> bool:
        """Wait for the baseline of these workers; whether one had to keep blocks that a stopped reader may read."""
        limit = since + LOST + LEASE + allowed(SLACK)
        while True:
            looks = {name: await self.hands[name].ask("look") for name in names}
            busy = {name: look for name, look in looks.items() if look["unsettled"] or look["open"]}
            if not busy:
                return False
            if time.monotonic() > limit:
                draining = all(look["unsettled"] == look["draining"] for look in busy.values())
                excused = may_hold and draining and self._scheme == "shm"
                assert excused, f"not at the baseline: {busy}"
                return True
            await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(crew: Crew, model: Path, scheme: str) -> AsyncIterator[Fleet]:
    """The router and its workers, up."""
    config = RouterConfig(
        model=MODEL, tokenizer=str(model), worker_timeout=LOST, lease_ttl=LEASE, worker_wait=20.0, max_attempts=8
    )
    service = Service(config)
    await service.start()
    try:
        made = Fleet(service, crew, model, scheme)
        await made.hire(*NAMES)
        yield made
    finally:
        await service.close()
