"""How a server is asked: what it understands of a request. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.traces.request import TraceRequest
from router.client.wire import stream_request


class Dialect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests a server understands.

    Attributes:
        token_ids: prompts may be token ids; else they are words.
        ignore_eos: an answer can be held to its length (vLLM, SGLang, kvferry).
    """

    token_ids: bool
    ignore_eos: bool

    def body(self, model: str, prompts: PromptMaker, request: TraceRequest) -> bytes:
        """The JSON of a request for a stream."""
        prompt = prompts.tokens(request) if self.token_ids else prompts.text(request)
        # What a server does not know is left out, not sent as false.
        held: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        return stream_request(prompt, model, {"max_tokens": request.output_tokens, "temperature": 0, **held})[1]


DIALECTS = (Dialect(True, True), Dialect(False, True), Dialect(False, False))
"""The best first."""
