"""When things happened to one request, for its report and for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import StageTimes
from router.front.generation import GenerationReport


@dataclass(slots=True)
class Timeline:
    """Moments on the router's monotonic clock, and what the workers told; None where it has not come yet.

    Attributes:
        submitted: arrival.
        placed: first placement on workers.
        first_token: first token of the whole request.
        ended: last token.
        prefill: times of the attempt that gave the request's first token.
        decode: times from the latest attempt's decode worker.
        prefill_worker, decode_worker: names, of the latest attempt.
        local_prefill: why they are one, if they are.
    """

    submitted: float = 0.0
    placed: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefill: StageTimes | None = None
    decode: StageTimes | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    local_prefill: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    def tpot(self, tokens: int) -> float | None:
        """Seconds of each token after the first, where there were any."""
        if self.first_token is None or self.ended is None or tokens < 2:
            return None
        return (self.ended - self.first_token) / (tokens - 1)

    def report(self, request_id: str, attempts: int, now: float) -> GenerationReport:
        """What is known at ``now``."""
        prefill = self.prefill or StageTimes()
        decode = self.decode or StageTimes()
        first = now if self.first_token is None else self.first_token
        waited = 0.0 if self.placed is None else self.placed - self.submitted
        return GenerationReport(
            request_id=request_id,
            attempts=attempts,
            cached_tokens=prefill.cached_tokens,
            queue_s=waited + prefill.prefill_queue,
            prefill_s=prefill.prefill,
            handoff_s=decode.handoff,
            ttft_s=first - self.submitted,
            decode_s=(now if self.ended is None else self.ended) - first,
            kv_blocks=decode.kv_blocks,
            kv_bytes=decode.kv_bytes,
            ship_s=decode.ship,
            transport=decode.transport,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            local_prefill=self.local_prefill,
        )
