"""Every message of the request plane, within its bounds."""

from __future__ import annotations

import typing

from hypothesis import strategies as st

from protocol.forks import Fork
from protocol.histogram import SECONDS, Histogram, Scale
from protocol.ids import Peer, RequestKey
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from protocol.layout import KVLayout
from protocol.messages import (
    Abort,
    Cancel,
    ErrorInfo,
    Failed,
    Grant,
    Handover,
    Heartbeat,
    Message,
    PoolCounts,
    Prefill,
    PrefillAddress,
    Refuse,
    Renew,
    Reserve,
    Settle,
    StageTimes,
    Tokens,
    WorkerLoad,
    WorkerProfile,
)
from protocol.prompt_logprobs import LogprobTable, PromptLogprobs
from protocol.sampling import SamplingParams
from protocol.transfer_counts import SCALES, Outcome, PathCounts, TransferCounts

_id_letters = "abcXYZ012_-"
counts = st.integers(0, (1 << 62) - 1)
token_ids = st.integers(0, (1 << 31) - 1)
seconds = st.floats(0.0, 1e9)
seniorities = st.floats(-1e9, 1e9)
rates = st.floats(0.0, 1e15)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
addresses = st.text("abc:/.0", min_size=1, max_size=30)
tickets = st.binary(min_size=16, max_size=16)
token_lists = st.lists(token_ids, max_size=20).map(tuple)
finish_reasons = st.sampled_from([None, "stop", "length"])

keys = st.builds(RequestKey, st.text(_id_letters, min_size=1, max_size=64), st.integers(0, 1 << 16))
peers = st.builds(Peer, st.text(_id_letters + ".", min_size=1, max_size=128), st.integers(0, (1 << 63) - 1))

_plain_layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 1 << 20),
    kv_heads=st.integers(1, 1 << 20),
    head_dim=st.integers(1, 1 << 20),
    block_size=st.integers(1, 1 << 20),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    order=st.sampled_from(["HND", "NHD"]),
    shard_index=st.just(0),
    shard_count=st.integers(1, 1 << 20),
)
_eight_bit_layouts = st.builds(
    KVLayout,
    num_layers=st.just(2),
    kv_heads=st.integers(1, 1 << 20),
    head_dim=st.integers(1, 1 << 20),
    block_size=st.integers(1, 1 << 20),
    dtype=st.sampled_from(["float8_e4m3", "float8_e5m2"]),
    scales=st.just(()) | st.lists(st.floats(2.0**-64, 2.0**64), min_size=4, max_size=4).map(tuple),
)
layouts = _plain_layouts | _eight_bit_layouts

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, (1 << 31) - 1),
    seed=st.integers(0, (1 << 63) - 1),
    max_tokens=st.integers(5, (1 << 31) - 1),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(token_ids, max_size=64).map(tuple),
)

errors = st.builds(
    ErrorInfo, code=st.text("abc_", max_size=64), message=texts, field=st.none() | st.text("abc", max_size=9)
)
pools = st.builds(PoolCounts, **dict.fromkeys(PoolCounts.__struct_fields__, counts))


def histograms(scale: Scale) -> st.SearchStrategy[Histogram]:
    length = len(scale.bounds) + 1
    full = st.lists(counts, min_size=length, max_size=length).map(tuple)
    return st.builds(Histogram, st.just(()) | full, st.floats(0.0, 1e18))


_load_counts = [name for name in WorkerLoad.__struct_fields__ if name not in ("pool", "draining", "step_gaps")]
loads = st.builds(
    WorkerLoad,
    pool=pools,
    draining=st.booleans(),
    step_gaps=histograms(SECONDS),
    **{name: seconds if name.startswith("step_") or name == "kv_seconds" else counts for name in _load_counts},
)
profiles = st.builds(
    WorkerProfile,
    role=st.sampled_from(["prefill", "decode"]),
    model=texts,
    vocab_size=counts,
    max_model_len=counts,
    layout=layouts,
    num_blocks=counts,
    peer_endpoint=st.just("") | addresses,
    kv_addresses=st.lists(addresses, max_size=8).map(tuple),
    device=st.sampled_from(["cpu", "cuda:0"]),
    pid=counts,
    step_tokens=counts,
    prefills=st.booleans(),
)


