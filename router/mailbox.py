"""From the service's receive loop to the one reader of a request's answer.

Life cycle: filled by :meth:`Mailbox.put` and once, at the end, by ``put`` with a finish reason or :meth:`Mailbox.fail`;
emptied by :meth:`Mailbox.take`. What a slow reader has not taken yet is joined into one output, so a mailbox never
holds more than the request's own tokens.
"""

from __future__ import annotations

import asyncio

from protocol.errors import KVFerryError
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import FinishReason, TokenLogprobs
from router.front.generation import GenerationReport, Output


class Mailbox:
    """Outputs on their way to one reader."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[LogprobTable, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._report: GenerationReport | None = None
        self._error: KVFerryError | None = None
        self._ready = asyncio.Event()

    def put(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        report: GenerationReport | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[LogprobTable, ...] = (),
    ) -> None:
        """Add tokens; the newest report stands for all."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._prompt_logprobs += prompt_logprobs
        self._finish_reason = finish_reason
        self._report = report or self._report
        self._ready.set()

    def fail(self, error: KVFerryError) -> None:
        """End with ``error``, after what is here already."""
        self._error = error
        self._ready.set()

    async def take(self) -> Output:
        """All that came since the last call, waiting for something to come.

        Raises:
            KVFerryError: the request failed, and everything before was taken.
        """
        await self._ready.wait()
        if self._error is not None and not self._token_ids:
            raise self._error
        output = Output(
            tuple(self._token_ids), self._finish_reason, self._report, tuple(self._logprobs), self._prompt_logprobs
        )
        self._token_ids, self._logprobs, self._prompt_logprobs, self._report = [], [], (), None
        if self._error is None:
            self._ready.clear()
        return output
