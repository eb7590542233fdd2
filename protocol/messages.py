"""Every message of the request plane, as frozen typed structs with a bound on each length.

Who sends what::

    router -> prefill   Prefill, Cancel            prefill -> router   PromptLogprobs, Tokens, Failed, Heartbeat
    (and between router and either: the messages of :mod:`protocol.kv_events`)
    router -> decode    Reserve, Prefill, Cancel   decode  -> router   PromptLogprobs, Tokens, Failed, Heartbeat
    decode -> prefill   Grant, Renew, Settle, Abort
    prefill -> decode   Handover, Refuse, Renew

Times are durations in seconds: two hosts never compare clocks. A late message, known by its ``RequestKey`` and the
sender's incarnation, changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.error_info import MAX_TEXT, ErrorInfo, Text
from protocol.errors import ConfigError
from protocol.forks import MAX_FORKS, Forks
from protocol.histogram import SECONDS, Histogram
from protocol.ids import Address, BlockId, Peer, RequestKey, Role, Ticket, WorkerId
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from protocol.layout import KVLayout
from protocol.pool_counts import Count, PoolCounts
from protocol.prompt_logprobs import PromptLogprobs
from protocol.sampling import MAX_LOGPROBS, FinishReason, SamplingParams, TokenId, TokenLogprobs
from protocol.stage_times import Seconds, StageTimes
from protocol.transfer_counts import TransferCounts
from protocol.versions import UNTOLD, Versions
from protocol.wire_layout import WireDtype, WireLayout

MAX_TOKENS = 1 << 20
"""Longest token list in one message: a million tokens of context."""
MAX_BLOCKS = 1 << 20
MAX_ADDRESSES = 8
MAX_SALT = 128

TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_TOKENS)]
BlockIds = Annotated[tuple[BlockId, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
Generations = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...], msgspec.Meta(max_length=MAX_BLOCKS)
]
Seniority = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Salt = Annotated[str, msgspec.Meta(max_length=MAX_SALT)]
TraceParent = Annotated[str, msgspec.Meta(max_length=55)]
"""A span to go on from, as W3C's Trace Context writes it (version 00); "" where nothing is traced."""


class WorkerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is, fixed for one incarnation.

    Attributes:
        role: prefill or decode.
        model: the served model's name.
        vocab_size: token ids lie below this.
        max_model_len: prompt plus output tokens at most.
        layout: of its pool.
        num_blocks: of its pool, block 0 included.
        peer_endpoint: where other workers reach it on the request plane (prefill only; "" elsewhere).
        kv_addresses: where its KV receiver listens, one URI per transport (decode only).
        device: "cpu" or "cuda:0" and the like.
        pid: of its process.
        step_tokens: that a step of it takes at most; 0 where that is not told.
        prefills: whether it computes prompts beside its decode steps when it is sent a Prefill (decode only).
        max_sequences: that a step of it takes at most; 0 where that is not told.
        link_rate: bytes per second that its network could carry from and to other hosts; 0 where that is not known.
    """

    role: Role
    model: Annotated[str, msgspec.Meta(max_length=256)]
    vocab_size: Count
    max_model_len: Count
    layout: KVLayout
    num_blocks: Count
    peer_endpoint: Annotated[str, msgspec.Meta(max_length=256)] = ""
    kv_addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    device: Annotated[str, msgspec.Meta(max_length=64)] = "cpu"
    pid: Count = 0
    step_tokens: Count = 0
    prefills: bool = False
    max_sequences: Count = 0
    link_rate: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is doing; counters grow from the start of the incarnation.

    Attributes:
        pool: blocks by state.
        waiting: requests that wait for a step or a reservation.
        waiting_tokens: prompt tokens not yet computed (prefill), or reserved for (decode).
        running: sequences in the step batch.
        open_leases, open_imports: handoffs under way.
        steps, step_seconds: forward steps and the time in them.
        step_age: seconds since the step loop last came round: a wedged loop shows here.
        prefill_tokens, cached_tokens, decode_tokens: computed, skipped by a prefix hit, generated.
        kv_blocks, kv_bytes, kv_seconds: shipped (prefill) or landed (decode).
        preemptions, failures: requests given back or failed.
        swaps, swapped_blocks: sequences put into host memory to make room, and blocks that are there now (decode).
        transport_fallbacks: decode workers that a better transport was offered by than could be used (prefill).
        draining: takes no new work.
        used_slots: of the blocks in use: each holds one token's KV, or will.
        empty_slots: those of them for which there is no token, behind the last one of a sequence.
        step_fixed, step_per_token: seconds of a step whatever is in it, and that each token in it adds, as measured
            lately; 0 before the first steps. A decode step has one token for each sequence, or more with drafts.
        decode_turns: sequences that took part in decode steps, counted at each step.
        draft_tokens, accepted_tokens: guessed ahead of the model, and found right by it (decode).
        step_gaps: seconds from the end of a step to the begin of the next, while there was work.
        spans_exported, spans_dropped: of traces, that a collector has taken, and that were lost.
        step_mean_tokens: of a step in the mean, lately: ``step_fixed`` and ``step_per_token`` say most of such a one.
    """

    pool: PoolCounts
    waiting: Count = 0
    waiting_tokens: Count = 0
    running: Count = 0
    open_leases: Count = 0
    open_imports: Count = 0
    steps: Count = 0
    step_seconds: Seconds = 0.0
    step_age: Seconds = 0.0
    prefill_tokens: Count = 0
    cached_tokens: Count = 0
    decode_tokens: Count = 0
    kv_blocks: Count = 0
    kv_bytes: Count = 0
    kv_seconds: Seconds = 0.0
    preemptions: Count = 0
    failures: Count = 0
    transport_fallbacks: Count = 0
    draining: bool = False
    swaps: Count = 0
    swapped_blocks: Count = 0
    decode_turns: Count = 0
    draft_tokens: Count = 0
    accepted_tokens: Count = 0
    used_slots: Count = 0
    empty_slots: Count = 0
    step_fixed: Seconds = 0.0
    step_per_token: Seconds = 0.0
    step_gaps: Histogram = Histogram()
    spans_exported: Count = 0
    spans_dropped: Count = 0
    step_mean_tokens: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        if not self.step_gaps.fits(SECONDS):
            raise ConfigError(f"step_gaps has {len(self.step_gaps.counts)} buckets", field="step_gaps")

    @property
    def empty_share(self) -> float:
        """Share of the pool's memory in use that is wasted on slots without a token."""
        return self.empty_slots / self.used_slots if self.used_slots else 0.0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Worker to every router, twice a second: enough for a router that has just started to know the worker.

    ``kv_sequence`` is the number of the last KV events of its prefix cache.
    """

    profile: WorkerProfile
    load: WorkerLoad
    transfer: TransferCounts = TransferCounts()
    kv_sequence: Count = 0


class PrefillAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill worker that a decode worker shall send its grant to."""

    peer: Peer
    endpoint: Address


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Router to prefill: compute this prompt. To a decode worker: compute it, and go on with it.

    Attributes:
        key: request and attempt.
        token_ids: the prompt; on a retry, prompt plus tokens already emitted.
        emitted: how many of the last of ``token_ids`` were emitted by earlier attempts.
        sampling: how to draw the first token.
        handoff: the decode worker that will take over, the receiver itself where it is one; None when the request ends
            with the first token.
        lease_ttl: seconds the lease lives without a sign of its reader.
        cache_salt: prefix-cache namespace.
        prompt_logprobs: how many alternatives are wanted beside each prompt token's log-probability; None wants none.
        prompt_logprobs_from: index of the first prompt token of which none is known yet; token 0 has none.
        forks: further continuations of the prompt, drawn and handed over with this one.
        seniority: seconds that the request counts as having waited, its priority included; the highest goes first.
        traceparent: the attempt's span.
    """

    key: RequestKey
    token_ids: TokenIds
    emitted: Count = 0
    sampling: SamplingParams
    handoff: Peer | None
    lease_ttl: Seconds = 30.0
    cache_salt: Salt = ""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs_from: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 1
    forks: Forks = ()
    seniority: Seniority = 0.0
    traceparent: TraceParent = ""


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Router to decode: make room for this request, and fetch its KV from ``prefill``. Fields as in Prefill.

    ``prefill_rate`` is the prompt tokens per second that ``prefill`` gets through; 0 when it is not known yet.
    """

    key: RequestKey
    token_ids: TokenIds
    emitted: Count = 0
    sampling: SamplingParams
    prefill: PrefillAddress
    lease_ttl: Seconds = 30.0
    cache_salt: Salt = ""
    forks: Forks = ()
    seniority: Seniority = 0.0
    prefill_rate: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    traceparent: TraceParent = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Router to either leg: this attempt is over. Idempotent; may overtake the message that opens the attempt.

    Attributes:
        satisfied: since the client has all that it wants, as after a stop string; nobody has given anything up.
    """

    key: RequestKey
    reason: Text = ""
    satisfied: bool = False


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Either leg to router: output tokens.

    Attributes:
        start: index of the first of them in the request's whole output, over all attempts; a duplicate is known by it.
        finish_reason: set with the last token. A stop token is sent, and counted, but is not part of the text.
        logprobs: one per token where the request asked for them, none elsewhere.
        times: set on prefill's one message and on decode's first.
    """

    key: RequestKey
    start: Count
    token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=4096)]
    finish_reason: FinishReason | None = None
    times: StageTimes | None = None
    logprobs: Annotated[tuple[TokenLogprobs, ...], msgspec.Meta(max_length=4096)] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Either leg to router: this attempt cannot go on here."""

    key: RequestKey
    error: ErrorInfo


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Decode to prefill: write these blocks of mine.

    Attributes:
        router: who asked for the attempt.
        first_block: logical index of the first wanted block of the sequence; earlier ones decode has.
        blocks: destination block ids of logical blocks ``first_block ...``.
        generations: each block's generation; a span for another generation is refused.
        layout: of the destination pool.
        addresses: where the receiver listens, one URI per transport; the prefill worker takes its pick.
        ticket: proves to the receiver that the sender was granted this.
        ttl: seconds until the import expires.
        wire_dtype: element type in which the blocks shall cross; None is the pool's own.
    """

    key: RequestKey
    first_block: Count
    blocks: BlockIds
    generations: Generations
    layout: KVLayout
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    ticket: Ticket
    ttl: Seconds
    wire_dtype: WireDtype | None = None

    @property
    def wire(self) -> WireLayout:
        """The form in which the blocks shall cross."""
        return WireLayout(self.layout, self.wire_dtype)

    @property
    def nbytes(self) -> int:
        """That the blocks come to as they cross."""
        return len(self.blocks) * self.wire.block_bytes


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """A sign of life that keeps a lease, or an import, ``ttl`` seconds more.

    Decode sends it while the request waits for room and while its blocks land; prefill answers in kind as long as the
    prompt is not computed, so that a long prefill queue does not let an import expire.
    """

    key: RequestKey
    ttl: Seconds


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag="settle"):
    """Decode to prefill: committed; close the lease."""

    key: RequestKey


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Decode to prefill: I no longer want it; the ticket is void."""

    key: RequestKey
    error: ErrorInfo


class Handover(msgspec.Struct, frozen=True, kw_only=True, tag="handover"):
    """Prefill to decode: every wanted block is written, or in a ship under way; go on from here once all have landed.

    Attributes:
        num_tokens: tokens whose KV was computed (the whole prompt).
        next_token: the first token, drawn by prefill; its KV is decode's to compute.
        blocks, nbytes: written under the grant, or about to be; decode compares them with what lands.
        ticket: of the grant that was answered.
        tail: seconds from the last chunk's end to this message: none unless the grant came later.
        fork_tokens: the first token of each fork, in the order that they were asked for.
    """

    key: RequestKey
    num_tokens: Count
    next_token: TokenId
    blocks: Count
    nbytes: Count
    ticket: Ticket
    tail: Seconds = 0.0
    fork_tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_FORKS)] = ()


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """Prefill to decode: there is no such lease (any more); nothing further will be written under it."""

    key: RequestKey
    error: ErrorInfo


_Routed = Heartbeat | Prefill | Reserve | Cancel | PromptLogprobs | Tokens | Failed | KVFollow | KVEvents | KVSnapshot
Message = _Routed | Grant | Renew | Settle | Abort | Handover | Refuse
"""Anything that may travel on the request plane."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Who sent it, and what, and which versions of the wire the sender speaks."""

    sender: Peer
    body: Message
    speaks: Versions = UNTOLD


__all__ = [
    "MAX_TEXT",
    "Abort",
    "Cancel",
    "Envelope",
    "ErrorInfo",
    "Failed",
    "Grant",
    "Handover",
    "Heartbeat",
    "Message",
    "PoolCounts",
    "Prefill",
    "PrefillAddress",
    "PromptLogprobs",
    "Refuse",
    "Renew",
    "Reserve",
    "Settle",
    "StageTimes",
    "Tokens",
    "WorkerId",
    "WorkerLoad",
    "WorkerProfile",
]
