"""Tells routers of the first tokens that a prompt's last step drew: its own, and those of its forks."""

from __future__ import annotations

from collections.abc import Callable

from engine.batch import Draw
from engine.prompt import Prompt
from protocol.forks import ForkBook
from protocol.ids import Peer, RequestKey
from protocol.messages import Message, StageTimes, Tokens


class FirstTokens:
    """Sends each continuation of a prompt its first token, as long as it is wanted.

    Args:
        forks: who is wanted; whom the first token ends is dropped from it.
        send: sends a message to a router.
    """

    def __init__(self, forks: ForkBook, send: Callable[[Peer, Message], object]) -> None:
        self._forks = forks
        self._send = send

    def tell(self, prompt: Prompt, draw: Draw, now: float) -> bool:
        """Send the tokens; returns whether a decode worker goes on with any of the continuations."""
        request = prompt.request
        keys = (request.key, *(fork.key for fork in request.forks))
        wanted = self._forks.wanted(request.key)
        # All of them, whatever the first says: each is told.
        going_on = [
            self._tell(prompt, key, each, now)
            for key, each in zip(keys, (draw, *draw.forks), strict=True)
            if key in wanted
        ]
        return any(going_on)

    def _tell(self, prompt: Prompt, key: RequestKey, draw: Draw, now: float) -> bool:
        request = prompt.request
        finish_reason = request.sampling.finish_reason(draw.token_id, request.emitted + 1)
        self._send(
            prompt.router,
            Tokens(
                key=key,
                start=request.emitted,
                token_ids=(draw.token_id,),
                finish_reason=finish_reason,
                logprobs=() if draw.logprobs is None else (draw.logprobs,),
                times=StageTimes(
                    prefill_queue=prompt.started - prompt.arrived,
                    prefill=now - prompt.started,
                    cached_tokens=prompt.cached_tokens,
                ),
            ),
        )
        if finish_reason is None and request.handoff is not None:
            return True
        self._forks.drop(key)
        return False
