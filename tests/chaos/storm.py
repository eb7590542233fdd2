"""Streams over HTTP, while workers are killed, stopped and started again, their links cut, and clients leave."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crew import Crew, until
from fleet import LEASE, LOST, MODEL, NAMES, Fleet
from link import Link, link_to
from pace import allowed
from tokenizers import Tokenizer

from protocol.errors import NoWorkerAvailable
from router.client import AsyncClient
from router.config import RouterConfig
from router.server import RouterServer

AT_ONCE = 24
"""Streams that are open at a time."""
LEAVING = 0.15
"""Share of the clients that leave before the end."""
HUNG = 60.0
"""Seconds after which a stream hangs, on an idle machine."""
LONGEST = 10.0
"""Seconds at most that a worker's silence, or a lease, lasts."""
LOOK = 0.005


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt and the text that it must get.

    Attributes:
        prompt: token ids.
        params: of the request.
        truth: the text.
        tokens: how many it has.
    """

    prompt: tuple[int, ...]
    params: dict[str, Any]
    truth: str
    tokens: int


class Storm:
    """See the module.

    Attributes:
        ended: streams by how they ended.
        struck: faults by kind.
        longest: seconds that a stream took at most.
    """

    def __init__(
        self, server: RouterServer, client: AsyncClient, fleet: Fleet, links: dict[str, Link], lost: float
    ) -> None:
        self.ended: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.longest = 0.0
        self._server = server
        self._client = client
        self._fleet = fleet
        self._links = links
        self._lost = lost
        self._none_left = 0.0

    async def seeded(self, prompt: tuple[int, ...], tokens: int, seed: int) -> Script:
        """What a sampled request gets in fair weather is what it must get in foul."""
        params = {"max_tokens": tokens, "temperature": 0.8, "seed": seed, "ignore_eos": True}
        answer = await self._client.complete(list(prompt), **params)
        return Script(prompt, params, answer.text, tokens)

    def greedy(self, prompt: tuple[int, ...], truth: Sequence[int], tokenizer: Tokenizer) -> Script:
        params = {"max_tokens": len(truth), "temperature": 0, "ignore_eos": True}
        return Script(prompt, params, tokenizer.decode(list(truth)), len(truth))

    # --- streams ---------------------------------------------------------------------------------------------------

    async def read(self, script: Script, leave_after: int | None = None, salt: str = "") -> None:
        """One stream: it gives its text and no other, or one clear error when there was no worker."""
        began, text, finish, usage = time.monotonic(), "", None, None
        try:
            async with asyncio.timeout(allowed(HUNG)):
                stream = await self._client.stream(
                    list(script.prompt), stream_options={"include_usage": True}, cache_salt=salt, **script.params
                )
                async with stream:
                    pieces = 0
                    async for chunk in stream:
                        text += chunk.text
                        finish, usage = chunk.finish_reason or finish, chunk.usage or usage
                        pieces += 1
                        assert script.truth.startswith(text), f"{text!r} is not how {script.truth!r} begins"
                        if leave_after is not None and pieces > leave_after:
                            self.ended["left"] += 1
                            return
        except TimeoutError:
            raise AssertionError(f"a stream hangs with {len(text)} of {len(script.truth)} characters") from None
        except NoWorkerAvailable as error:
            # There may be none since the last look.
            if self._server.service.health().ready and self._none_left < began:
                raise AssertionError(f"there were workers all the time: {error.message}") from error
            self.ended["no worker was left"] += 1
            return
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        assert (text, finish) == (script.truth, "length")
        assert usage is not None
        assert usage.completion_tokens == script.tokens
        self.ended["right"] += 1

    async def run(self, rng: random.Random, scripts: Sequence[Script], streams: int, faults: int) -> None:
        """So many streams at least, and further ones until so many faults have struck; then all is as before."""
        begun, striking = 0, asyncio.create_task(self._strike_all(rng, faults))
        watching = asyncio.create_task(self._watch())
        draws = random.Random(rng.random())

        async def keep_asking() -> None:
            nonlocal begun
            while begun < streams or not striking.done():
                begun += 1
                leaves = draws.randrange(0, 20) if draws.random() < LEAVING else None
                salt = f"{draws.random()}" if draws.random() < 0.5 else ""
                await self.read(draws.choice(scripts), leaves, salt)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(keep_asking())
                group.create_task(_finished(striking))
        finally:
            for task in (watching, striking):
                task.cancel()
            await asyncio.gather(watching, striking, return_exceptions=True)
        await self._fleet.settle(NAMES, time.monotonic(), may_hold=False)
        assert self._server.service.cluster()["live_requests"] == 0

    async def _watch(self) -> None:
        """Remember when a new request last found no workers."""
        while True:
            if not self._server.service.health().ready:
                self._none_left = time.monotonic()
            await asyncio.sleep(LOOK)

    # --- faults ----------------------------------------------------------------------------------------------------

    async def _strike_all(self, rng: random.Random, faults: int) -> None:
        kinds: list[Callable[[random.Random], Awaitable[None]]] = [
            self._kill,
            self._stop,
            self._cut,
            self._silence,
            self._kill_a_role,
            self._stop_briefly,
        ]
        for number in range(faults):
            kind = kinds[number % len(kinds)]
            self.struck[kind.__name__.strip("_")] += 1
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            try:
                await kind(rng)
            except BaseException as error:
                error.add_note(f"fault {number}: {kind.__name__}")
                raise

    async def _kill(self, rng: random.Random) -> None:
        name = rng.choice(NAMES)
        await self._kill_and_hire((name,), rng.uniform(0.0, 0.5))

    async def _kill_a_role(self, rng: random.Random) -> None:
        role = rng.choice(("prefill", "decode"))
        await self._kill_and_hire(tuple(name for name in NAMES if name.startswith(role)), rng.uniform(0.0, 0.5))

    async def _kill_and_hire(self, names: tuple[str, ...], pause: float) -> None:
        for name in names:
            self._fleet.hands[name].signal(signal.SIGKILL)
        await asyncio.sleep(pause)
        for name in names:
            await self._fleet.hands[name].end()
        await self._fleet.hire(*names)

    async def _stop(self, rng: random.Random) -> None:
        await self._stop_for(rng, rng.uniform(1.1 * self._lost, 1.5 * self._lost))

    async def _stop_briefly(self, rng: random.Random) -> None:
        await self._stop_for(rng, rng.uniform(0.0, self._lost))

    async def _stop_for(self, rng: random.Random, seconds: float) -> None:
        hand = self._fleet.hands[rng.choice(NAMES)]
        await hand.stop()
        await asyncio.sleep(seconds)
        hand.signal(signal.SIGCONT)
        await until(lambda: hand.pid in self._fleet.live_pids(), "the heartbeat of the resumed worker")

    async def _cut(self, rng: random.Random) -> None:
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(NAMES)
            self._links[name].cut()
            await asyncio.sleep(rng.uniform(0.0, 0.4))
        pid = self._fleet.hands[name].pid
        await until(lambda: pid in self._fleet.live_pids(), "the heartbeat over a new connection")

    async def _silence(self, rng: random.Random) -> None:
        """Nothing goes through for a while; then all of it does, or the connections are gone."""
        name = rng.choice(NAMES)
        link, pid = self._links[name], self._fleet.hands[name].pid
        link.fall_silent()
        await asyncio.sleep(rng.uniform(0.1, 1.5 * self._lost))
        if rng.random() < 0.5:
            link.cut()
        link.resume()
        await until(lambda: pid in self._fleet.live_pids(), "the heartbeat over the link")


async def _finished(task: asyncio.Task[None]) -> None:
    await task


@asynccontextmanager
async def storm(crew: Crew, model: Path, scheme: str) -> AsyncIterator[Storm]:
    """The router with its front, its workers behind links, and a client."""
    # What only waits for its turn on a busy machine is not lost.
    lost = min(allowed(LOST), LONGEST)
    config = RouterConfig(
        model=MODEL,
        tokenizer=str(model),
        port=0,
        worker_timeout=lost,
        lease_ttl=min(allowed(LEASE), LONGEST),
        worker_wait=20.0,
        # A busy machine loses workers that only wait for their turn: what is looked at is the text, not the bound.
        max_attempts=32,
    )
    server = RouterServer(config)
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            links = {name: await stack.enter_async_context(link_to(server.hub_endpoint)) for name in NAMES}
            fleet = Fleet(server.service, crew, model, scheme, lambda name: links[name].endpoint)
            client = await stack.enter_async_context(AsyncClient(server.url, model=MODEL, retries=0))
            await fleet.hire(*NAMES)
            yield Storm(server, client, fleet, links, lost)
    finally:
        await server.stop()
