"""Where the time of one attempt went, as its legs tell the router."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.pool_counts import Count

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time of one attempt went; each leg fills in what it saw. Durations in seconds.

    Attributes:
        prefill_queue: prefill's: arrival to first chunk.
        prefill: prefill's: first chunk to first token.
        cached_tokens: prefill's: prompt tokens skipped by its prefix cache.
        reserve_wait: decode's: arrival to grant.
        ship: time the transport spent on this request's spans.
        handoff: end of the last chunk to commit, without the network's flight time.
        decode_step: decode's: commit to its first token.
        kv_blocks, kv_bytes: that crossed.
        decode_cached_blocks: blocks decode already had and did not ask for.
        transport: URI scheme the bytes went by.
    """

    prefill_queue: Seconds = 0.0
    prefill: Seconds = 0.0
    cached_tokens: Count = 0
    reserve_wait: Seconds = 0.0
    ship: Seconds = 0.0
    handoff: Seconds = 0.0
    decode_step: Seconds = 0.0
    kv_blocks: Count = 0
    kv_bytes: Count = 0
    decode_cached_blocks: Count = 0
    transport: Annotated[str, msgspec.Meta(max_length=32)] = ""
