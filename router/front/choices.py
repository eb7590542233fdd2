"""Runs the generations of one request and merges their pieces.

Life cycle of :class:`Choices`: made from a plan; :meth:`~Choices.pieces` is iterated once, until it ends or is closed,
and either way no generation stays open behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress

from protocol.errors import InvariantViolation
from router.front.generation import GenerationService, Outputs
from router.front.plan import Plan
from router.front.text import OutputText, Piece, TextDecoder

QUEUED_PIECES = 64
"""Pieces of all choices that wait for a slow client; then the choices wait."""

Indexed = tuple[int, Piece]


class Choices:
    """The choices of one request.

    Attributes:
        texts: by index; their token counts and reports are final once all pieces came.
        leaders: for each the index of the first one of the same prompt.
    """

    def __init__(self, service: GenerationService, decoder: TextDecoder, plan: Plan) -> None:
        self._service = service
        self._plan = plan
        self.texts = tuple(
            OutputText(
                decoder,
                plan.stops,
                generation.sampling.min_tokens,
                shows_tokens=plan.logprobs is not None,
                echo=plan.echoes[index // plan.candidates] if plan.echoes else None,
                silent=plan.silent,
                calls=plan.calls,
            )
            for index, generation in enumerate(plan.generations)
        )
        self.leaders = plan.leaders()
        # Prompts whose scores a stream shows before any choice of theirs: set when these are there.
        self._told = {
            leader: asyncio.Event()
            for leader in self.leaders
            if plan.stream and plan.generations[leader].prompt_logprobs is not None
        }

    def pieces(self) -> AsyncGenerator[Indexed, None]:
        """Pieces of all choices as they come, each with its choice's index.

        Raises:
            KVFerryError: one choice failed; the others are closed.
        """
        if len(self.texts) > 1:
            return self._all()
        return self._one(0, self._service.generate(self._plan.generations[0]))

    async def _one(self, index: int, source: Outputs) -> AsyncGenerator[Indexed, None]:
        text = self.texts[index]
        last: Piece | None = None
        async with aclosing(source) as outputs:
            async for output in outputs:
                piece = text.push(output)
                if piece.finish_reason is None:
                    yield index, piece
                    continue
                last = piece
                with suppress(StopAsyncIteration):
                    # The service ends on its own terms, or since there is all that is wanted: a stop string, a call.
                    await outputs.asend(None if output.finish_reason is not None else piece.finish_reason)
                break
        if last is None:
            raise InvariantViolation("a generation ended without a finish reason")
        trace = self._plan.generations[index].trace
        if trace is not None:
            # What ends a choice is in its text as well: a stop string, a call of a tool.
            trace.finish_reason = last.finish_reason
        # Only now: a client that is slow to take the end holds no worker.
        yield index, last

    async def _all(self) -> AsyncGenerator[Indexed, None]:
        queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(QUEUED_PIECES)

        async def feed(index: int, outputs: Outputs) -> None:
            try:
                async with aclosing(self._one(index, outputs)) as source:
                    async for piece in source:
                        await self._wait_for_scores(index)
                        await queue.put(piece)
            except Exception as error:  # it is raised again where the pieces are read
                await queue.put(error)
            else:
                await queue.put(None)

        tasks: list[asyncio.Task[None]] = []
        with ExitStack() as admitted:
            try:
                for indices in self._by_prompt():
                    generations = [self._plan.generations[index] for index in indices]
                    sources = admitted.enter_context(self._service.together(generations))
                    tasks += [asyncio.create_task(feed(*each)) for each in zip(indices, sources, strict=True)]
                open_choices = len(tasks)
                while open_choices:
                    item = await queue.get()
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        open_choices -= 1
                    else:
                        yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_scores(self, index: int) -> None:
        """A choice has its first piece; hold it back until the prompt's scores are there, which its leader brings.

        They come together but after a failover, where each choice is placed by itself and one may overtake its leader.
        """
        told = self._told.get(self.leaders[index])
        if told is None:
            return
        if index == self.leaders[index]:
            told.set()
        await told.wait()

    def _by_prompt(self) -> list[list[int]]:
        """Indices of the choices, those of one prompt together."""
        groups: dict[int, list[int]] = {}
        for index, leader in enumerate(self.leaders):
            groups.setdefault(leader, []).append(index)
        return list(groups.values())
