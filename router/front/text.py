"""Outputs of one generation to pieces of text: detokenised, cut at the first stop string.

Life cycle of an :class:`OutputText`: :meth:`~OutputText.push` for each output until a piece has a finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.prompt_logprobs import LogprobTable
from router.front.detokenizer import Decoder, Detokenizer
from router.front.echo import Echo
from router.front.generation import EndReason, GenerationReport, Output
from router.front.logprobs import ShownToken, Spelling
from router.front.stop_strings import StopMatcher
from router.front.tool_calls import CallDelta
from router.front.tools import CallReading


class TextDecoder(Decoder, Spelling, Protocol):
    """What is needed of a tokenizer."""


@dataclass(frozen=True)
class Piece:
    """The next piece of one choice's text; with a finish reason it is the last.

    Attributes:
        text: may be empty.
        finish_reason: set on the last.
        tokens: those that came with it, where log-probabilities are shown; text may lag behind them.
        calls: what came with it of calls of tools, behind its text; they are no text themselves.
    """

    text: str
    finish_reason: EndReason | None
    tokens: tuple[ShownToken, ...] = ()
    calls: tuple[CallDelta, ...] = ()


class OutputText:
    """The text of one choice.

    Args:
        decoder: of its tokens.
        stops: strings that end it.
        min_tokens: none of them does before so many tokens.
        shows_tokens: whether pieces carry tokens with their log-probabilities, where the service tells them.
        echo: the prompt that goes before it, where it does.
        silent: nothing of the output is wanted, only its end.
        calls: how calls of tools are found in it.

    Attributes:
        tokens: output tokens so far, a final stop token included, none after a stop string.
        report: the newest that the service gave.
        prompt_tables: what the service told of the prompt's tokens.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stops: tuple[str, ...],
        min_tokens: int,
        *,
        shows_tokens: bool = True,
        echo: Echo | None = None,
        silent: bool = False,
        calls: CallReading | None = None,
    ) -> None:
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._shows_tokens = shows_tokens
        self._silent = silent
        self._parser = None if calls is None else calls.parser()
        self._one_call = calls is not None and calls.single
        self._characters = 0
        self._logprob = 0.0
        self.tokens = 0
        self.report: GenerationReport | None = None
        self.prompt_tables: tuple[LogprobTable, ...] = ()
        if echo is not None:
            self._characters = len(echo.text)
            for token_id in echo.tail:
                self._detokenizer.push(token_id)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per output token, a final stop token included."""
        return self._logprob / max(1, self.tokens)

    def push(self, output: Output) -> Piece:
        """The piece for ``output``; on a stop string, or the one call that is wanted, it ends there."""
        piece = self._spoken(output)
        if self._parser is None:
            return piece
        text, calls = self._parser.push(piece.text)
        reason = piece.finish_reason
        if self._one_call and self._parser.complete:
            # What the same piece says of further calls is not wanted.
            return Piece(text, "tool_calls", piece.tokens, tuple(call for call in calls if call.index == 0))
        if reason is not None:
            text += self._parser.flush()
        if reason == "stop" and self._parser.complete:
            reason = "tool_calls"
        return Piece(text, reason, piece.tokens, calls)

    def _spoken(self, output: Output) -> Piece:
        self.report = output.report or self.report
        self.prompt_tables += output.prompt_logprobs
        if self._silent:
            return Piece("", None if output.finish_reason is None else "length")
        token_ids = output.token_ids
        # The token that ended the request is counted, but it is no text.
        last = len(token_ids) - 1 if output.finish_reason == "stop" else len(token_ids)
        parts: list[str] = []
        shown: list[ShownToken] = []
        for index, token_id in enumerate(token_ids[:last]):
            self.tokens += 1
            if output.logprobs:
                self._logprob += output.logprobs[index].logprob
            if output.logprobs and self._shows_tokens:
                shown.append(ShownToken.of(self._decoder, token_id, output.logprobs[index], self._characters))
            text = self._detokenizer.push(token_id)
            self._characters += len(text)
            if self._add(text, parts):
                return Piece("".join(parts), "stop", tuple(shown))
        self.tokens += len(token_ids) - last
        self._logprob += sum(ending.logprob for ending in output.logprobs[last:])
        if output.finish_reason is not None:
            if self._add(self._detokenizer.flush(), parts):
                return Piece("".join(parts), "stop", tuple(shown))
            parts.append(self._matcher.flush())
        return Piece("".join(parts), output.finish_reason, tuple(shown))

    def _add(self, text: str, parts: list[str]) -> bool:
        """Pass text through the matcher, and tell whether it ended a stop string."""
        if self.tokens <= self._min_tokens:
            parts.append(text)
            return False
        passed, stopped = self._matcher.push(text)
        parts.append(passed)
        return stopped
