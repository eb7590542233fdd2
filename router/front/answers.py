"""Sends an answer: whole, or as events.

Life cycle of an :class:`Answer`: made for one request, :meth:`Answer.send` once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

from router.front.choices import Choices
from router.front.echo import shown_prompt
from router.front.exchange import Exchange
from router.front.formats import AnswerFormat, Result, Timings, Usage, event
from router.front.logprobs import ShownToken
from router.front.plan import Plan
from router.front.prompt_logprobs import prompt_logprobs
from router.front.text import OutputText
from router.front.tool_calls import CallDelta, gathered
from router.tokenizer import Tokenizer

ECHOED_TOKENS = 512
"""Prompt tokens in one event at most, where a stream begins with their log-probabilities."""


class Answer:
    """One answer on its way.

    Args:
        exchange: to whom.
        form: how it is written.
        choices: what is told.
        plan: what was asked for.
        tokenizer: of the prompts.
    """

    def __init__(
        self, exchange: Exchange, form: AnswerFormat, choices: Choices, plan: Plan, tokenizer: Tokenizer
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._choices = choices
        self._plan = plan
        self._tokenizer = tokenizer

    async def send(self) -> None:
        """All of it.

        Raises:
            KVFerryError: a choice failed; nothing was sent yet unless the exchange says so.
            RequestCancelled: the client takes no more.
        """
        await (self._stream() if self._plan.stream else self._collect())

    async def _collect(self) -> None:
        texts: list[list[str]] = [[] for _ in self._choices.texts]
        tokens: list[list[ShownToken]] = [[] for _ in texts]
        calls: list[list[CallDelta]] = [[] for _ in texts]
        results: dict[int, Result] = {}
        async with aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                texts[index].append(piece.text)
                tokens[index].extend(piece.tokens)
                calls[index].extend(piece.calls)
                if piece.finish_reason is not None:
                    results[index] = Result(
                        "".join(texts[index]), piece.finish_reason, tuple(tokens[index]), gathered(calls[index])
                    )
        if any(text.prompt_tables for text in self._choices.texts):
            # A long prompt has many of them: streams do not wait while they are written.
            body = await asyncio.to_thread(self._whole, results)
        else:
            body = self._whole(results)
        await self._exchange.respond(200, body)

    def _whole(self, results: dict[int, Result]) -> bytes:
        kept = self._kept()
        shown = []
        for index in kept:
            result = results[index]
            if self._plan.echoes:
                text = self._plan.echoes[index // self._plan.candidates].text + result.text
                result = Result(text, result.finish_reason, (*self._echoed(index), *result.tokens))
            shown.append(result)
        prompts = None
        if self._plan.prompt_logprobs is not None:
            wanted = self._plan.prompt_logprobs
            told = {
                leader: prompt_logprobs(
                    self._tokenizer, self._prompt(leader), self._leader(leader).prompt_tables, wanted
                )
                for leader in {self._choices.leaders[index] for index in kept}
            }
            prompts = [told[self._choices.leaders[index]] for index in kept]
        return self._form.whole(shown, self._usage(), self._timings(kept), prompts)

    async def _stream(self) -> None:
        """The first event goes out when the first token is there: until then an error has its own status."""
        exchange, form = self._exchange, self._form
        opened: set[int] = set()
        open_choices = len(self._choices.texts)
        async with aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                data = b""
                if not exchange.started:
                    await exchange.start_events()
                if index not in opened:
                    opened.add(index)
                    data = form.opening(index)
                    if self._plan.echoes:
                        for echoed in await self._echo_events(index):
                            await exchange.write(data + echoed)
                            data = b""
                if piece.text or piece.tokens:
                    data += form.text(index, piece.text, piece.tokens)
                for call in piece.calls:
                    data += form.call(index, call)
                if piece.finish_reason is not None:
                    closing = form.closing(index, piece.finish_reason)
                    open_choices -= 1
                    if not open_choices:
                        timings = self._timings(range(len(self._choices.texts)))
                        await exchange.end(data + form.ending(closing, self._usage(), timings))
                        return
                    data += event(closing)
                if data:
                    await exchange.write(data)

    async def _echo_events(self, index: int) -> list[bytes]:
        """The prompt before a choice: its text in the first event, its tokens over as many as they need."""
        text = self._plan.echoes[index // self._plan.candidates].text
        if not self._leader(index).prompt_tables:
            return [self._form.text(index, text, self._echoed(index))]

        def written() -> Iterator[bytes]:
            tokens = self._echoed(index)
            for at in range(0, len(tokens), ECHOED_TOKENS):
                yield self._form.text(index, "" if at else text, tokens[at : at + ECHOED_TOKENS])

        return await asyncio.to_thread(lambda: list(written()))

    def _echoed(self, index: int) -> list[ShownToken]:
        """The prompt's tokens, where the choice shows any."""
        if self._plan.logprobs is None:
            return []
        text = self._plan.echoes[index // self._plan.candidates].text
        tables = self._leader(index).prompt_tables
        return shown_prompt(self._tokenizer, self._prompt(index), text, tables, self._plan.logprobs)

    def _leader(self, index: int) -> OutputText:
        return self._choices.texts[self._choices.leaders[index]]

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self._plan.generations[index].token_ids

    def _kept(self) -> list[int]:
        """The candidates that become choices, each prompt's in their order."""
        plan, texts = self._plan, self._choices.texts
        if plan.kept == plan.candidates:
            return list(range(len(texts)))
        kept: list[int] = []
        for first in range(0, len(texts), plan.candidates):
            ranked = sorted(range(first, first + plan.candidates), key=lambda index: -texts[index].mean_logprob)
            kept += ranked[: plan.kept]
        return kept

    def _usage(self) -> Usage:
        texts = self._choices.texts
        reports = [text.report for text in texts[:: self._plan.candidates]]
        return Usage(
            prompt_tokens=self._plan.prompt_tokens,
            completion_tokens=sum(text.tokens for text in texts),
            # As a prompt counts once, so does what was found of it.
            cached_tokens=sum(report.cached_tokens for report in reports if report is not None),
        )

    def _timings(self, indices: list[int] | range) -> Timings:
        return tuple(self._choices.texts[index].report for index in indices)