_codes = st.dictionaries(st.text("abc_", max_size=64), counts, max_size=8)
paths = st.builds(PathCounts, broken=_codes, **{name: histograms(scale) for name, scale in SCALES.items()})
transfers = st.builds(
    TransferCounts,
    opened=counts,
    ended=st.dictionaries(st.sampled_from(typing.get_args(Outcome)), counts),
    open=counts,
    draining=counts,
    refusals=_codes,
    broken=_codes,
    paths=st.dictionaries(st.sampled_from(["none", "shm", "tcp"]), paths, max_size=2),
)

stage_times = st.builds(
    StageTimes,
    prefill_queue=seconds,
    prefill=seconds,
    cached_tokens=counts,
    reserve_wait=seconds,
    ship=seconds,
    handoff=seconds,
    decode_step=seconds,
    kv_blocks=counts,
    kv_bytes=counts,
    decode_cached_blocks=counts,
    transport=st.sampled_from(["", "tcp", "ucx"]),
)


@st.composite
def logprob_tables(draw: st.DrawFn) -> LogprobTable:
    width, rows = draw(st.integers(0, 20)), draw(st.integers(1, 4))
    columns = [draw(st.binary(min_size=4 * size, max_size=4 * size)) for size in (rows, rows, rows * width)]
    return LogprobTable(width, *columns, draw(st.binary(min_size=len(columns[-1]), max_size=len(columns[-1]))))


_leg = {
    "key": keys,
    "token_ids": token_lists,
    "emitted": counts,
    "sampling": samplings,
    "lease_ttl": seconds,
    "cache_salt": st.text("salt", max_size=128),
    "seniority": seniorities,
    "traceparent": st.text("0123456789abcdef-", max_size=55),
    "forks": st.lists(st.builds(Fork, keys, st.integers(0, (1 << 63) - 1)), max_size=4).map(tuple),
}

MESSAGES: dict[type[Message], st.SearchStrategy[Message]] = {
    Heartbeat: st.builds(Heartbeat, profile=profiles, load=loads, transfer=transfers, kv_sequence=counts),
    KVFollow: st.builds(KVFollow, sequence=st.none() | counts),
    KVEvents: st.builds(KVEvents, sequence=counts, stored=st.binary(max_size=64), removed=st.binary(max_size=64)),
    KVSnapshot: st.builds(
        KVSnapshot, sequence=counts, page=st.integers(0, 4095), last=st.booleans(), keys=st.binary(max_size=64)
    ),
    Prefill: st.builds(
        Prefill,
        handoff=st.none() | peers,
        prompt_logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs_from=st.integers(1, 1 << 20),
        **_leg,
    ),
    Reserve: st.builds(
        Reserve, prefill=st.builds(PrefillAddress, peer=peers, endpoint=addresses), prefill_rate=rates, **_leg
    ),
    Cancel: st.builds(Cancel, key=keys, reason=texts),
    PromptLogprobs: st.builds(PromptLogprobs, key=keys, start=st.integers(1, 1 << 20), table=logprob_tables()),
    Tokens: st.builds(
        Tokens,
        key=keys,
        start=counts,
        token_ids=st.lists(token_ids, min_size=1, max_size=20).map(tuple),
        finish_reason=finish_reasons,
        times=st.none() | stage_times,
    ),
    Failed: st.builds(Failed, key=keys, error=errors),
    Grant: st.builds(
        Grant,
        key=keys,
        first_block=counts,
        blocks=token_lists,
        generations=st.lists(st.integers(0, (1 << 63) - 1), max_size=20).map(tuple),
        layout=layouts,
        addresses=st.lists(addresses, min_size=1, max_size=8).map(tuple),
        ticket=tickets,
        ttl=seconds,
    ),
    Renew: st.builds(Renew, key=keys, ttl=seconds),
    Settle: st.builds(Settle, key=keys),
    Abort: st.builds(Abort, key=keys, error=errors),
    Handover: st.builds(
        Handover,
        key=keys,
        num_tokens=counts,
        next_token=token_ids,
        blocks=counts,
        nbytes=counts,
        ticket=tickets,
        tail=seconds,
        fork_tokens=token_lists,
    ),
    Refuse: st.builds(Refuse, key=keys, error=errors),
}
"""A strategy for each kind of message."""

messages = st.one_of(*MESSAGES.values())
